from __future__ import annotations

import gc
import shutil
import threading
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
import torch
from PIL import Image

from poseidon.caffe.io.database import new_database
from poseidon.caffe.io.datum import encoded_datum, image_datum
from poseidon.caffe.io.images import encode_image
from poseidon.caffe.schema import BlobProto, Datum
from poseidon.errors import ConfigError
from poseidon.files import BoundedFile

RANDOM = np.random.default_rng(11)
IMAGES = RANDOM.integers(0, 256, (7, 6, 8, 3)).astype(np.uint8)  # rows, height, width, channels


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(params=["LMDB", "LEVELDB"])
def backend(request):
    return request.param


def write(backend, datums, path="db"):
    with new_database(backend.lower(), path) as writer:
        for number, datum in enumerate(datums):
            writer.put(b"%08d" % number, datum.SerializeToString())


def raw_datums():
    return [image_datum(pixels, label) for label, pixels in enumerate(IMAGES)]


def net_of(caffe, text, phase=None):
    Path("net.prototxt").write_text(text)
    return caffe.Net("net.prototxt", caffe.TEST if phase is None else phase)


def data_net(caffe, backend="LMDB", phase=None, transform="", batch=3, more="", tops="data label"):
    names = "".join(f'top: "{name}" ' for name in tops.split())
    return net_of(
        caffe,
        f'layer {{ name: "d" type: "Data" {names} transform_param {{ {transform} }} '
        f'data_param {{ source: "db" backend: {backend} batch_size: {batch} {more} }} }}',
        phase,
    )


def batch_of(net):
    return {name: values.copy() for name, values in net.forward().items()}


def channels_first(images):
    return images.transpose(0, 3, 1, 2).astype(np.float32)


def test_records_go_round(caffe, backend):
    write(backend, raw_datums())
    net = data_net(caffe, backend)
    labels = [batch_of(net)["label"].tolist() for _ in range(4)]
    assert labels == [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4]]


def test_one_top_gives_no_labels(caffe):
    write("LMDB", raw_datums())
    net = data_net(caffe, tops="data")
    assert list(net.blobs) == ["data"]
    np.testing.assert_array_equal(batch_of(net)["data"], channels_first(IMAGES[:3]))


def test_float_records(caffe, backend):
    values = RANDOM.normal(size=(4, 5)).astype(np.float32)
    write(backend, [Datum(channels=5, height=1, width=1, float_data=row.tolist()) for row in values])
    batch = batch_of(data_net(caffe, backend, transform="scale: 2 mean_value: 1", batch=4))
    np.testing.assert_allclose(batch["data"].reshape(4, 5), (values - 1) * 2, rtol=1e-6)


@pytest.mark.parametrize(("force", "channels"), [("", 3), ("force_color: true", 3), ("force_gray: true", 1)])
def test_encoded_records(caffe, force, channels):
    write("LMDB", [encoded_datum(encode_image(pixels, "png"), 1) for pixels in IMAGES])
    data = batch_of(data_net(caffe, transform=force))["data"]
    assert data.shape == (3, channels, 6, 8)
    if channels == 3:
        np.testing.assert_array_equal(data, channels_first(IMAGES[:3]))


def test_encoded_gray_records_become_colour_on_request(caffe):
    write("LMDB", [encoded_datum(encode_image(pixels[:, :, :1], "png"), 1) for pixels in IMAGES])
    assert batch_of(data_net(caffe))["data"].shape == (3, 1, 6, 8)
    data = batch_of(data_net(caffe, transform="force_color: true"))["data"]
    np.testing.assert_array_equal(data, np.repeat(channels_first(IMAGES[:3, :, :, :1]), 3, axis=1))


def mean_file(name="mean.binaryproto"):
    mean = RANDOM.uniform(0, 200, (3, 6, 8)).astype(np.float32)
    proto = BlobProto(num=1, channels=3, height=6, width=8, data=mean.ravel().tolist())
    Path(name).write_bytes(proto.SerializeToString())
    return mean


def test_centre_crop_takes_the_mean_at_the_same_place(caffe):
    write("LMDB", raw_datums())
    mean = mean_file()
    net = data_net(caffe, transform='crop_size: 3 scale: 0.5 mean_file: "mean.binaryproto"')
    expected = (channels_first(IMAGES[:3]) - mean)[:, :, 1:4, 2:5] * np.float32(0.5)
    np.testing.assert_allclose(batch_of(net)["data"], expected, rtol=1e-6)


def test_training_crops_and_mirrors_at_random(caffe):
    write("LMDB", raw_datums())
    mean = mean_file()
    caffe.set_random_seed(3)
    net = data_net(
        caffe, phase=caffe.TRAIN, transform='crop_size: 4 mirror: true mean_file: "mean.binaryproto"', batch=7
    )
    whole = channels_first(IMAGES) - mean
    seen = set()
    for _ in range(20):
        for row, values in enumerate(batch_of(net)["data"]):
            seen.add(find_crop(whole[row], values))
    offsets = {(top, left, mirrored) for top in range(3) for left in range(5) for mirrored in (False, True)}
    assert seen == offsets


def find_crop(whole, values):
    for top in range(3):
        for left in range(5):
            window = whole[:, top : top + 4, left : left + 4]
            for mirrored in (False, True):
                if np.array_equal(window[:, :, ::-1] if mirrored else window, values):
                    return top, left, mirrored
    raise AssertionError("no crop of the image gives these values")


def test_seed_repeats_random_crops(caffe):
    write("LMDB", raw_datums())
    batches = []
    for _ in range(2):
        caffe.set_random_seed(8)
        batches.append(batch_of(data_net(caffe, phase=caffe.TRAIN, transform="crop_size: 3"))["data"])
    np.testing.assert_array_equal(*batches)


def test_testing_draws_no_random_numbers(caffe):
    write("LMDB", raw_datums())
    torch.manual_seed(1)
    state = torch.get_rng_state()
    batch_of(data_net(caffe, transform="crop_size: 3"))
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_of_one_may_differ_in_size(caffe):
    write("LMDB", [image_datum(IMAGES[0], 0), image_datum(IMAGES[1, :4, :5], 1)])
    net = data_net(caffe, batch=1)
    assert [batch_of(net)["data"].shape for _ in range(3)] == [(1, 3, 6, 8), (1, 3, 4, 5), (1, 3, 6, 8)]
    net = data_net(caffe, batch=2)
    with pytest.raises(ConfigError, match=r"layer 'd' .*record '00000001': gives shape \(3, 4, 5\).*\(3, 6, 8\)"):
        net.forward()


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("crop_size: 7", r"6 x 8 \(height x width\) is less than crop_size 7"),
        ("mean_value: 1 mean_value: 2", "3 channels.*2 times mean_value"),
        ('mean_file: "none.binaryproto"', r"none\.binaryproto.*No such file"),
        ('mean_value: 1 mean_file: "none.binaryproto"', "both mean_file and mean_value"),
        ("force_color: true force_gray: true", "both force_color and force_gray"),
    ],
)
def test_impossible_transformations_are_explained(caffe, transform, message):
    write("LMDB", raw_datums())
    with pytest.raises(ConfigError, match=f"'d'.*{message}"):
        data_net(caffe, transform=transform).forward()


def test_missing_and_wrong_databases_are_named(caffe, backend):
    with pytest.raises(ConfigError, match=r"net\.prototxt: layer 'd' \(Data\): db: no .* database"):
        data_net(caffe, backend)
    write(backend, [])
    with pytest.raises(ConfigError, match="db: the database is empty"):
        data_net(caffe, backend)
    with pytest.raises(ConfigError, match=f"is a database of backend {backend.lower()}"):
        data_net(caffe, {"LMDB": "LEVELDB", "LEVELDB": "LMDB"}[backend])


def test_truncated_lmdb_is_noticed_before_it_is_read(caffe, folder):
    write("LMDB", [image_datum(np.zeros((50, 50, 3), np.uint8), 0)] * 20)
    file = folder / "db" / "data.mdb"
    whole = file.read_bytes()
    for size in (0, 100, 5000, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"'d'.*db.*(truncated|cannot be opened)"):
            data_net(caffe)


def test_damaged_records_are_named(caffe):
    good = image_datum(IMAGES[0], 0)
    short = Datum(channels=3, height=6, width=8, data=b"123", label=0)
    broken = encoded_datum(b"no image", 0)
    for bad, message in ((short, "144 values, but holds 3"), (broken, "cannot be decoded")):
        write("LEVELDB", [good, bad], path=f"db{message[:2]}")
        net = net_of(
            caffe,
            'layer { name: "d" type: "Data" top: "data" '
            f'data_param {{ source: "db{message[:2]}" backend: LEVELDB batch_size: 2 }} }}',
        )
        for _ in range(2):  # asking again gives the same answer
            with pytest.raises(ConfigError, match=f"'00000001'.*{message}"):
                net.forward()
    with new_database("lmdb", "junk") as writer:
        writer.put(b"k", b"\xff\xff\xff")
    with pytest.raises(ConfigError, match=r"junk: record 'k'.*not a complete Datum"):
        net_of(
            caffe,
            'layer { name: "d" type: "Data" top: "data" data_param { source: "junk" backend: LMDB batch_size: 1 } }',
        )


def test_workers_read_disjoint_records(caffe, monkeypatch):
    write("LMDB", raw_datums())
    seen = []
    for rank in range(2):
        for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        net = data_net(caffe, phase=caffe.TRAIN, batch=1)
        seen.append([int(batch_of(net)["label"][0]) for _ in range(7)])
    assert seen == [[0, 2, 4, 6, 1, 3, 5], [1, 3, 5, 0, 2, 4, 6]]
    assert batch_of(data_net(caffe, batch=7))["label"].tolist() == list(range(7))  # TEST reads everything


def test_prefetching_ends_with_its_net(caffe):
    write("LMDB", raw_datums())
    others = set(threading.enumerate())
    net = data_net(caffe)
    assert not prefetching(others)
    net.forward()
    assert prefetching(others)
    del net
    gc.collect()
    assert not prefetching(others)


def prefetching(others):
    return [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("prefetch")]


@pytest.mark.parametrize("kind", ["LMDB", "LEVELDB", "window", "ImageData", "HDF5Data", "WindowData"])
def test_batches_do_not_depend_on_the_number_of_threads(caffe, monkeypatch, kind):
    write("LMDB", [encoded_datum(encode_image(pixels, "png"), label) for label, pixels in enumerate(IMAGES)])
    write("LEVELDB", raw_datums(), "level")
    write_images()
    write_hdf5(a=5, b=4)
    for number in range(2):
        Path(f"{number}.png").symlink_to(f"image {number}.png")
    Path("w.txt").write_text(
        "# 0\n0.png\n3\n6\n8\n3\n1 0.9 0 0 4 4\n2 0.8 1 1 5 5\n0 0.1 2 2 7 5\n"
        "# 1\n1.png\n3\n6\n8\n2\n3 0.9 0 0 5 5\n0 0.2 1 0 6 3\n"
    )
    random = 'transform_param { crop_size: 4 mirror: true } top: "data" top: "label"'
    layers = {
        "LMDB": f'type: "Data" {random} data_param {{ source: "db" backend: LMDB batch_size: 20 }}',
        "LEVELDB": f'type: "Data" {random} data_param {{ source: "level" backend: LEVELDB batch_size: 20 }}',
        "window": f'type: "Data" {random} data_param {{ source: "db" backend: LMDB batch_size: 20 shuffle_window: 5 }}',
        "ImageData": f'type: "ImageData" {random} '
        'image_data_param { source: "list.txt" batch_size: 20 shuffle: true }',
        "HDF5Data": 'type: "HDF5Data" top: "x" top: "y" '
        'hdf5_data_param { source: "h.txt" batch_size: 20 shuffle: true }',
        "WindowData": f'type: "WindowData" {random} window_data_param {{ source: "w.txt" batch_size: 20 }}',
    }
    results = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("POSEIDON_INPUT_THREADS", threads)
        caffe.set_random_seed(4)
        net = net_of(caffe, f'layer {{ name: "d" {layers[kind]} }}', caffe.TRAIN)
        results.append([batch_of(net) for _ in range(4)])
    for other in results[1:]:
        for batch, expected in zip(other, results[0], strict=True):
            for name, values in expected.items():
                np.testing.assert_array_equal(batch[name], values)
    assert not np.array_equal(*[next(iter(batch.values())) for batch in results[0][:2]])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_shuffles_what_lies_together(caffe, monkeypatch, backend, rank):
    write(backend, [image_datum(IMAGES[0], label) for label in range(24)])
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    caffe.set_random_seed(1)
    net = data_net(caffe, backend, phase=caffe.TRAIN, batch=3, more="shuffle_window: 6")
    labels = [int(label) for _ in range(8) for label in batch_of(net)["label"]]
    own = [label for label in range(24) if label // 3 % 2 == rank]
    windows = [labels[first : first + 6] for first in range(0, 24, 6)]
    assert [sorted(window) for window in windows] == [own[:6], own[6:], own[:6], own[6:]]
    assert any(window != sorted(window) for window in windows)
    assert windows[0] != windows[2]


def test_a_worker_reads_its_ranges_only(caffe, monkeypatch):
    """Values of others are not read, and of pages without its records only the first bytes."""
    write("LMDB", [image_datum(np.full((60, 60, 3), label, np.uint8), label) for label in range(200)])
    read = []
    plain = BoundedFile.read

    def noted(self, offset, count):
        read.append(count)
        return plain(self, offset, count)

    monkeypatch.setattr(BoundedFile, "read", noted)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    net = data_net(caffe, phase=caffe.TRAIN, batch=10, more="prefetch: 1")
    labels = [batch_of(net)["label"].tolist() for _ in range(5)]
    assert labels == [list(range(start, start + 10)) for start in (30, 70, 110, 150, 190)]
    del net
    values = [count for count in read if count > 60 * 60 * 3]
    assert len(values) <= 1 + 50 + 2 * 10  # the first for its shape, the batches, what was made ahead
    assert sum(read) < 1.1 * sum(values) + 100_000


def test_two_nets_read_one_lmdb(caffe):
    write("LMDB", raw_datums())
    first, second = data_net(caffe), data_net(caffe, phase=caffe.TRAIN)
    batch_of(first)
    assert batch_of(second)["label"].tolist() == [0, 1, 2]
    assert batch_of(first)["label"].tolist() == [3, 4, 5]


def test_database_made_anew_is_read_anew(caffe, folder):
    write("LMDB", raw_datums())
    old = data_net(caffe)
    shutil.rmtree(folder / "db")
    write("LMDB", raw_datums()[4:])
    assert batch_of(data_net(caffe))["label"].tolist() == [4, 5, 6]
    assert batch_of(old)["label"].tolist() == [0, 1, 2]


def test_database_opened_by_the_program_itself_is_read_all_the_same(caffe, folder):
    write("LMDB", raw_datums())
    with lmdb.open(str(folder / "db"), readonly=True, lock=False):
        assert batch_of(data_net(caffe))["label"].tolist() == [0, 1, 2]


def image_net(caffe, settings="", transform="", phase=None):
    return net_of(
        caffe,
        f'layer {{ name: "i" type: "ImageData" top: "data" top: "label" transform_param {{ {transform} }} '
        f'image_data_param {{ source: "list.txt" {settings} }} }}',
        phase,
    )


def write_images(lines=None):
    for number, pixels in enumerate(IMAGES):
        Image.fromarray(np.ascontiguousarray(pixels[:, :, ::-1])).save(f"image {number}.png")
    Path("list.txt").write_text(
        lines or "".join(f"image {number}.png {number * 10}\n" for number in range(len(IMAGES))) + "\n"
    )


def test_image_list_with_spaces_in_names(caffe):
    write_images()
    batch = batch_of(image_net(caffe, "batch_size: 2"))
    np.testing.assert_array_equal(batch["data"], channels_first(IMAGES[:2]))
    assert batch["label"].tolist() == [0, 10]


def test_gray_images(caffe):
    write_images()
    assert batch_of(image_net(caffe, "batch_size: 2 is_color: false new_height: 3 new_width: 4"))["data"].shape == (
        2,
        1,
        3,
        4,
    )


def test_shuffled_images_come_once_per_pass(caffe):
    write_images()
    caffe.set_random_seed(2)
    net = image_net(caffe, "batch_size: 7 shuffle: true")
    passes = [batch_of(net)["label"].tolist() for _ in range(3)]
    assert all(sorted(one) == [0, 10, 20, 30, 40, 50, 60] for one in passes)
    assert len({tuple(one) for one in passes}) > 1


def test_random_skip_starts_within_its_limit(caffe):
    write_images()
    starts = set()
    for seed in range(20):
        caffe.set_random_seed(seed)
        starts.add(int(batch_of(image_net(caffe, "rand_skip: 3"))["label"][0]))
    assert starts == {0, 10, 20}


@pytest.mark.parametrize(
    ("lines", "settings", "message"),
    [
        ("gone.png 3\n", "", r"list\.txt:1: cannot read image gone\.png"),
        ("image 0.png 3\nimage 1.png no\n", "", r"list\.txt:2: 'no' is not a label"),
        ("\n", "", r"list\.txt: the list of images is empty"),
        (None, "new_height: 5", "new_height is 5 and new_width 0"),
        (None, "batch_size: 0", "batch_size is 0"),
    ],
)
def test_bad_image_lists_are_explained(caffe, lines, settings, message):
    write_images(lines)
    with pytest.raises(ConfigError, match=f"'i' .ImageData.*{message}"):
        image_net(caffe, settings)


def test_missing_image_list(caffe):
    with pytest.raises(ConfigError, match=r"cannot read list list\.txt: No such file"):
        image_net(caffe)


def hdf5_net(caffe, settings="batch_size: 4", more=""):
    return net_of(
        caffe,
        f'layer {{ name: "h" type: "HDF5Data" top: "x" top: "y" {more} '
        f'hdf5_data_param {{ source: "h.txt" {settings} }} }}',
    )


def write_hdf5(**rows):
    Path("h.txt").write_text("\n".join(f"{name}.h5" for name in rows))
    start = 0
    for name, count in rows.items():
        with h5py.File(f"{name}.h5", "w") as file:
            numbers = np.arange(start, start + count)
            file["x"] = np.stack([numbers, -numbers], axis=1).astype(np.float64)
            file["y"] = numbers
            start += count


def test_hdf5_batches_reach_over_files(caffe):
    write_hdf5(a=3, b=2, c=4)
    net = hdf5_net(caffe)
    rows = []
    for _ in range(5):
        batch = batch_of(net)
        np.testing.assert_array_equal(batch["x"], np.stack([batch["y"], -batch["y"]], axis=1))
        rows += batch["y"].tolist()
    assert rows == [number % 9 for number in range(20)]


def test_shuffled_hdf5_rows_stay_together(caffe):
    write_hdf5(a=5, b=4)
    net = hdf5_net(caffe, "batch_size: 9 shuffle: true")
    for _ in range(3):
        batch = batch_of(net)
        assert sorted(batch["y"]) == list(range(9))
        np.testing.assert_array_equal(batch["x"], np.stack([batch["y"], -batch["y"]], axis=1))


def test_bad_hdf5_sources_are_explained(caffe):
    write_hdf5(a=3, b=2)
    with pytest.raises(ConfigError, match="does not transform data"):
        hdf5_net(caffe, more="transform_param { scale: 2 }")
    with h5py.File("b.h5", "w") as file:
        file["x"], file["z"] = np.zeros((2, 3)), np.zeros(2)
    with pytest.raises(ConfigError, match=r"b\.h5: holds no data set 'y'; it holds: x, z"):
        hdf5_net(caffe).forward()
    with h5py.File("b.h5", "a") as file:
        file["y"] = np.zeros(5)
    with pytest.raises(ConfigError, match=r"b\.h5: .*same number of rows.*'x' 2, 'y' 5"):
        hdf5_net(caffe).forward()
    with h5py.File("b.h5", "a") as file:
        del file["y"]
        file["y"] = np.zeros(2)
    with pytest.raises(ConfigError, match=r"b\.h5: rows of 'x' have shape \(3,\), those of a\.h5 \(2,\)"):
        hdf5_net(caffe).forward()
    for content, says in (("no", "its 2 bytes are no HDF5 file"), ("", "it is empty; was the disk full")):
        Path("b.h5").write_text(content)
        with pytest.raises(ConfigError, match=rf"cannot read HDF5 file b\.h5: {says}"):
            hdf5_net(caffe).forward()
    Path("h.txt").write_text("gone.h5")
    with pytest.raises(ConfigError, match=r"h\.txt: names gone\.h5, which does not exist"):
        hdf5_net(caffe)


def memory_net(caffe):
    return net_of(
        caffe,
        'layer { name: "m" type: "MemoryData" top: "data" top: "label" '
        "memory_data_param { batch_size: 2 channels: 1 height: 1 width: 3 } }",
    )


def test_memory_is_used_where_it_is_and_can_be_replaced(caffe):
    net = memory_net(caffe)
    data, labels = np.zeros((4, 1, 1, 3), np.float32), np.arange(4, dtype=np.float32)
    net.set_input_arrays(data, labels)
    assert batch_of(net)["label"].ravel().tolist() == [0, 1]
    data[2:] = 7
    assert (batch_of(net)["data"] == 7).all()
    net.set_input_arrays(data[2:].copy(), labels[:2] + 10)
    assert batch_of(net)["label"].ravel().tolist() == [10, 11]


def test_wrong_memory_is_explained(caffe):
    net = memory_net(caffe)
    with pytest.raises(ConfigError, match=r"'m' .*set_input_arrays"):
        net.forward()
    good = np.zeros((4, 1, 1, 3), np.float32)
    for data, labels, message in (
        (good[:3], np.zeros(3, np.float32), "3 rows are not a multiple of batch_size 2"),
        (good, np.zeros(2, np.float32), "4 rows of data and 2 labels"),
        (good.reshape(4, 3, 1, 1), np.zeros(4, np.float32), r"shape \(4, 3, 1, 1\), expected \(n, 1, 1, 3\)"),
        (good.astype(np.float64), np.zeros(4, np.float32), "float32"),
    ):
        with pytest.raises(ConfigError, match=message):
            net.set_input_arrays(data, labels)


def test_forced_backward_goes_through_data_layers(caffe):
    write("LMDB", raw_datums())
    net = net_of(
        caffe,
        'force_backward: true layer { name: "d" type: "Data" top: "data" '
        'data_param { source: "db" backend: LMDB batch_size: 2 } } '
        'layer { name: "r" type: "ReLU" bottom: "data" top: "r" }',
    )
    net.forward()
    net.blobs["r"].diff[...] = 1
    net.backward()
    assert net.blobs["data"].diff.sum() > 0
