from __future__ import annotations

import glob
import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from poseidon import files
from poseidon.auto.files import Overlay
from poseidon.following.patches import Patches

# ruff: noqa: PTH107, PTH103, PTH102, PTH104, PTH105, PTH123, PTH110, PTH207, PTH208


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder in which a worker that is not the first works; after the test it is shown as it really is."""
    real = tmp_path / "work"
    (real / "data").mkdir(parents=True)
    (real / "data" / "old.txt").write_text("old")
    for path in (real / "data" / "old.txt", real / "data", real):
        os.utime(path, (1e9, 1e9))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.chdir(real)
    patches = Patches()
    Overlay(scratch, time.time() - 100).install(patches)
    yield real
    patches.undo()
    assert [str(path.relative_to(real)) for path in sorted(real.rglob("*"))] == ["data", "data/old.txt"]
    assert (real / "data" / "old.txt").read_text() == "old"


def test_a_worker_reads_what_it_wrote(place: Path) -> None:
    with open("a.json", "w") as file:
        json.dump({"x": 1}, file)
    assert json.loads(Path("a.json").read_text()) == {"x": 1}
    torch.save(torch.ones(2), "b.pt")
    assert torch.load("b.pt").tolist() == [1, 1]
    assert os.path.exists("b.pt")
    assert sorted(os.listdir(".")) == ["a.json", "b.pt", "data"]
    assert sorted(glob.glob("*.pt")) == ["b.pt"]


def test_existing_files_are_read_appended_and_replaced(place: Path) -> None:
    assert (place / "data" / "old.txt").read_text() == "old"
    with open("data/old.txt", "a") as file:
        file.write(" and new")
    assert Path("data/old.txt").read_text() == "old and new"
    Path("data/old.txt").write_text("x")
    assert Path("data/old.txt").read_text() == "x"


def test_folders_copies_renames_and_removals(place: Path) -> None:
    os.makedirs("runs/1", exist_ok=True)
    os.makedirs("runs/1", exist_ok=True)
    with pytest.raises(FileExistsError):
        os.mkdir("runs")
    shutil.copyfile("data/old.txt", "runs/1/copy.txt")
    os.replace("runs/1/copy.txt", "runs/1/best.txt")
    assert os.listdir("runs/1") == ["best.txt"]
    os.rename("data/old.txt", "data/new.txt")
    assert os.listdir("data") == ["new.txt"]
    os.remove("data/new.txt")
    assert os.listdir("data") == []
    with pytest.raises(FileNotFoundError):
        os.remove("data/old.txt")
    with pytest.raises(FileNotFoundError), open("missing/file", "w"):
        pass


def test_files_that_are_replaced_whole_go_to_scratch(place: Path) -> None:
    for path in ("data/old.txt", "new.txt", "made/new.txt"):
        Path("made").mkdir(exist_ok=True)
        files.write_text(path, "new", "file")
        files.write_text(path, "newer", "file")
        assert Path(path).read_text() == "newer"
    with files.replacing_folder("database", "database") as folder:
        (folder / "data").write_text("new")
    assert sorted(path.name for path in Path().iterdir()) == ["data", "database", "made", "new.txt"]
    assert os.listdir("database") == ["data"]


def test_a_log_goes_to_scratch(place: Path) -> None:
    handler = logging.FileHandler("train.log")
    handler.emit(logging.makeLogRecord({"msg": "hello"}))
    handler.close()
    assert Path("train.log").read_text() == "hello\n"


def test_what_worker_0_writes_meanwhile_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    patches = Patches()
    overlay = Overlay(tmp_path / "scratch", time.time() - 100)
    real_open = open
    overlay.install(patches)
    try:
        assert not os.path.exists("cache.pt")
        with real_open("cache.pt", "w") as file:
            file.write("by worker 0")
        assert not os.path.exists("cache.pt")
        assert os.listdir(".") == []
        with open("cache.pt", "x") as file:
            file.write("mine")
        assert Path("cache.pt").read_text() == "mine"
    finally:
        patches.undo()
    assert Path("cache.pt").read_text() == "by worker 0"


def test_caches_devices_and_temporary_files_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path.parent))
    overlay = Overlay(tmp_path / "scratch")
    assert overlay.covers(str(tmp_path / "out.txt"))
    assert overlay.covers("/home/somebody/out.txt")
    assert not overlay.covers(str(tmp_path / "scratch" / "x"))
    assert not overlay.covers(str(tmp_path.parent / "other"))
    assert not overlay.covers("/dev/null")
    assert not overlay.covers(str(Path("~/.cache/torch/x").expanduser()))
    # A package that was installed since the job's start would be hidden as worker 0's, and fail to be imported.
    assert not overlay.covers(torch.__file__)


def _writers() -> ModuleType:
    """Return the script that writes files in every way, as a module."""
    path = Path(__file__).parents[2] / "auto_scripts" / "writers.py"
    spec = importlib.util.spec_from_file_location("writers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NEW_FILES = (
    *("by_open", "by_exclusive_open", "by_pathlib", "by_descriptor", "by_move_from_elsewhere", "by_link"),
    *("by_rename_from_elsewhere", "by_temporary_file_beside", "by_tarfile", "by_zipfile", "by_torch"),
)
OLD_FILES = ("by_folders", "by_old_folder", "by_memmap", "by_log")


@pytest.mark.parametrize("way", [*NEW_FILES, *OLD_FILES])
def test_what_python_writes_does_not_touch_worker_0s_files(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = _writers().WAYS
    work = tmp_path / "work"
    for name in ("earlier/a.txt", "old/a.txt", "old/train.log"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("earlier" if "earlier" in name else "earlier\n")
    (work / "old" / "large.bin").write_bytes(bytes(1000))
    for path in (*work.rglob("*"), work):
        os.utime(path, (1e9, 1e9))
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(work)
    patches = Patches()
    overlay = Overlay(tmp_path / "scratch", time.time() - 100)
    if way in NEW_FILES:
        # Worker 0 has been faster: what it wrote since the start is neither seen nor changed.
        ways[way]("0")
    before = _contents(work)
    overlay.install(patches)
    try:
        assert ways[way]("1") == "1"
    finally:
        patches.undo()
    assert _contents(work) == before


def _contents(folder: Path) -> dict[str, object]:
    return {str(path): path.is_dir() or path.read_bytes() for path in sorted(folder.rglob("*"))}
