"""Files under ``--auto``: whatever writes them, the folder is afterwards as if the script had run alone."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from poseidon.launch import scratch
from poseidon.launch.local import run_workers

SCRIPT = Path(__file__).parents[1] / "auto_scripts" / "writers.py"
OPTIONAL = {"by_tokenizers": "tokenizers", "by_safetensors": "safetensors"}
WAYS = [
    name
    for name in (line[4:].partition("(")[0] for line in SCRIPT.read_text().splitlines() if line.startswith("def by_"))
    if name not in OPTIONAL or importlib.util.find_spec(OPTIONAL[name])
]

ENTER = """
import os, signal, sys
from pathlib import Path
from poseidon.auto.private.view import enter
sys.exit(enter(Path.cwd(), []))
"""


def private_view(*before: str) -> str:
    """Return why this system has no private views, or nothing."""
    words = [*before, sys.executable, "-c", ENTER]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stderr.strip()


def can_be_both() -> bool:
    """Whether we are root and can give up the right to mount."""
    return os.geteuid() == 0 and shutil.which("setpriv") is not None


@pytest.fixture(scope="module", params=["as we are", "as an ordinary user"])
def prefix(request: pytest.FixtureRequest) -> list[str]:
    """Return how to start a worker: as root it needs no user namespace, so there we give up the right to mount."""
    words: list[str] = []
    if request.param == "as an ordinary user":
        if not can_be_both():
            pytest.skip("we are an ordinary user already, or there is no setpriv to become one")
        words = ["setpriv", "--bounding-set=-sys_admin"]
    reason = private_view(*words)
    if reason:
        pytest.skip(f"no private view: {reason}")
    return words


def furnish(folder: Path) -> Path:
    """Make what is there from an earlier run."""
    (folder / "old").mkdir(parents=True)
    (folder / "earlier").mkdir()
    (folder / "earlier" / "a.txt").write_text("earlier")
    (folder / "old" / "a.txt").write_text("old")
    (folder / "old" / "large.bin").write_bytes(bytes(2 << 20))
    base = sqlite3.connect(folder / "old.db")
    base.execute("create table kept (text)")
    base.execute("insert into kept values ('kept')")
    base.commit()
    base.close()
    (folder / "old" / "train.log").write_text("earlier\n")
    return folder


def contents(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.readlink() if path.is_symlink() else None if path.is_dir() else path.read_bytes()
    return found


def leftovers(directory: Path) -> set[Path]:
    """Return the scratch folders that nobody uses: other jobs of this machine have theirs in the same places."""
    found = {one for place in scratch.places(directory) for one in place.glob(f"*{scratch.PREFIX}*")}
    return {one for one in found if not is_used(one)}


def is_used(folder: Path) -> bool:
    try:
        with (folder / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # held by its worker, or removed just now
        return folder.exists() and (folder / "lock").exists()
    return False


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Return what a folder holds after the script has run in it alone."""
    # The name is part of what one of the ways writes.
    folder = furnish(tmp_path_factory.mktemp("alone") / "work")
    subprocess.run([sys.executable, str(SCRIPT), *WAYS], cwd=folder, check=True, timeout=100)
    return contents(folder)


@pytest.mark.parametrize("count", [2, 3])
def test_the_folder_is_as_if_the_script_had_run_alone(
    count: int,
    prefix: list[str],
    alone: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if can_be_both() and count != (2 if prefix else 3):
        pytest.skip("as root, 3 workers run as we are and 2 as an ordinary user's")
    monkeypatch.chdir(furnish(tmp_path / "work"))
    before = leftovers(Path.cwd())
    assert run_workers([*prefix, sys.executable, "-m", "poseidon.auto", str(SCRIPT), *WAYS], count) == 0
    captured = capfd.readouterr()
    assert captured.out.splitlines() == ["worker 0 is done"]
    assert "private view" not in captured.err
    assert contents(Path.cwd()) == alone
    assert leftovers(Path.cwd()) <= before


KILLED = """
import os, signal, sys
from pathlib import Path
from poseidon.auto.private.view import enter
assert enter(Path.cwd(), []) is None
Path("a.txt").write_text("mine")
Path("closed").mkdir(mode=0o500)
os.mkdir("/tmp/poseidon-test-of-a-killed-worker")
print(Path("a.txt").read_text(), os.listdir("."), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("by_launcher", [False, True])
def test_nothing_is_left_of_a_killed_worker(
    by_launcher: bool, prefix: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = leftovers(tmp_path)
    Path("a.txt").write_text("real")
    worker = subprocess.run(
        [*prefix, sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert worker.returncode == -signal.SIGKILL
    assert worker.stdout.startswith("mine ['")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert Path("a.txt").read_text() == "real"
    assert not Path("/tmp/poseidon-test-of-a-killed-worker").exists()
    if by_launcher:
        scratch.sweep(tmp_path)
    deadline = time.monotonic() + 30
    while leftovers(tmp_path) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert leftovers(tmp_path) <= before


SEEN = """
import os, sys
from pathlib import Path
from poseidon.auto.private.view import enter
assert enter(Path.cwd(), ["--out", sys.argv[1]]) is None
print("entered", flush=True)
sys.stdin.readline()
print({path.name: path.is_dir() or path.read_text() for path in sorted(Path().iterdir())}, flush=True)
print(os.listdir(sys.argv[1]), oct(os.stat("/").st_mode), os.listdir("/proc/self/task") == [str(os.getpid())])
"""


def test_what_worker_0_writes_later_is_not_seen(prefix: list[str], tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    for name in ("changed", "replaced", "renamed", "removed"):
        (work / name).write_text("old")
    words = [*prefix, sys.executable, "-c", SEEN, str(out)]
    with subprocess.Popen(words, cwd=work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        assert worker.stdout.readline() == "entered\n"
        (work / "new").write_text("new")
        (work / "folder").mkdir()
        (work / "changed").write_text("new")
        with tempfile.NamedTemporaryFile("w", dir=work, delete=False) as draft:
            draft.write("new")
        Path(draft.name).replace(work / "replaced")
        (work / "renamed").rename(work / "name")
        (work / "removed").unlink()
        (out / "version_0").mkdir()
        seen, _ = worker.communicate("go on\n", timeout=60)
    shown, rest = seen.splitlines()
    assert shown == str(dict.fromkeys(("changed", "removed", "renamed", "replaced"), "old"))
    assert rest.startswith("[] ")
    assert rest.endswith(" True")


def test_without_a_view_one_line_says_so_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # The view's result as a worker finds it in a container that allows no namespaces.
    monkeypatch.setenv("POSEIDON_VIEW", "Operation not permitted (unshare)")
    monkeypatch.chdir(furnish(tmp_path / "work"))
    words = [sys.executable, "-m", "poseidon.auto", str(SCRIPT), "by_move_from_elsewhere", "by_tarfile", "by_link"]
    assert run_workers(words, 2) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "private view" in line]
    assert len(said) == 1
    assert "worker 1 has no private view of the file system (Operation not permitted (unshare))" in said[0]
    assert [Path(name).read_text() for name in ("last.ckpt", "unpacked/x.txt", "hard.txt", "soft.txt")] == ["0"] * 4
