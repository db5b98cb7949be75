from __future__ import annotations

import argparse
import importlib
import logging
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from caffe_golden import GOLDENS
from PIL import Image

from poseidon.caffe.io import images
from poseidon.caffe.io.database import continued_database, new_database, open_database
from poseidon.caffe.io.datum import parse_datum
from poseidon.caffe.io.lmdb import LMDBWriter
from poseidon.caffe.io.windows import read_windows
from poseidon.caffe.schema import BlobProto, NetParameter, SolverParameter
from poseidon.caffe.schema.files import read_binary, read_text
from poseidon.caffe.tools.pace import Pace
from poseidon.caffe.tools.switches import add_switch
from poseidon.caffe.tools.upgrade_files import detect_kind
from poseidon.errors import ConfigError

FORMATS = GOLDENS / "formats"
RANDOM = np.random.default_rng(2)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def imageset(folder):
    shutil.copytree(FORMATS / "imageset_lmdb" / "images", folder / "images")
    shutil.copy(FORMATS / "imageset_lmdb" / "list.txt", folder)
    shutil.copytree(FORMATS / "imageset_lmdb" / "db_lmdb", folder / "db")


def tool(name, *arguments):
    command = importlib.import_module(f"poseidon.caffe.commands.{name}")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(arguments))


def datums(path, backend="lmdb"):
    return {key.decode(): parse_datum(value, path) for key, value in open_database(backend, path).records()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], False),
        (["--gray"], True),
        (["-gray"], True),
        (["--gray=true"], True),
        (["-gray=1"], True),
        (["--gray=false"], False),
        (["--gray", "--nogray"], False),
    ],
)
def test_switches_as_gflags_has_them(arguments, expected):
    parser = argparse.ArgumentParser()
    add_switch(parser, "gray", "help")
    parser.add_argument("root")
    args = parser.parse_args([*arguments, "root"])
    assert (args.gray, args.root) == (expected, "root")


def test_switches_take_no_other_values():
    parser = argparse.ArgumentParser()
    add_switch(parser, "gray", "help")
    with pytest.raises(SystemExit):
        parser.parse_args(["--gray=perhaps"])


@pytest.mark.parametrize(
    "resize", [["--resize_height=4", "--resize_width=5"], ["-resize_height", "4", "-resize_width=5"]]
)
def test_convert_imageset_in_gray_and_resized(imageset, resize):
    assert tool("convert_imageset", "--gray", *resize, "images/", "list.txt", "out") == 0
    found = datums("out")
    assert list(found) == [f"{number:08d}_img_{number:02d}.png" for number in range(12)]
    assert {(datum.channels, datum.height, datum.width) for datum in found.values()} == {(1, 4, 5)}


def test_encoded_images_are_stored_as_files(imageset):
    tool("convert_imageset", "--encoded", "--backend=leveldb", "images/", "list.txt", "out")
    for key, datum in datums("out", "leveldb").items():
        assert datum.encoded
        assert datum.data == Path("images", key[9:]).read_bytes()


def test_images_are_encoded_anew_where_they_have_to_be(imageset):
    tool("convert_imageset", "--encode_type=jpg", "images/", "list.txt", "jpg")
    assert all(datum.data.startswith(b"\xff\xd8") for datum in datums("jpg").values())
    tool("convert_imageset", "--encoded", "--resize_height=3", "--resize_width=3", "images/", "list.txt", "small")
    for datum in datums("small").values():
        assert images.decode_image(datum.data, "native").shape == (3, 3, 3)


def test_shuffling_keeps_names_and_labels_together(imageset):
    tool("convert_imageset", "--shuffle", "images/", "list.txt", "out")
    labels = dict(line.split() for line in Path("list.txt").read_text().splitlines())
    found = datums("out")
    assert sorted(key[9:] for key in found) == sorted(labels)
    assert [key[:8] for key in found] == [f"{number:08d}" for number in range(12)]
    assert all(int(labels[key[9:]]) == datum.label for key, datum in found.items())


def test_unreadable_images_are_reported_and_left_out(imageset, capsys):
    Path("images/img_03.png").write_bytes(b"")
    Path("images/img_05.png").unlink()
    assert tool("convert_imageset", "images/", "list.txt", "out") == 0
    assert len(datums("out")) == 10
    assert "00000004_img_04.png" in datums("out")
    report = capsys.readouterr().err
    assert "list.txt:4: images/img_03.png: cannot be decoded" in report
    assert "list.txt:6: cannot read image images/img_05.png" in report
    assert "Processed 10 files." in report


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_interrupted_conversion_is_continued(imageset, folder, monkeypatch, shuffle):
    flags = ["--shuffle"] if shuffle else []
    plain = LMDBWriter.put

    def interrupted(self, key, value):
        plain(self, key, value)
        self._commit()
        if key.startswith(b"00000006"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LMDBWriter, "put", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tool("convert_imageset", *flags, "images/", "list.txt", "out")
    assert not Path("out").exists()
    with pytest.raises(ConfigError, match=r"out\.partial holds a database .* began with another conversion; remove it"):
        tool("convert_imageset", *flags, "--gray", "images/", "list.txt", "out")
    written = []
    monkeypatch.setattr(LMDBWriter, "put", lambda self, key, value: written.append(key) or plain(self, key, value))
    assert tool("convert_imageset", *flags, "images/", "list.txt", "out") == 0
    assert len(written) == 5  # after the seven that were there
    assert not Path("out.partial").exists()
    ours, theirs = (dict(open_database("lmdb", name).records()) for name in ("out", "db"))
    assert len(ours) == 12
    if not shuffle:
        assert {key: bytes(value) for key, value in ours.items()} == {
            key: bytes(value) for key, value in theirs.items()
        }
    assert {key[9:]: bytes(value) for key, value in ours.items()} == {
        key[9:]: bytes(value) for key, value in theirs.items()
    }


def test_two_conversions_to_one_place_are_refused(imageset):
    with (
        continued_database("lmdb", "out", {}, ()),
        pytest.raises(ConfigError, match=r"another run is writing .*out\.partial"),
    ):
        tool("convert_imageset", "images/", "list.txt", "out")


def test_the_pace_is_told_every_ten_seconds():
    times = iter([0.0, 4.0, 10.0, 15.0, 21.0])
    pace = Pace(200, lambda: next(times))
    assert [pace.count() for _ in range(4)] == [
        None,
        "1.0% done, 0 images/s, about 0:16:30 left",
        None,
        "2.0% done, 0 images/s, about 0:17:09 left",
    ]


def test_failures_leave_nothing_behind(imageset, folder):
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save("images/img_07.png")
    before = sorted(path.name for path in folder.iterdir())
    for backend in ("lmdb", "leveldb"):
        with pytest.raises(
            ConfigError, match=r"list\.txt:8: img_07\.png has shape \(2, 2, 3\).*img_00\.png has \(9, 11"
        ):
            tool("convert_imageset", "--check_size", f"--backend={backend}", "images/", "list.txt", "out")
        with pytest.raises(ConfigError, match="none of its 12 images could be read under 'nowhere/'"):
            tool("convert_imageset", f"--backend={backend}", "nowhere/", "list.txt", "out")
    with pytest.raises(ConfigError, match="db exists already"):
        tool("convert_imageset", "images/", "list.txt", "db")
    with pytest.raises(ConfigError, match="unknown database backend 'sqlite'; known: leveldb, lmdb"):
        tool("convert_imageset", "--backend=sqlite", "images/", "list.txt", "out")
    with pytest.raises(ConfigError, match="cannot read list none"):
        tool("convert_imageset", "images/", "none", "out")
    with pytest.raises(ConfigError, match="cannot write database gone/out: No such file"):
        tool("convert_imageset", "images/", "list.txt", "gone/out")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_interrupted_writing_leaves_nothing_behind(folder):
    def interrupted(backend):
        with new_database(backend, "out") as writer:
            writer.put(b"a", b"b")
            raise KeyboardInterrupt

    for backend in ("lmdb", "leveldb"):
        with pytest.raises(KeyboardInterrupt):
            interrupted(backend)
    assert not list(folder.iterdir())


def test_lmdb_grows_as_it_is_written(folder):
    with new_database("lmdb", "out") as writer:
        for number in range(30):
            writer.put(b"%03d" % number, RANDOM.bytes(1 << 20))
    assert sum(len(value) for _, value in open_database("lmdb", "out").records()) == 30 << 20


def test_key_too_long_for_lmdb_is_an_error(folder):
    writer = LMDBWriter(folder)
    writer.put(b"k" * 600, b"")
    with pytest.raises(ConfigError, match="cannot write LMDB database"):
        writer.finish()


def test_mean_is_logged_per_channel(imageset, capsys):
    assert tool("compute_image_mean", "-backend", "lmdb", "db", "mean.binaryproto") == 0
    mean = np.asarray(read_binary("mean.binaryproto", BlobProto).data).reshape(3, 9, 11)
    report = capsys.readouterr().err
    for channel in range(3):
        assert f"mean_value channel [{channel}]: {mean[channel].mean():g}" in report


def test_mean_needs_equal_sizes(imageset, folder):
    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save("images/img_07.png")
    tool("convert_imageset", "images/", "list.txt", "out")
    with pytest.raises(ConfigError, match=r"out: record '00000007_img_07\.png': has shape \(3, 2, 2\).*\(3, 9, 11\)"):
        tool("compute_image_mean", "out", "mean.binaryproto")
    assert not (folder / "mean.binaryproto").exists()


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_partition_deals_out_records_in_turn(imageset, backend):
    tool("convert_imageset", f"--backend={backend}", "images/", "list.txt", "whole")
    whole = [(key, bytes(value)) for key, value in open_database(backend, "whole").records()]
    tool("partition_data", f"--backend={backend}", "--num_partitions=5", "whole/")
    for rank in range(5):
        part = [(key, bytes(value)) for key, value in open_database(backend, f"whole_{rank}").records()]
        assert part == whole[rank::5]


def test_partitions_feed_workers_without_a_shared_file_system(imageset, caffe, monkeypatch):
    tool("partition_data", "--num_partitions", "3", "db")
    Path("net.prototxt").write_text(
        'layer { name: "d" type: "Data" top: "data" top: "label" '
        'data_param { source: "db" backend: LMDB batch_size: 4 shared_file_system: false } }'
    )
    for rank in range(3):
        for name, value in {"RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
            monkeypatch.setenv(name, str(value))
        net = caffe.Net("net.prototxt", caffe.TRAIN)
        assert net.forward()["label"].tolist() == [number % 4 for number in range(rank, 12, 3)]


def test_partition_of_lists_and_window_files(folder):
    Path("list.txt").write_text("a 1\nb 2\n\nc 3\n")
    tool("partition_data", "list.txt")
    assert Path("list.txt_0").read_text() == "a 1\nc 3\n"
    assert Path("list.txt_1").read_text() == "b 2\n"
    Path("w.txt").write_text("".join(f"# {n}\n{n}.png\n3\n9\n9\n1\n1 0.5 {n} 1 2 2\n" for n in range(5)))
    tool("partition_data", "w.txt")
    for rank in range(2):
        part = read_windows(f"w.txt_{rank}")
        assert part.images == [f"{number}.png" for number in range(rank, 5, 2)]
        assert [window.x1 for window in part.windows] == list(range(rank, 5, 2))
        assert [window.image for window in part.windows] == list(range(len(part.images)))


def test_partition_refuses_what_cannot_work(imageset, folder):
    Path("list.txt_1").touch()
    with pytest.raises(ConfigError, match=r"list\.txt_1 exists already"):
        tool("partition_data", "list.txt")
    with pytest.raises(ConfigError, match="12 records are too few for 13 partitions"):
        tool("partition_data", "--num_partitions=13", "db")
    with pytest.raises(ConfigError, match="number of partitions is 0"):
        tool("partition_data", "--num_partitions=0", "db")
    with pytest.raises(ConfigError, match="images: holds neither an LMDB nor a LevelDB"):
        tool("partition_data", "images")
    assert sorted(path.name for path in folder.iterdir()) == ["db", "images", "list.txt", "list.txt_1"]


def copy_case(name, folder):
    shutil.copytree(FORMATS / name, folder, dirs_exist_ok=True)


def test_extract_features_refuses_what_cannot_work(folder, caffe):
    copy_case("extract_features", folder)
    before = sorted(path.name for path in folder.iterdir())
    for arguments, message in (
        (["conv,ip", "a", "3", "lmdb"], "2 blobs .* and 1 databases"),
        (["conv,fc9", "a,b", "3", "lmdb"], "unknown blob of net.prototxt 'fc9'; known: conv, data, ip, label"),
        (["conv", "a", "0", "lmdb"], "number of batches is 0"),
        (["conv", "a", "1", "csv"], "unknown database backend 'csv'"),
        (["conv", "db", "1", "lmdb"], "db exists already"),
        (["conv", "a", "1", "lmdb", "GPU", "x"], "DEVICE_ID is 'x'"),
    ):
        with pytest.raises(ConfigError, match=message):
            tool("extract_features", "weights.caffemodel", "net.prototxt", *arguments)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert tool("extract_features", "weights.caffemodel", "net.prototxt", "ip", "out", "2", "leveldb", "CPU") == 0
    assert len(datums("out", "leveldb")) == 8


def test_upgrade_net_finds_out_what_the_file_is(folder):
    copy_case("upgrade_other", folder)
    for old in sorted(folder.glob("old_*.prototxt")):
        assert tool("upgrade_net", old.name, "new.prototxt") == 0
        kind = SolverParameter if "solver" in old.name else NetParameter
        assert detect_kind(old.name) == ("solver_text" if "solver" in old.name else "net_text")
        expected = read_text(old.name.replace("old_", "expected_"), kind)
        assert read_text("new.prototxt", kind) == expected


def test_upgrade_net_of_weights(folder, capsys):
    shutil.copy(FORMATS / "caffemodel" / "weights.caffemodel", folder)
    assert tool("upgrade_net", "weights.caffemodel", "new.caffemodel") == 0
    assert tool("upgrade_net", "new.caffemodel", "newer.caffemodel") == 0
    old, new = (read_binary(name, NetParameter) for name in ("weights.caffemodel", "newer.caffemodel"))
    assert [layer.blobs for layer in new.layer] == [layer.blobs for layer in old.layer]
    assert Path("newer.caffemodel").read_bytes() == Path("new.caffemodel").read_bytes()
    report = capsys.readouterr().err
    assert "File already in latest proto format: new.caffemodel" in report
    assert "Wrote upgraded NetParameter binary proto to newer.caffemodel" in report


def test_upgrade_net_errors_name_the_file(folder):
    with pytest.raises(ConfigError, match="cannot read none"):
        tool("upgrade_net", "none", "out")
    Path("bad.prototxt").write_text('name: "x"\nlayerz { }\n')
    with pytest.raises(ConfigError, match=r"bad\.prototxt:2"):
        tool("upgrade_net", "bad.prototxt", "out")
    with pytest.raises(ConfigError, match="unknown kind of file 'zip'; known: auto"):
        tool("upgrade_net", "--type=zip", "bad.prototxt", "out")
    assert not Path("out").exists()


def test_tools_leave_logging_as_it_was(imageset):
    before = logging.getLogger("poseidon.caffe").handlers[:]
    tool("compute_image_mean", "db")
    assert logging.getLogger("poseidon.caffe").handlers == before


def mnist_files(count=5, rows=4, columns=3):
    pixels = RANDOM.integers(0, 256, (count, rows, columns)).astype(np.uint8)
    labels = np.arange(count, dtype=np.uint8)
    Path("images").write_bytes(struct.pack(">IIII", 2051, count, rows, columns) + pixels.tobytes())
    Path("labels").write_bytes(struct.pack(">II", 2049, count) + labels.tobytes())
    return pixels


@pytest.mark.parametrize("backend", ["lmdb", "leveldb"])
def test_mnist_is_converted(backend):
    pixels = mnist_files()
    assert tool("convert_mnist_data", f"--backend={backend}", "images", "labels", "out") == 0
    records = [(key, parse_datum(value, "out")) for key, value in open_database(backend, "out").records()]
    assert [key for key, _ in records] == [b"%08d" % number for number in range(5)]
    for number, (_, datum) in enumerate(records):
        assert (datum.channels, datum.height, datum.width, datum.label) == (1, 4, 3, number)
        assert datum.data == pixels[number].tobytes()
        assert not datum.HasField("encoded")  # as Caffe writes them


def test_files_that_are_not_mnist_are_explained():
    mnist_files()
    for name, content, message in (
        ("images", Path("images").read_bytes()[:-1], "images: has 75 bytes, and by what it states should have 76"),
        ("images", Path("labels").read_bytes(), "images: begins with 2049 and has 13 bytes, expected 2051"),
        ("images", b"\x1f\x8b" + bytes(40), "unpack it with gunzip first"),
        ("labels", struct.pack(">II", 2049, 4) + bytes(4), "images holds 5 images, labels 4 labels"),
        ("labels", b"", "labels: begins with 0 and has 0 bytes, expected 2049"),
    ):
        mnist_files()
        Path(name).write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            tool("convert_mnist_data", "images", "labels", "out")
    assert not Path("out").exists()


def test_cifar_is_converted():
    pixels = RANDOM.integers(0, 256, (12, 3072)).astype(np.uint8)
    names = [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]
    for number, name in enumerate(names):
        rows = range(2 * number, 2 * number + 2)
        Path(name).write_bytes(b"".join(bytes([row % 10]) + pixels[row].tobytes() for row in rows))
    assert tool("convert_cifar_data", ".", ".", "lmdb") == 0
    for name, first, count in (("train", 0, 10), ("test", 10, 2)):
        records = list(open_database("lmdb", f"cifar10_{name}_lmdb").records())
        assert [key for key, _ in records] == [b"%05d" % number for number in range(count)]
        for row, (_, value) in enumerate(records, first):
            datum = parse_datum(value, name)
            assert (datum.channels, datum.height, datum.width, datum.label) == (3, 32, 32, row % 10)
            assert datum.data == pixels[row].tobytes()
    Path("data_batch_3.bin").write_bytes(bytes(3074))
    shutil.rmtree("cifar10_train_lmdb")
    with pytest.raises(ConfigError, match=r"data_batch_3\.bin: has 3074 bytes, expected a multiple of 3073"):
        tool("convert_cifar_data", ".", ".", "lmdb")
