"""Files are written whole or not at all, also when the disk is full or the process is killed."""

import errno
import os
import resource
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest

from poseidon import files
from poseidon.errors import ConfigError

OLD = b"the old content"


@contextmanager
def small_files(limit=4096):
    """The system refuses to let a file grow beyond ``limit``, as it does on a full disk (EFBIG instead of ENOSPC)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(OLD)
    return path


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole(target):
    files.write_bytes(target, b"new", "test file")
    assert target.read_bytes() == b"new"
    files.write_json(target, {"a": [1]}, "test file")
    assert files.read_json(target, "test file") == {"a": [1]}
    assert names_in(target.parent) == ["file"]


def test_permissions_are_those_of_the_old_file_or_of_any_new_one(target):
    target.chmod(0o640)
    files.write_bytes(target, b"new", "test file")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    before = os.umask(0o027)
    try:
        files.write_bytes(target.with_name("other"), b"new", "test file")
    finally:
        os.umask(before)
    assert stat.S_IMODE(target.with_name("other").stat().st_mode) == 0o640


def test_a_link_stays_and_what_it_names_is_replaced(target):
    link = target.with_name("link")
    link.symlink_to("file")
    files.write_bytes(link, b"new", "test file")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


def test_a_device_is_written_to_not_replaced(tmp_path):
    files.write_bytes("/dev/null", b"new", "test file")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(ConfigError, match=r"write test file /dev/full: No space left on device; free some space"):
        files.write_bytes("/dev/full", b"new", "test file")
    with pytest.raises(ConfigError, match="it is a folder, expected a file"):
        files.write_bytes(tmp_path, b"new", "test file")


def test_a_long_name_leaves_room_for_the_temporary_one(tmp_path):
    for name in ("n" * 255, "é" * 127):
        files.write_bytes(tmp_path / name, b"new", "test file")
        assert (tmp_path / name).read_bytes() == b"new"


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_whatever_fails_the_old_file_stays_and_nothing_else(target, monkeypatch, step, number):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    if step == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", fail)

    def write():
        with files.replacing(target, "test file") as temporary:
            temporary.write_bytes(b"new")
            if step == "write":
                fail()

    with pytest.raises(ConfigError, match=rf"cannot write test file .*file: {os.strerror(number)}"):
        write()
    assert target.read_bytes() == OLD
    assert names_in(target.parent) == ["file"]


def test_a_limit_on_sizes_is_named(target):
    with small_files(), pytest.raises(ConfigError, match=r"File too large; raise the limit on file sizes"):
        files.write_bytes(target, bytes(10_000), "test file")
    assert target.read_bytes() == OLD
    assert names_in(target.parent) == ["file"]


def test_file_and_folder_reach_the_disk_before_the_old_file_goes(target, monkeypatch):
    told = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: told.append(Path(f"/proc/self/fd/{fd}").readlink().name) or sync(fd))
    monkeypatch.setattr(Path, "replace", lambda self, to: told.append("replace") or replace(self, to))
    files.write_bytes(target, b"new", "test file")
    temporary, *rest = told
    assert temporary.startswith(".file.")
    assert rest == ["replace", target.parent.name]


def test_names_of_temporary_files_cannot_be_guessed(target):
    seen = set()
    for _ in range(3):
        with files.replacing(target, "test file") as temporary:
            seen.add(temporary.name)
            assert temporary.parent == target.parent
    assert len(seen) == 3


def test_endless_and_giant_files_are_not_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read test file /dev/zero: it has more, expected at most 1000"):
        files.read_bytes("/dev/zero", "test file", 1000)
    giant = tmp_path / "giant"
    with giant.open("wb") as stream:
        stream.truncate(3 << 40)
    with pytest.raises(ConfigError, match="it has 3298534883328 bytes, expected at most"):
        files.read_bytes(giant, "test file")
    with pytest.raises(ValueError, match="are named, but it has"):
        files.BoundedFile(giant, "test file").read((3 << 40) - 1, 2)


def test_names_that_no_file_can_have_are_refused():
    for call in (lambda: files.read_bytes("a\0b", "test file"), lambda: files.write_bytes("a\0b", b"", "test file")):
        with pytest.raises(ConfigError, match=r"cannot (read|write) test file 'a\\x00b': embedded null byte"):
            call()


def test_deep_json_is_refused():
    with pytest.raises(ConfigError, match="test file is not usable JSON: it is nested too deeply"):
        files.parse_json("[" * 100_000, "test file")


def test_a_folder_appears_complete_or_not_at_all(tmp_path):
    with files.replacing_folder(tmp_path / "db", "database") as temporary:
        (temporary / "data").write_bytes(b"new")
        assert not (tmp_path / "db").exists()
    assert (tmp_path / "db" / "data").read_bytes() == b"new"

    def fail():
        with files.replacing_folder(tmp_path / "other", "database") as temporary:
            (temporary / "data").write_bytes(b"new")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ConfigError, match=r"cannot write database .*other: No space"):
        fail()
    assert names_in(tmp_path) == ["db"]
