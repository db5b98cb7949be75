"""The example networks: files as generated, shapes, published numbers of parameters."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from poseidon.caffe import TEST, TRAIN, Net, fillers, set_random_seed
from poseidon.caffe.schema import LayerParameter, NetParameter, SolverParameter
from poseidon.caffe.schema.files import read_text

EXAMPLES = Path(__file__).parents[2] / "examples" / "caffe"

# Learned parameters of the net in use, and of the net in training where it has more heads.
PARAMETERS = {
    "cifar10_quick": (145_578, 145_578),
    "cifar10_full": (89_578, 89_578),
    "alexnet": (60_965_224, 60_965_224),
    "caffenet": (60_965_224, 60_965_224),
    "googlenet": (6_998_552, 13_378_280),
    "vgg19": (143_667_240, 143_667_240),
    "vgg19_22k": (229_052_817, 229_052_817),
    "resnet152": (60_192_808, 60_192_808),
    "inception_v3": (23_834_568, 27_161_264),
}
# The blob under the classifier: it tells of every stride and padding before it.
LAST_FEATURES = {
    "cifar10_quick": ("pool3", (64, 4, 4)),
    "cifar10_full": ("pool3", (64, 4, 4)),
    "alexnet": ("pool5", (256, 6, 6)),
    "caffenet": ("pool5", (256, 6, 6)),
    "googlenet": ("inception_5b/output", (1024, 7, 7)),
    "vgg19": ("pool5", (512, 7, 7)),
    "vgg19_22k": ("pool5", (512, 7, 7)),
    "resnet152": ("res5c", (2048, 7, 7)),
    "inception_v3": ("coarse_2/output", (2048, 8, 8)),
}
each_network = pytest.mark.parametrize("name", PARAMETERS)


def build(name, file, phase):
    """Build a net whose data layers are replaced by inputs of the same size."""
    param = read_text(EXAMPLES / name / file, NetParameter)
    crop = read_text(EXAMPLES / name / "deploy.prototxt", NetParameter).layer[0].input_param.shape[0].dim[2]
    for layer in param.layer:
        if layer.type == "Data":
            batch = layer.data_param.batch_size
            stand_in = LayerParameter(name=layer.name, type="Input", top=layer.top, include=layer.include)
            stand_in.input_param.shape.add(dim=[batch, 3, crop, crop])
            stand_in.input_param.shape.add(dim=[batch])
            layer.CopyFrom(stand_in)
    param.state.phase = phase
    return Net.from_proto(param)


def learned(net):
    return sum(param.blob.count for param in net.learnable if net.layers[param.layer_index].type != "BatchNorm")


@pytest.fixture
def empty_fillers(monkeypatch):
    """Parameters that have a shape and take no memory."""
    monkeypatch.setattr(fillers, "fill", lambda shape, *_: torch.zeros(()).expand(shape))


@each_network
def test_deployed_net_has_the_published_size(name, empty_fillers):
    net = build(name, "deploy.prototxt", TEST)
    assert learned(net) == PARAMETERS[name][0]
    blob, shape = LAST_FEATURES[name]
    assert net.blobs[blob].shape[1:] == shape
    assert (net.inputs, net.outputs) == (["data"], ["prob"])


@each_network
def test_training_net_has_the_published_size(name, empty_fillers):
    net = build(name, "train_test.prototxt", TRAIN)
    assert learned(net) == PARAMETERS[name][1]
    assert all("loss" in output for output in net.outputs)
    assert len([weight for weight in net.loss_weights if weight]) == {"googlenet": 3, "inception_v3": 2}.get(name, 1)


@each_network
def test_testing_net_reports_accuracy(name, empty_fillers):
    net = build(name, "train_test.prototxt", TEST)
    assert any("accuracy" in output for output in net.outputs)


@each_network
def test_solver_names_the_net_beside_it(name):
    solver = read_text(EXAMPLES / name / "solver.prototxt", SolverParameter)
    assert solver.net == f"examples/caffe/{name}/train_test.prototxt"
    assert solver.max_iter > solver.test_interval > 0


@pytest.mark.parametrize("name", ["cifar10_quick", "cifar10_full"])
def test_small_networks_learn(name):
    set_random_seed(0)
    net = build(name, "train_test.prototxt", TRAIN)
    generator = np.random.default_rng(0)
    net.blobs["data"].data[...] = generator.normal(size=net.blobs["data"].shape) * 50
    net.blobs["label"].data[...] = generator.integers(0, 10, net.blobs["label"].shape)
    before = net.run_forward()
    assert before == pytest.approx(np.log(10), abs=0.1)
    net.clear_param_diffs()
    net.run_backward()
    for param in net.learnable:
        param.blob.data_tensor.sub_(param.blob.diff_tensor, alpha=0.001)
    assert net.run_forward() < before


def test_files_are_what_the_generator_writes():
    # Compared as messages: how floats are written in text depends on protobuf's version.
    script = (
        "import generate\n"
        "from poseidon.caffe.schema import NetParameter, SolverParameter\n"
        "from poseidon.caffe.schema.files import parse_text, read_text\n"
        "for name in generate.NETWORKS:\n"
        "    for file, text in generate.texts(name).items():\n"
        "        kind = SolverParameter if file.startswith('solver') else NetParameter\n"
        "        assert read_text(f'{name}/{file}', kind) == parse_text(text, kind), (name, file)\n"
        "print(*generate.NETWORKS)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=EXAMPLES, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == list(PARAMETERS)
