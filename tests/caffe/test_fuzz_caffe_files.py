"""Damaged Caffe files: every reader takes them or refuses them with one error of ours, and loads nothing by halves."""

import contextlib
import io
import shutil
import struct
import warnings
import zlib
from pathlib import Path

import h5py
import lmdb
import numpy as np
import pytest
from hypothesis import given
from PIL import Image

import poseidon.caffe as caffe
from damage import damaged, fuzz, only_refused
from poseidon.caffe.io.database import new_database
from poseidon.caffe.io.datum import datum_values, parse_datum
from poseidon.caffe.io.hdf5 import read_arrays
from poseidon.caffe.io.images import decode_image
from poseidon.caffe.io.leveldb import LevelDB
from poseidon.caffe.io.leveldb.log import format_log, read_log
from poseidon.caffe.io.leveldb.snappy import decompress
from poseidon.caffe.io.lmdb import LMDB
from poseidon.caffe.schema import Datum, NetParameter, SolverParameter, SolverState
from poseidon.caffe.schema.files import parse_text
from poseidon.caffe.solver import get_solver
from poseidon.caffe.upgrade import read_net, read_solver
from poseidon.errors import ConfigError

NET = """
name: "n"
layer { name: "d" type: "DummyData" top: "x" top: "y"
  dummy_data_param { shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 } data_filler { type: "gaussian" } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "z"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "z" bottom: "y" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.1 momentum: 0.9 lr_policy: "step" stepsize: 2 gamma: 0.5 max_iter: 4'
SUFFIXES = {"BINARYPROTO": "", "HDF5": ".h5"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    return tmp_path


def trained(form="BINARYPROTO"):
    """A solver that has written a snapshot after two iterations."""
    caffe.set_mode_cpu()
    text = f'{SOLVER} snapshot_prefix: "s" snapshot_format: {form} snapshot_after_train: false random_seed: 1'
    solver = get_solver(parse_text(text, SolverParameter))
    solver.step(2)
    solver.snapshot()
    return solver


def state_of(solver):
    blobs = [blob for params in solver.net.params.values() for blob in params]
    return [solver.iter, *[blob.data.tobytes() for blob in blobs + list(solver._updater.history)]]


@pytest.mark.parametrize("form", SUFFIXES)
@pytest.mark.parametrize("kind", ["caffemodel", "solverstate"])
def test_snapshots(folder, kind, form):
    solver = trained(form)
    path = folder / f"s_iter_2.{kind}{SUFFIXES[form]}"
    good = path.read_bytes()
    # Its values differ from those of the file, so that a part of it would show.
    solver.step(1)
    before = state_of(solver)

    @given(damaged(good))
    @fuzz(60, night=1500)
    def check(content):
        path.write_bytes(content)
        with only_refused():
            try:
                solver.restore(f"s_iter_2.solverstate{SUFFIXES[form]}")
            except ConfigError:
                if kind == "caffemodel":
                    assert state_of(solver) == before
                raise
            finally:
                after = state_of(solver)
                assert after[0] >= 0
                solver.iter = before[0]
                restore(solver, before)

    check()


def restore(solver, values):
    blobs = [blob for params in solver.net.params.values() for blob in params] + list(solver._updater.history)
    for blob, content in zip(blobs, values[1:], strict=True):
        blob.data.flat[...] = np.frombuffer(content, np.float32)


@pytest.mark.parametrize("kind", ["net", "solver"])
def test_prototxts(folder, kind):
    read, good = (read_net, NET) if kind == "net" else (read_solver, SOLVER)

    @given(damaged(good.encode()))
    @fuzz(100)
    def check(content):
        (folder / "bad.prototxt").write_bytes(content)
        with only_refused():
            read("bad.prototxt")

    check()


@given(damaged(NET.encode()))
@fuzz(60)
def test_nets(folder, content):
    (folder / "bad.prototxt").write_bytes(content)
    with only_refused():
        caffe.Net("bad.prototxt", caffe.TRAIN)


def test_hdf5_of_data(folder):
    with h5py.File("good.h5", "w") as file:
        file["data"] = np.arange(60, dtype=np.float32).reshape(10, 6)
        file.create_dataset("label", data=np.arange(100.0).reshape(10, 10), chunks=(5, 5), compression="gzip")
    good = (folder / "good.h5").read_bytes()

    @given(damaged(good))
    @fuzz(80)
    def check(content):
        (folder / "bad.h5").write_bytes(content)
        with only_refused(), np.errstate(all="ignore"):
            read_arrays("bad.h5", ["data", "label"])

    check()


@pytest.mark.parametrize(("number", "is_read"), [(1, True), (5, False), (6, False)])
def test_hdf5_filters_that_trust_their_file_are_refused(folder, number, is_read):
    with h5py.File("good.h5", "w") as file:
        file.create_dataset("data", data=np.ones((10, 10)), chunks=(5, 5), compression="gzip")
    content = (folder / "good.h5").read_bytes()
    # The message that names the filter: its number, the length of its name, flags, one parameter, the name.
    place = content.index(b"deflate\0") - 8
    assert content[place : place + 2] == b"\x01\0"
    (folder / "bad.h5").write_bytes(content[:place] + bytes([number]) + content[place + 1 :])
    if is_read:
        assert read_arrays("bad.h5", ["data"])[0].sum() == 100
    else:
        with pytest.raises(ConfigError, match=rf"filters \[{number}\], expected any of 1 \(deflate\)"):
            read_arrays("bad.h5", ["data"])


def databases(backend):
    with new_database(backend, "good") as database:
        for number in range(40):
            datum = Datum(channels=1, height=1, width=5000 if number % 8 == 0 else 9, label=number)
            datum.data = bytes(datum.width)
            database.put(b"%08d" % number, datum.SerializeToString())
    return {file.name: file.read_bytes() for file in Path("good").iterdir()}


def read_all(database):
    """The keys of a database; its values must be what Caffe stores."""
    for key, value in database.records():
        datum_values(parse_datum(value, "record"), "native", "record")
        yield key


def test_lmdb(folder):
    good = databases("lmdb")["data.mdb"]
    (folder / "bad").mkdir()
    used = 16 + 136

    @given(damaged(good) | damaged(good[:used]).map(lambda head: head + good[used:]))
    @fuzz(150)
    def check(content):
        (folder / "bad" / "data.mdb").write_bytes(content)
        with only_refused():
            assert len(list(read_all(LMDB("bad")))) <= 40
        with only_refused():
            assert len(list(LMDB("bad").records(25))) <= 15

    check()


def test_lmdb_pages_in_any_order(folder):
    """What ended the process with a bus error: pages that lie where others should, or name pages beyond the file."""
    good = databases("lmdb")["data.mdb"]
    pages = [good[start : start + 4096] for start in range(0, len(good), 4096)]
    (folder / "bad").mkdir()
    keys = [key for key, _ in LMDB("good").records()]
    assert len(keys) == 40
    for number in range(2, len(pages)):
        for other in (pages[2], pages[-1], bytes(4096), b"\xff" * 4096, pages[number][::-1]):
            if other == pages[number]:
                continue
            content = b"".join([*pages[:number], other, *pages[number + 1 :]])
            (folder / "bad" / "data.mdb").write_bytes(content)
            with only_refused():
                assert [key for key, _ in LMDB("bad").records()] == keys


def test_an_lmdb_is_read_as_lmdb_reads_it(folder):
    with lmdb.open("db", map_size=1 << 26, lock=False) as environment:
        for rank in range(3):  # several transactions, deletions: pages are used again
            with environment.begin(write=True) as transaction:
                for number in range(rank, 3000, 3):
                    transaction.put(b"%06d" % number, bytes([rank]) * (1 + number * 7919 % 12000))
                for number in range(0, 2000, 7):
                    transaction.delete(b"%06d" % number)
        with environment.begin() as transaction:
            expected = [(bytes(key), bytes(value)) for key, value in transaction.cursor()]
    assert list(LMDB("db").records()) == expected
    for start in (1, 40, len(expected) - 1, len(expected), len(expected) + 9):
        assert list(LMDB("db").records(start)) == expected[start:]
    read_before = LMDB("db")
    assert list(read_before.records(700)) == expected[700:]
    assert list(read_before.records(2)) == expected[2:]
    with lmdb.open("empty", lock=False):
        pass
    assert list(LMDB("empty").records()) == []


def test_leveldb(folder):
    good = databases("leveldb")
    shutil.copytree("good", "bad")
    manifest = next(name for name in good if name.startswith("MANIFEST"))
    (edit,) = read_log(folder / "good" / manifest)
    changed = [damaged(content).map(lambda new, name=name: (name, new)) for name, content in good.items() if content]
    # A right checksum over wrong content, and the footer, which has no checksum.
    changed.append(damaged(edit).map(lambda new: (manifest, format_log([new]))))
    table = next(name for name in good if name.endswith(".ldb"))
    changed.append(damaged(good[table][-48:-8]).map(lambda new: (table, good[table][:-48] + new + good[table][-8:])))
    choice = changed[0]
    for one in changed[1:]:
        choice |= one

    @given(choice)
    @fuzz(150)
    def check(change):
        name, content = change
        (folder / "bad" / name).write_bytes(content)
        with only_refused():
            list(read_all(LevelDB("bad")))
        (folder / "bad" / name).write_bytes(good[name])

    check()


@pytest.mark.parametrize("handles", [b"\xff" * 40, bytes(40), b"\xff" * 9 + b"\x01" + bytes(30), b"\x80" * 40])
def test_leveldb_footers_that_name_impossible_places(folder, handles):
    table = next(name for name in databases("leveldb") if name.endswith(".ldb"))
    content = (folder / "good" / table).read_bytes()
    (folder / "good" / table).write_bytes(content[:-48] + handles + content[-8:])
    with only_refused(), pytest.raises(ConfigError, match=rf"{table}: damaged or truncated LevelDB table: "):
        list(LevelDB("good").records())


@given(damaged(b"\x0a\x08abc\x0d\x03"))
@fuzz(60)
def test_compressed_blocks(content):
    with contextlib.suppress(ValueError):
        decompress(content)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_pictures(form):
    content = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(content, form)

    @given(damaged(content.getvalue()))
    @fuzz(40, night=3000)
    def check(content):
        with only_refused(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decode_image(content, "color", "picture")

    check()


# One by one: what was found to go wrong.


def test_a_picture_that_declares_billions_of_pixels_is_named():
    def part(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    picture = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(bytes(9))) + part(b"IEND", b"")
    with (
        only_refused(),
        pytest.raises(ConfigError, match=r"big\.png: cannot be decoded as an image .*OpenCV: .*MAX_IMAGE_PIXELS"),
    ):
        decode_image(picture, "color", "big.png")


def test_a_state_with_a_name_that_no_file_can_have(folder):
    solver = trained()
    for name, match in ((b"a\0b", r"'a\\x00b': embedded null byte"), (b"\xff\xfe", "expected text")):
        state = SolverState.FromString((folder / "s_iter_2.solverstate").read_bytes())
        state.ClearField("learned_net")
        # Field 2, by hand: protobuf itself refuses to write such a name.
        (folder / "odd.solverstate").write_bytes(state.SerializeToString() + b"\x12" + bytes([len(name)]) + name)
        with pytest.raises(ConfigError, match=match):
            solver.restore("odd.solverstate")


def test_an_empty_caffemodel_is_not_a_start_from_scratch(folder):
    solver = trained()
    (folder / "empty.caffemodel").touch()
    with pytest.raises(ConfigError, match=r"empty\.caffemodel is empty, expected a binary NetParameter; was the disk"):
        solver.net.copy_from("empty.caffemodel")
    (folder / "other.caffemodel").write_bytes(NetParameter(name="n").SerializeToString())
    with pytest.raises(ConfigError, match=r"other\.caffemodel: holds no layers"):
        solver.net.copy_from("other.caffemodel")


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda file: file.create_dataset("data", data=np.ones(3)), "/data is a dataset, expected a group"),
        (lambda file: file.create_group("other"), "has no group 'data'"),
        (lambda file: file.create_dataset("data/ip", data=np.ones(3)), "/data/ip is a dataset, expected a group"),
        (lambda file: file.create_group("data/ip/0"), "/data/ip/0 is a group, expected a data set"),
        (lambda file: file.create_dataset("data/ip/0", data="text"), "holds object, expected numbers"),
        (lambda file: file.create_dataset("data/ip/0", shape=(10**7, 10**6), dtype="f4"), "declares shape .*damaged"),
        (
            lambda file: file.create_dataset("data/ip/0", shape=(10**7, 10**6), dtype="f4", chunks=(10, 10)),
            "but the file holds 0 bytes of it",
        ),
    ],
)
def test_hdf5_weights_of_another_structure_load_nothing(folder, make, match):
    solver = trained()
    before = state_of(solver)
    with h5py.File("w.h5", "w") as file:
        make(file)
    with only_refused(), pytest.raises(ConfigError, match=match):
        solver.net.load_hdf5("w.h5")
    assert state_of(solver) == before


TWO_LAYERS = """
layer { name: "d" type: "DummyData" top: "x" dummy_data_param { shape { dim: 4 dim: 3 } } }
layer { name: "first" type: "InnerProduct" bottom: "x" top: "a" inner_product_param { num_output: 2 } }
layer { name: "last" type: "InnerProduct" bottom: "a" top: "b" inner_product_param { num_output: 2 } }
"""


def test_a_mismatch_in_the_last_layer_leaves_the_first_alone(folder):
    (folder / "two.prototxt").write_text(TWO_LAYERS)
    net = caffe.Net("two.prototxt", caffe.TRAIN)
    net.params["first"][0].data[...] = 7
    net.save("two.caffemodel")
    (folder / "other.prototxt").write_text("3".join(TWO_LAYERS.rsplit("2", 1)))
    other = caffe.Net("other.prototxt", caffe.TRAIN)
    with pytest.raises(ConfigError, match=r"'last'.*cannot copy parameter 0"):
        other.copy_from("two.caffemodel")
    assert not other.params["first"][0].data.any()


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        ("InnerProduct\" inner_product_param { num_output: 4000000000 }", "4000000000, 3.* values, expected at most"),
        ("InnerProduct\" inner_product_param { num_output: 700000000 }", "not enough memory for its parameters"),
        ("Embed\" embed_param { num_output: 4000000000 input_dim: 4000000000 }", "expected at most"),
        ("Tile\" tile_param { tiles: 2147483647 }", "expected at most"),
    ],
)  # fmt: skip
def test_layers_of_giant_size_are_named(folder, layer, match):
    (folder / "giant.prototxt").write_text(
        'layer { name: "d" type: "DummyData" top: "x" dummy_data_param { shape { dim: 4 dim: 3 } } }\n'
        f'layer {{ name: "big" bottom: "x" top: "y" type: "{layer} }}'
    )
    with only_refused(), pytest.raises(ConfigError, match=f"layer 'big' .*{match}"):
        caffe.Net("giant.prototxt", caffe.TRAIN)


@pytest.mark.parametrize("setting", ["max_iter: -5", "display: -1", "snapshot: -2", "test_interval: -1"])
def test_negative_iterations_are_refused(folder, setting):
    with pytest.raises(ConfigError, match=f"{setting.split(':')[0]} is -"):
        get_solver(parse_text(f"{SOLVER.replace('max_iter: 4', '')} {setting}", SolverParameter))
    with pytest.raises(ConfigError, match="cannot run -3 iterations"):
        trained().step(-3)
