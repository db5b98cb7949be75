"""What Caffe's public notebooks do, in the way people write it, on small data made here.

Classification, LeNet with a loop of one's own, fine-tuning, logistic regression from HDF5, net surgery, a Python layer
for several labels, siamese nets. Every script says ``import caffe``.
"""

from __future__ import annotations

import tempfile

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

PATTERNS = np.random.default_rng(5).integers(0, 2, (4, 8, 8))
"""One picture for each class; samples add noise."""


def digits(count, seed, noise=0.3):
    """Return images (count, 1, 8, 8) from 0 to 1, and their labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(PATTERNS), count)
    images = PATTERNS[labels][:, None] * 0.7 + noise * random.random((count, 1, 8, 8))
    return images.astype(np.float32), labels


def write_lmdb(caffe, path, images, labels):
    """Write records as the notebooks do: ``array_to_datum`` into the lmdb module's database, here ours."""
    from poseidon.caffe.io.database import new_database

    with new_database("lmdb", str(path)) as writer:
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            datum = caffe.io.array_to_datum((image * 255).astype(np.uint8), int(label))
            writer.put(b"%08d" % number, datum.SerializeToString())


@pytest.fixture
def here(tmp_path, monkeypatch, caffe):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    caffe.set_mode_cpu()
    caffe.set_random_seed(3)
    # Several would wait for each other longer than they compute here.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(threads)


def lenet(lmdb, batch_size):
    import caffe
    from caffe import layers as L
    from caffe import params as P

    n = caffe.NetSpec()
    n.data, n.label = L.Data(
        batch_size=batch_size, backend=P.Data.LMDB, source=lmdb, transform_param={"scale": 1.0 / 255}, ntop=2
    )
    n.conv1 = L.Convolution(n.data, kernel_size=3, num_output=8, weight_filler={"type": "xavier"})
    n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
    n.fc1 = L.InnerProduct(n.pool1, num_output=16, weight_filler={"type": "xavier"})
    n.relu1 = L.ReLU(n.fc1, in_place=True)
    n.score = L.InnerProduct(n.relu1, num_output=len(PATTERNS), weight_filler={"type": "xavier"})
    n.loss = L.SoftmaxWithLoss(n.score, n.label)
    return n.to_proto()


def test_lenet_with_a_loop_of_ones_own(here, caffe):
    for name, seed, count in (("train", 0, 200), ("test", 1, 100)):
        write_lmdb(caffe, here / f"{name}_lmdb", *digits(count, seed))
        (here / f"{name}.prototxt").write_text(str(lenet(str(here / f"{name}_lmdb"), 20)))
    from caffe.proto import caffe_pb2

    s = caffe_pb2.SolverParameter()
    s.random_seed = 0xCAFFE
    s.train_net = "train.prototxt"
    s.test_net.append("test.prototxt")
    s.test_interval = 500
    s.test_iter.append(5)
    s.max_iter = 10000
    s.type = "SGD"
    s.base_lr, s.momentum, s.weight_decay = 0.05, 0.9, 5e-4
    s.lr_policy, s.gamma, s.power = "inv", 0.0001, 0.75
    s.display, s.snapshot, s.snapshot_prefix = 1000, 5000, "lenet"
    s.solver_mode = caffe_pb2.SolverParameter.CPU
    (here / "solver.prototxt").write_text(str(s))

    solver = caffe.get_solver("solver.prototxt")
    shapes = [(name, blob.data.shape) for name, blob in solver.net.blobs.items()]
    assert shapes[:3] == [("data", (20, 1, 8, 8)), ("label", (20,)), ("conv1", (20, 8, 6, 6))]
    assert solver.net.params["conv1"][0].data.shape == (8, 1, 3, 3)
    first = solver.net.forward()["loss"].item()
    solver.test_nets[0].forward()
    tiled = solver.net.blobs["data"].data[:8, 0].transpose(1, 0, 2).reshape(8, 8 * 8)
    assert np.allclose(tiled[:, :8], digits(200, 0)[0][0, 0], atol=1 / 255)
    solver.step(1)
    assert solver.net.params["conv1"][0].diff[:, 0].any()

    # The loop: losses, the scores of one batch of the test net, and its accuracy every so often.
    niter, test_interval = 60, 20
    train_loss = np.zeros(niter)
    test_acc = np.zeros(niter // test_interval)
    output = np.zeros((niter, 8, len(PATTERNS)))
    for it in range(niter):
        solver.step(1)
        train_loss[it] = solver.net.blobs["loss"].data
        solver.test_nets[0].forward(start="conv1")
        output[it] = solver.test_nets[0].blobs["score"].data[:8]
        if it % test_interval == 0:
            correct = 0
            for _ in range(5):
                solver.test_nets[0].forward()
                correct += sum(
                    solver.test_nets[0].blobs["score"].data.argmax(1) == solver.test_nets[0].blobs["label"].data
                )
            test_acc[it // test_interval] = correct / 100
    assert train_loss[-1] < 0.1 < first
    assert test_acc[-1] > 0.95
    assert not np.array_equal(output[0], output[-1])
    # The test net's weights are the training net's, at any time.
    assert np.array_equal(solver.net.params["fc1"][0].data, solver.test_nets[0].params["fc1"][0].data)


DEPLOY = """
name: "small"
input: "data"
input_shape { dim: 10 dim: 3 dim: 12 dim: 12 }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
  convolution_param { num_output: 6 kernel_size: 3 stride: 2 weight_filler { type: "xavier" } } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
  pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "fc6" type: "InnerProduct" bottom: "pool1" top: "fc6"
  inner_product_param { num_output: 7 weight_filler { type: "xavier" } } }
layer { name: "relu6" type: "ReLU" bottom: "fc6" top: "fc6" }
layer { name: "fc8" type: "InnerProduct" bottom: "fc6" top: "fc8"
  inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "prob" type: "Softmax" bottom: "fc8" top: "prob" }
"""


def deployed(caffe, here):
    """Write a net for use and its weights; return their files."""
    (here / "deploy.prototxt").write_text(DEPLOY)
    caffe.Net("deploy.prototxt", caffe.TEST).save("small.caffemodel")
    return "deploy.prototxt", "small.caffemodel"


def test_classification(here, caffe):
    definition, weights = deployed(caffe, here)
    net = caffe.Net(definition, weights, caffe.TEST)
    mu = np.arange(3 * 16 * 16, dtype=float).reshape(3, 16, 16).mean(1).mean(1)
    transformer = caffe.io.Transformer({"data": net.blobs["data"].data.shape})
    transformer.set_transpose("data", (2, 0, 1))
    transformer.set_mean("data", mu)
    transformer.set_raw_scale("data", 255)
    transformer.set_channel_swap("data", (2, 1, 0))
    net.blobs["data"].reshape(5, 3, 12, 12)

    pixels = np.random.default_rng(2).integers(0, 256, (12, 12, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(here / "cat.png")
    image = caffe.io.load_image("cat.png")
    assert image.shape == (12, 12, 3)
    assert image.max() <= 1
    transformed = transformer.preprocess("data", image)
    assert np.allclose(transformed, pixels[:, :, ::-1].transpose(2, 0, 1) - mu[:, None, None], atol=1e-3)
    net.blobs["data"].data[...] = transformed
    output = net.forward()
    prob = output["prob"][0]
    assert prob.shape == (5,)
    assert prob.sum() == pytest.approx(1, abs=1e-5)
    top = prob.argsort()[::-1][:3]
    assert prob[top[0]] >= prob[top[1]] >= prob[top[2]]
    # Looking inside: activations and filters by layer.
    assert {name: blob.data.shape for name, blob in net.blobs.items()}["pool1"] == (5, 6, 2, 2)
    assert {name: param[0].data.shape for name, param in net.params.items()}["fc6"] == (7, 24)
    filters = net.params["conv1"][0].data
    assert filters.transpose(0, 2, 3, 1).shape == (6, 3, 3, 3)
    assert (net.blobs["conv1"].data[0, :36] >= 0).all()
    shown = transformer.deprocess("data", net.blobs["data"].data[0])
    assert np.allclose(shown, image, atol=1e-5)
    # The same through the Classifier.
    classifier = caffe.Classifier(
        definition, weights, mean=mu, channel_swap=(2, 1, 0), raw_scale=255, image_dims=(12, 12)
    )
    assert np.allclose(classifier.predict([image], oversample=False)[0], prob, atol=1e-5)


CONVOLUTIONAL = (
    DEPLOY.replace("dim: 10 dim: 3 dim: 12 dim: 12", "dim: 1 dim: 3 dim: 20 dim: 20")
    .replace('name: "fc6" type: "InnerProduct"', 'name: "fc6-conv" type: "Convolution"')
    .replace('name: "fc8" type: "InnerProduct"', 'name: "fc8-conv" type: "Convolution"')
    .replace("inner_product_param { num_output: 7", "convolution_param { num_output: 7 kernel_size: 2")
    .replace("inner_product_param { num_output: 5", "convolution_param { num_output: 5 kernel_size: 1")
)


def test_net_surgery(here, caffe):
    (here / "conv.prototxt").write_text(
        'input: "data" input_shape { dim: 1 dim: 1 dim: 20 dim: 20 } layer { name: "conv" type: "Convolution" '
        'bottom: "data" top: "conv" convolution_param { num_output: 3 kernel_size: 5 stride: 1 '
        'weight_filler { type: "gaussian" std: 0.01 } bias_filler { type: "constant" value: 0 } } }'
    )
    net = caffe.Net("conv.prototxt", caffe.TEST)
    image = np.random.default_rng(4).random((20, 20))
    net.blobs["data"].reshape(1, 1, *image.shape)
    net.blobs["data"].data[...] = image[np.newaxis, np.newaxis]
    net.forward()
    before = net.blobs["conv"].data.copy()
    conv0, b = net.blobs["conv"], net.params["conv"][1]
    b.data[...] = 1.0
    net.forward()
    assert np.allclose(conv0.data, before + 1, atol=1e-6)
    blurred = np.exp(-np.square(np.mgrid[-2:3, -2:3]).sum(0) / 2)
    net.params["conv"][0].data[0] = blurred
    net.params["conv"][0].data[1:] = 0
    b.data[...] = 0
    net.forward()
    expected = (np.lib.stride_tricks.sliding_window_view(image, (5, 5)) * blurred).sum((2, 3))
    assert np.allclose(net.blobs["conv"].data[0, 0], expected, atol=1e-4)
    assert not net.blobs["conv"].data[0, 1:].any()

    # Into a fully convolutional net: the weights of inner products are those of convolutions, in the same order.
    definition, weights = deployed(caffe, here)
    (here / "full_conv.prototxt").write_text(CONVOLUTIONAL)
    net = caffe.Net(definition, weights, caffe.TEST)
    params, params_full_conv = ["fc6", "fc8"], ["fc6-conv", "fc8-conv"]
    fc_params = {pr: (net.params[pr][0].data, net.params[pr][1].data) for pr in params}
    net_full_conv = caffe.Net("full_conv.prototxt", weights, caffe.TEST)
    conv_params = {pr: (net_full_conv.params[pr][0].data, net_full_conv.params[pr][1].data) for pr in params_full_conv}
    assert conv_params["fc6-conv"][0].shape == (7, 6, 2, 2)
    for pr, pr_conv in zip(params, params_full_conv, strict=True):
        conv_params[pr_conv][0].flat = fc_params[pr][0].flat
        conv_params[pr_conv][1][...] = fc_params[pr][1]
    net_full_conv.save("full_conv.caffemodel")
    net_full_conv = caffe.Net("full_conv.prototxt", "full_conv.caffemodel", caffe.TEST)
    large = np.random.default_rng(6).random((1, 3, 20, 20)).astype(np.float32)
    out = net_full_conv.forward_all(data=large)["prob"]
    assert out.shape == (1, 5, 3, 3)
    # A map of what the classifier says about each place of the image.
    for row, column in ((0, 0), (1, 2), (2, 1)):
        net.blobs["data"].reshape(1, 3, 12, 12)
        net.blobs["data"].data[...] = large[:, :, 4 * row : 4 * row + 12, 4 * column : 4 * column + 12]
        assert np.allclose(net.forward()["prob"][0], out[0, :, row, column], atol=1e-5)


def test_logistic_regression_from_hdf5(here, caffe):
    random = np.random.default_rng(8)
    x = random.normal(size=(600, 4)).astype(np.float32)
    y = (x @ [1.0, -2.0, 0.5, 0.0] + 0.1 * random.normal(size=600) > 0).astype(np.float32)
    for name, rows in (("train", slice(0, 400)), ("test", slice(400, 600))):
        with h5py.File(f"{name}.h5", "w") as f:
            f["data"] = x[rows]
            f.create_dataset("label", data=y[rows], compression="gzip", compression_opts=1)
        (here / f"{name}.txt").write_text(f"{here / name}.h5\n" * (2 if name == "train" else 1))
    from caffe import layers as L

    def logreg(hdf5, batch_size, hidden):
        n = caffe.NetSpec()
        n.data, n.label = L.HDF5Data(batch_size=batch_size, source=hdf5, ntop=2)
        bottom = n.data
        if hidden:
            n.ip0 = L.InnerProduct(n.data, num_output=12, weight_filler={"type": "xavier"})
            n.relu0 = L.ReLU(n.ip0, in_place=True)
            bottom = n.relu0
        n.ip1 = L.InnerProduct(bottom, num_output=2, weight_filler={"type": "xavier"})
        n.accuracy = L.Accuracy(n.ip1, n.label)
        n.loss = L.SoftmaxWithLoss(n.ip1, n.label)
        return n.to_proto()

    for hidden in (False, True):
        for name in ("train", "test"):
            (here / f"{name}.prototxt").write_text(str(logreg(f"{name}.txt", 10, hidden)))
        (here / "solver.prototxt").write_text(
            'train_net: "train.prototxt" test_net: "test.prototxt" test_iter: 20 test_interval: 1000 max_iter: 100 '
            'base_lr: 0.1 lr_policy: "step" gamma: 0.1 stepsize: 5000 display: 1000 momentum: 0.9 weight_decay: 5e-4 '
            'snapshot: 10000 snapshot_prefix: "logreg" solver_mode: CPU'
        )
        solver = caffe.get_solver("solver.prototxt")
        solver.solve()
        accuracy, batch_size, test_iters = 0.0, solver.test_nets[0].blobs["data"].num, 20
        for _ in range(test_iters):
            solver.test_nets[0].forward()
            accuracy += float(solver.test_nets[0].blobs["accuracy"].data)
        assert batch_size * test_iters == 200
        assert accuracy / test_iters > 0.9, f"hidden {hidden}"


def test_fine_tuning(here, caffe):
    """A net trained for one task, its last layer renamed and learning faster, the rest fixed or slower."""
    from caffe import layers as L
    from caffe import params as P

    images, labels = digits(200, 0)
    style = labels % 2
    write_lmdb(caffe, here / "train_lmdb", images, labels)
    write_lmdb(caffe, here / "style_lmdb", images, style)
    (here / "train.prototxt").write_text(str(lenet(str(here / "train_lmdb"), 20)))
    solver_text = 'train_net: "%s" base_lr: %g momentum: 0.9 lr_policy: "fixed" max_iter: 1000 snapshot_prefix: "x"'
    (here / "solver.prototxt").write_text(solver_text % ("train.prototxt", 0.05))
    solver = caffe.get_solver("solver.prototxt")
    solver.step(60)
    solver.net.save("pretrained.caffemodel")

    weight_param, learned, frozen = {"lr_mult": 1, "decay_mult": 1}, [{"lr_mult": 1}, {"lr_mult": 2}], [{"lr_mult": 0}]

    def tuned(learn_all, train=True):
        n = caffe.NetSpec()
        if train:
            n.data, n.label = L.Data(
                batch_size=20, backend=P.Data.LMDB, source="style_lmdb", transform_param={"scale": 1 / 255}, ntop=2
            )
        else:
            n.data = L.Input(shape={"dim": [10, 1, 8, 8]})
        param = learned if learn_all else frozen * 2
        n.conv1 = L.Convolution(n.data, kernel_size=3, num_output=8, param=param, weight_filler={"type": "xavier"})
        n.pool1 = L.Pooling(n.conv1, kernel_size=2, stride=2, pool=P.Pooling.MAX)
        n.fc1 = L.InnerProduct(n.pool1, num_output=16, param=param, weight_filler={"type": "xavier"})
        n.relu1 = L.ReLU(n.fc1, in_place=True)
        drop = L.Dropout(n.relu1, dropout_ratio=0.1, in_place=True) if train else n.relu1
        if train:
            n.drop1 = drop
        n.score_style = L.InnerProduct(
            drop, num_output=2, param=[weight_param, {"lr_mult": 2}], weight_filler={"type": "gaussian", "std": 0.01}
        )
        if train:
            n.loss = L.SoftmaxWithLoss(n.score_style, n.label)
            n.acc = L.Accuracy(n.score_style, n.label)
        else:
            n.probs = L.Softmax(n.score_style)
        with tempfile.NamedTemporaryFile(mode="w", dir=here, suffix=".prototxt", delete=False) as f:
            f.write(str(n.to_proto()))
            return f.name

    def run_solvers(niter, solvers):
        blobs = ("loss", "acc")
        loss, acc = ({name: np.zeros(niter) for name, _ in solvers} for _ in blobs)
        for it in range(niter):
            for name, s in solvers:
                s.step(1)
                loss[name][it], acc[name][it] = (s.net.blobs[b].data.copy() for b in blobs)
        files = {}
        for name, s in solvers:
            files[name] = f"weights.{name}.caffemodel"
            s.net.save(files[name])
        return loss, acc, files

    (here / "tune.prototxt").write_text(solver_text % (tuned(learn_all=False), 0.005))
    style_solver = caffe.get_solver("tune.prototxt")
    style_solver.net.copy_from("pretrained.caffemodel")
    before = style_solver.net.params["fc1"][0].data.copy()
    assert np.array_equal(before, solver.net.params["fc1"][0].data)
    scratch_solver = caffe.get_solver("tune.prototxt")
    loss, _acc, files = run_solvers(60, [("pretrained", style_solver), ("scratch", scratch_solver)])
    assert np.array_equal(style_solver.net.params["fc1"][0].data, before), "lr_mult 0 must not change it"
    assert loss["pretrained"][-10:].mean() < 0.6 * loss["pretrained"][:3].mean()
    (here / "tune_all.prototxt").write_text(solver_text % (tuned(learn_all=True), 0.005))
    end_to_end = caffe.get_solver("tune_all.prototxt")
    end_to_end.net.copy_from(files["pretrained"])
    loss, _acc, files = run_solvers(30, [("end_to_end", end_to_end)])
    assert not np.array_equal(end_to_end.net.params["fc1"][0].data, before)
    test_net = caffe.Net(tuned(True, train=False), files["end_to_end"], caffe.TEST)
    test_net.blobs["data"].reshape(len(images), 1, 8, 8)
    test_net.blobs["data"].data[...] = images
    assert (test_net.forward()["probs"].argmax(1) == style).mean() > 0.95


SEVERAL_LABELS = '''
import numpy as np
import caffe


class MultilabelDataLayerSync(caffe.Layer):
    """Gives images and a vector of labels, all of which may be 1."""

    def setup(self, bottom, top):
        self.top_names = ["data", "label"]
        params = eval(self.param_str)
        assert "batch_size" in params, "Params must include batch size."
        self.batch_size = params["batch_size"]
        self.batch_loader = BatchLoader(params)
        top[0].reshape(self.batch_size, 1, *params["im_shape"])
        top[1].reshape(self.batch_size, 4)

    def forward(self, bottom, top):
        for itt in range(self.batch_size):
            im, multilabel = self.batch_loader.load_next_image()
            top[0].data[itt, ...] = im
            top[1].data[itt, ...] = multilabel

    def reshape(self, bottom, top):
        pass

    def backward(self, top, propagate_down, bottom):
        pass


class BatchLoader(object):
    def __init__(self, params):
        self.random = np.random.RandomState(params["seed"])
        self.patterns = np.load(params["patterns"])

    def load_next_image(self):
        labels = (self.random.rand(4) < 0.4).astype(np.float32)
        shown = (self.patterns * labels[:, None, None]).max(0)
        return shown + 0.1 * self.random.rand(8, 8), labels
'''


def test_several_labels_from_a_python_layer(here, caffe):
    from caffe import layers as L

    (here / "multilabel_datalayers.py").write_text(SEVERAL_LABELS)
    np.save(here / "patterns.npy", PATTERNS.astype(np.float32))

    def multilabel(seed):
        n = caffe.NetSpec()
        params = {"batch_size": 32, "im_shape": [8, 8], "seed": seed, "patterns": "patterns.npy"}
        n.data, n.label = L.Python(
            module="multilabel_datalayers", layer="MultilabelDataLayerSync", ntop=2, param_str=str(params)
        )
        n.fc = L.InnerProduct(n.data, num_output=24, weight_filler={"type": "xavier"})
        n.relu = L.ReLU(n.fc, in_place=True)
        n.score = L.InnerProduct(n.relu, num_output=4, weight_filler={"type": "xavier"})
        n.loss = L.SigmoidCrossEntropyLoss(n.score, n.label)
        return str(n.to_proto())

    (here / "trainnet.prototxt").write_text(multilabel(0))
    (here / "valnet.prototxt").write_text(multilabel(1))
    (here / "solver.prototxt").write_text(
        'train_net: "trainnet.prototxt" test_net: "valnet.prototxt" test_iter: 1 test_interval: 1000 base_lr: 0.01 '
        'lr_policy: "fixed" momentum: 0.9 max_iter: 1000 snapshot_prefix: "x"'
    )
    solver = caffe.get_solver("solver.prototxt")
    solver.test_nets[0].share_with(solver.net)

    def hamming_distance(gt, est):
        return sum([1 for (g, e) in zip(gt, est, strict=True) if g == e]) / float(len(gt))

    def check_accuracy(net, num_batches, batch_size=32):
        acc = 0.0
        for _ in range(num_batches):
            net.forward()
            for gt, est in zip(net.blobs["label"].data, net.blobs["score"].data > 0, strict=True):
                acc += hamming_distance(gt, est)
        return acc / (num_batches * batch_size)

    before = check_accuracy(solver.test_nets[0], 4)
    solver.step(80)
    assert check_accuracy(solver.test_nets[0], 4) > max(0.85, before)


def test_siamese(here, caffe):
    """Two nets that share their weights by name learn to put what is alike close together."""
    random = np.random.default_rng(9)
    images, labels = digits(400, 2)
    # Pairs in two channels, sliced apart in the net.
    pairs = np.concatenate([images[:200], images[200:]], 1)
    write_lmdb(caffe, here / "pairs", pairs, labels[:200] == labels[200:])
    twins = []
    for suffix in ("", "_p"):
        twins.append(
            f'layer {{ name: "ip1{suffix}" type: "InnerProduct" bottom: "data{suffix}" top: "ip1{suffix}" '
            'param { name: "ip1_w" lr_mult: 1 } param { name: "ip1_b" lr_mult: 2 } '
            'inner_product_param { num_output: 20 weight_filler { type: "xavier" } } }\n'
            f'layer {{ name: "relu1{suffix}" type: "ReLU" bottom: "ip1{suffix}" top: "ip1{suffix}" }}\n'
            f'layer {{ name: "feat{suffix}" type: "InnerProduct" bottom: "ip1{suffix}" top: "feat{suffix}" '
            'param { name: "feat_w" lr_mult: 1 } param { name: "feat_b" lr_mult: 2 } '
            'inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }\n'
        )
    (here / "siamese.prototxt").write_text(
        'layer { name: "pair_data" type: "Data" top: "pair_data" top: "sim" transform_param { scale: 0.00390625 } '
        'data_param { source: "pairs" backend: LMDB batch_size: 40 } }\n'
        'layer { name: "slice_pair" type: "Slice" bottom: "pair_data" top: "data" top: "data_p" '
        "slice_param { slice_dim: 1 slice_point: 1 } }\n" + "".join(twins) + 'layer { name: "loss" '
        'type: "ContrastiveLoss" bottom: "feat" bottom: "feat_p" bottom: "sim" top: "loss" '
        "contrastive_loss_param { margin: 1 } }\n"
    )
    (here / "solver.prototxt").write_text(
        'train_net: "siamese.prototxt" base_lr: 0.02 momentum: 0.9 weight_decay: 0 lr_policy: "inv" gamma: 0.0001 '
        'power: 0.75 max_iter: 1000 snapshot_prefix: "x"'
    )
    solver = caffe.get_solver("solver.prototxt")
    assert set(solver.net.params) == {"ip1", "ip1_p", "feat", "feat_p"}
    solver.step(150)
    assert np.array_equal(solver.net.params["feat"][0].data, solver.net.params["feat_p"][0].data)
    solver.net.save("siamese.caffemodel")

    inputs = 'input: "data" input_dim: 100 input_dim: 1 input_dim: 8 input_dim: 8\n'
    (here / "one.prototxt").write_text(inputs + twins[0])
    net = caffe.Net("one.prototxt", "siamese.caffemodel", caffe.TEST)
    fresh, kinds = digits(100, 11)
    out = net.forward_all(data=fresh)
    feat = out["feat"]
    assert feat.shape == (100, 2)
    distances = np.linalg.norm(feat[:, None] - feat[None], axis=2)
    is_same = kinds[:, None] == kinds[None]
    others = random.permutation(distances[~is_same])[:1000]
    assert distances[is_same].mean() < 0.4 * others.mean()
