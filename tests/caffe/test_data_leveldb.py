from __future__ import annotations

import shutil

import pytest
from caffe_golden import GOLDENS
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.caffe.io.leveldb import LevelDB, LevelDBWriter
from poseidon.caffe.io.leveldb.checksum import crc32c
from poseidon.caffe.io.leveldb.coding import DELETION, VALUE, string
from poseidon.caffe.io.leveldb.log import format_log, read_log
from poseidon.caffe.io.leveldb.snappy import decompress
from poseidon.caffe.io.leveldb.version import Version, read_version, write_version
from poseidon.errors import ConfigError

IMAGESET = GOLDENS / "formats" / "imageset_leveldb"


def slow_crc32c(content):
    state = 0xFFFFFFFF
    for byte in content:
        state ^= byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    return state ^ 0xFFFFFFFF


def test_checksum_of_the_standard_string():
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA


@given(st.binary(max_size=600), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_checksum_matches_the_definition(content, repeats):
    content = content * (1 + repeats if len(content) < 200 else 1)
    assert crc32c(content) == slow_crc32c(content)


@pytest.mark.parametrize(
    ("compressed", "plain"),
    [
        (b"\x00", b""),
        (b"\x03\x08abc", b"abc"),
        (b"\x0a\x08abc\x0d\x03", b"abcabcabca"),  # a copy of 7 that overlaps itself, offset 3
        (b"\x06\x08abc\x0a\x03\x00", b"abcabc"),  # offset in two bytes
        (b"\x06\x08abc\x0b\x03\x00\x00\x00", b"abcabc"),  # offset in four bytes
        (b"\x46\xf0\x45" + b"x" * 70, b"x" * 70),  # length of a literal in an extra byte
    ],
)
def test_snappy(compressed, plain):
    assert decompress(compressed) == plain


@pytest.mark.parametrize(
    "damaged", [b"", b"\x03\x08ab", b"\x04\x08abc", b"\x06\x08abc\x0a\x09\x00", b"\x06\x08abc\x0a"]
)
def test_damaged_snappy_is_refused(damaged):
    with pytest.raises(ValueError, match=r"bytes|element|end"):
        decompress(damaged)


def test_logs_are_framed_as_leveldb_frames_them():
    log = IMAGESET / "db_fresh" / "000003.log"
    assert format_log(read_log(log)) == log.read_bytes()
    manifest = IMAGESET / "db_reopened" / "MANIFEST-000004"
    assert format_log(read_log(manifest)) == manifest.read_bytes()


@given(st.lists(st.integers(0, 70000), max_size=6))
@settings(max_examples=40, deadline=None)
def test_records_of_any_length_survive_the_log(tmp_path_factory, lengths):
    records = [bytes([number % 251]) * length for number, length in enumerate(lengths)]
    path = tmp_path_factory.mktemp("log") / "1.log"
    path.write_bytes(format_log(records))
    assert list(read_log(path)) == records


records = st.lists(st.tuples(st.binary(min_size=1, max_size=12), st.binary(max_size=300)), max_size=40)


@given(records, st.sampled_from([1, 200, 1 << 20]))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_in_the_order_of_keys(tmp_path_factory, pairs, table_bytes):
    folder = tmp_path_factory.mktemp("db")
    writer = LevelDBWriter(folder, table_bytes)
    for key, value in pairs:
        writer.put(key, value)
    writer.finish()
    assert list(LevelDB(str(folder)).records()) == sorted(dict(pairs).items())


def test_sorted_writes_go_to_the_last_level_and_others_to_the_first(tmp_path):
    for name, order, level in (("up", 1, 6), ("down", -1, 6), ("twice", 0, 0)):
        (tmp_path / name).mkdir()
        writer = LevelDBWriter(tmp_path / name, 1)
        for number in (3, 4, 5)[:: order or 1]:
            writer.put(b"%d" % number, b"")
        if not order:
            writer.put(b"3", b"again")
        writer.finish()
        version = read_version(tmp_path / name)
        assert {at for at, _ in version.tables} == {level}
        assert version.next_file_number > max(number for _, number in version.tables)
        assert version.last_sequence == 3 + (not order)


def test_deletions_and_later_values_win_over_tables(tmp_path):
    writer = LevelDBWriter(tmp_path)
    for key in (b"a", b"b", b"c"):
        writer.put(key, b"old")
    writer.finish()
    batch = (10).to_bytes(8, "little") + (3).to_bytes(4, "little")
    batch += bytes([DELETION]) + string(b"a")
    batch += bytes([VALUE]) + string(b"b") + string(b"new")
    batch += bytes([VALUE]) + string(b"d") + string(b"fresh")
    (tmp_path / "000003.log").write_bytes(format_log([batch]))
    (tmp_path / "000001.log").write_bytes(b"a log older than the manifest's is not read")
    assert list(LevelDB(str(tmp_path)).records()) == [(b"b", b"new"), (b"c", b"old"), (b"d", b"fresh")]


def test_every_cut_of_a_log_or_table_is_noticed(tmp_path):
    for folder, name in (("db_fresh", "000003.log"), ("db_reopened", "000005.ldb"), ("db_fresh", "MANIFEST-000002")):
        whole = (IMAGESET / folder / name).read_bytes()
        for length in {1, 6, len(whole) // 3, len(whole) - 49, len(whole) - 1}:
            copy = tmp_path / f"{name}-{length}"
            shutil.copytree(IMAGESET / folder, copy)
            (copy / name).write_bytes(whole[:length])
            with pytest.raises(ConfigError, match=name):
                list(LevelDB(str(copy)).records())


def test_a_flipped_bit_is_noticed(tmp_path):
    for folder, name in (("db_fresh", "000003.log"), ("db_reopened", "000005.ldb")):
        copy = tmp_path / folder
        shutil.copytree(IMAGESET / folder, copy)
        content = bytearray((copy / name).read_bytes())
        content[200] ^= 4
        (copy / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name}.*checksum"):
            list(LevelDB(str(copy)).records())


def test_missing_parts_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere: no LevelDB database"):
        LevelDB(str(tmp_path / "nowhere"))
    copy = tmp_path / "db"
    shutil.copytree(IMAGESET / "db_reopened", copy)
    (copy / "000005.ldb").unlink()
    with pytest.raises(ConfigError, match=r"000005\.ldb is missing"):
        list(LevelDB(str(copy)).records())
    (copy / "CURRENT").write_text("MANIFEST-000099\n")
    with pytest.raises(ConfigError, match="CURRENT names 'MANIFEST-000099'"):
        LevelDB(str(copy))


def test_foreign_order_of_keys_is_refused(tmp_path):
    write_version(tmp_path, Version(), 2)
    manifest = tmp_path / "MANIFEST-000002"
    manifest.write_bytes(format_log([b"\x01" + string(b"my.Comparator")]))
    with pytest.raises(ConfigError, match=r"my\.Comparator"):
        LevelDB(str(tmp_path))


def test_reading_changes_nothing(tmp_path):
    copy = tmp_path / "db"
    shutil.copytree(IMAGESET / "db_fresh", copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    assert len(list(LevelDB(str(copy)).records())) == 12
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
