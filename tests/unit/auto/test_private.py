"""Parts of a private view that need no namespace: what is mounted where, what is kept as it was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from poseidon.auto.private.frozen import Preserver, Survey, survey
from poseidon.auto.private.outline import Mount, ViewPart, outermost_inside, outline, parse_mounts
from poseidon.auto.private.view import _frozen_roots
from poseidon.files import came_of_full_disk

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw,nosuid shared:5 - proc proc rw
24 22 0:5 / /dev rw,nosuid - devtmpfs udev rw,size=1k
25 22 7:0 / /snap/core ro,nodev shared:30 - squashfs /dev/loop0 ro
26 22 8:2 / /home/my\\040data rw,relatime - xfs /dev/sdb rw
27 22 0:44 / /home/my\\040data rw,relatime - nfs4 server:/data rw
"""


def test_the_table_of_mounts_is_read() -> None:
    found = {mount.point: mount for mount in parse_mounts(MOUNTINFO)}
    assert found["/home/my data"] == Mount("/home/my data", "nfs4", 44, False)
    assert {point for point, mount in found.items() if mount.is_passed} == {"/proc", "/dev", "/snap/core"}
    assert found["/"].device == os.makedev(8, 1)


FOLDERS = {
    "/": ["dev", "home", "proc", "snap", "tmp"],
    "/home": ["me", "my data"],
    "/snap": ["core", "other"],
}


def test_root_overlays_the_whole_tree_and_what_is_mounted_in_it() -> None:
    parts = outline(parse_mounts(MOUNTINFO), ["/home/me/.cache"], FOLDERS.get, is_split=False)
    assert parts[0] == ViewPart("/", "overlay")
    assert {part.path: part.how for part in parts[1:]} == {
        **dict.fromkeys(("/dev", "/proc", "/run", "/snap/core", "/sys", "/home/me/.cache"), "pass"),
        "/home/my data": "overlay",
    }


def test_an_ordinary_user_overlays_no_folder_that_contains_a_mount() -> None:
    parts = outline(parse_mounts(MOUNTINFO), ["/home/me/.cache"], FOLDERS.get, is_split=True)
    assert {part.path: part.how for part in parts} == {
        **dict.fromkeys(("/", "/home", "/snap"), "level"),
        **dict.fromkeys(("/home/me", "/home/my data", "/tmp", "/snap/other"), "overlay"),
        **dict.fromkeys(("/dev", "/proc", "/snap/core", "/home/me/.cache"), "pass"),
    }
    for part in parts:
        # A part is mounted in what is already there.
        parents = [one.path for one in parts[: parts.index(part)]]
        assert part.path == "/" or str(Path(part.path).parent) in parents or "/home/me" in parents


def test_a_folder_that_may_not_be_read_is_passed_through() -> None:
    folders = {**FOLDERS, "/snap": None}
    parts = outline(parse_mounts(MOUNTINFO), [], folders.get, is_split=True)
    assert ViewPart("/snap", "pass") in parts
    assert not any(part.path.startswith("/snap/") for part in parts)


def test_outermost_folders() -> None:
    assert outermost_inside(["/a/b/c", "/a/b", "/a", "/ab", "/a/c"], "/a") == ["/a/b", "/a/c"]


def furnish(folder: Path, files: dict[str, int]) -> str:
    for name, size in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(size))
    return str(folder)


def test_large_folders_are_live(tmp_path: Path) -> None:
    few = {"a": 1, "runs/b": 1, "data/list": 1, ".git/HEAD": 1, ".venv/pyvenv.cfg": 1, "mounted/x": 1}
    root = furnish(tmp_path, {**few, **{f"data/images/{number}": 0 for number in range(30)}})
    found = survey(root, [f"{root}/mounted"], most=20)
    assert found.frozen == (root, f"{root}/data", f"{root}/runs")
    assert found.live == tuple(f"{root}/{name}" for name in (".git", ".venv", "data/images", "mounted"))
    # Too many live folders in one make it live.
    crowded = furnish(tmp_path, {f"data/classes/{kind}/{number}": 0 for kind in range(20) for number in range(9)})
    assert f"{root}/data/classes" in survey(crowded, [], most=100).live
    assert survey(root, [], most=3) == Survey((), (root,))


def test_a_frozen_folder_stays_as_it_was(tmp_path: Path) -> None:
    root = furnish(tmp_path / "real", {"small": 3, "large": 9 << 20, "sub/x": 1, "live/y": 1, "sub/hidden/z": 1})
    Path(f"{root}/link").symlink_to("small")
    os.utime(f"{root}/small", (1e9, 1e9))
    copy, hidden = tmp_path / "copy", f"{root}/sub/hidden"
    found = Preserver().freeze(survey(root, [f"{root}/live"], hidden), root, copy, hidden)
    Path(f"{root}/small").write_bytes(b"changed")
    Path(f"{root}/large").unlink()
    Path(f"{root}/new").touch()
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*")) == [
        *("large", "link", "live", "small", "sub", "sub/x")
    ]
    assert (copy / "link").readlink() == Path("small")
    assert (copy / "small").read_bytes() == bytes(3)
    assert (copy / "small").stat().st_mtime == 1e9
    assert (copy / "large").stat().st_size == 9 << 20
    assert found.live == (f"{root}/live",)
    assert not list((copy / "live").iterdir())


def test_a_folder_with_a_file_that_cannot_be_kept_is_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = furnish(tmp_path / "real", {"a": 1, "sub/large": 9 << 20, "sub/deep/x": 1})

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("poseidon.auto.private.frozen._clone", lambda *_: False)
    found = Preserver().freeze(survey(root, []), root, tmp_path / "copy")
    assert found == Survey((root,), (f"{root}/sub",))
    assert (tmp_path / "copy" / "a").exists()


def test_a_full_disk_is_recognised_behind_other_errors() -> None:
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = OSError(errno.ENOSPC, "No space left on device")
    assert came_of_full_disk(error)
    assert not came_of_full_disk(OSError(errno.EACCES, "Permission denied"))


def test_folders_that_arguments_name_are_frozen_but_not_home_or_all_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work, out = tmp_path / "home", tmp_path / "home" / "work", tmp_path / "out"
    for folder in (work, out):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    words = ["--out", f"{out}/new/run", f"--log={out}/x", "~", "relative", "--lr=/", str(work / "in"), "/tmp", "~/runs"]
    assert _frozen_roots(work, words) == [str(work), str(out)]
