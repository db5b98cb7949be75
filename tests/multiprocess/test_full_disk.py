"""A full disk ends no job and spoils no file: the same programs on a disk of a few kilobytes, and killed writers."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from poseidon import files

DISK = "disk"
TALKER = """
for number in range(400):
    print(f"line {number} " + "x" * 1000, flush=True)
"""
WRITERS = """
import json, os, sys, warnings
from pathlib import Path

import numpy as np

from poseidon.caffe.glog import console
from poseidon.caffe.layers.hdf5_output import HDF5Output
from poseidon.caffe.schema import LayerParameter, SolverParameter
from poseidon.caffe.schema.files import parse_text
from poseidon.caffe.blob import Blob
from poseidon.caffe.io.database import new_database
from poseidon.caffe.solver import get_solver
from poseidon.caffe.training import OutputsFile
from poseidon.engine.choices import Choices
from poseidon.errors import ConfigError
from poseidon.tables import snapshot
from poseidon.tables.rows import Patch
from poseidon.tables.tables import TableSpec
import logging

disk = Path(sys.argv[1])
NET = '''layer { name: "d" type: "DummyData" top: "x" dummy_data_param { shape { dim: 1 dim: 100 } } }
layer { name: "ip" type: "InnerProduct" bottom: "x" top: "y" inner_product_param { num_output: 20 } }
layer { name: "l" type: "Reduction" bottom: "y" top: "l" loss_weight: 1 }'''

def solver(form):
    text = f'net_param {{ {NET} }} base_lr: 0.1 lr_policy: "fixed" snapshot_prefix: "{disk}/s" snapshot_format: {form}'
    return get_solver(parse_text(text, SolverParameter))

def database(backend):
    with new_database(backend, str(disk / f"database-{backend}")) as writer:
        for number in range(3000):
            writer.put(b"%06d" % number, bytes(1000))

def appended():
    bottoms = [Blob((1000, 100)), Blob((1000,))]
    output.forward(bottoms, [])

spec = TableSpec("t", 3, 4)
choices = Choices(disk)
choices.key = "choice"
solvers = {form: solver(form) for form in ("BINARYPROTO", "HDF5")}
layer = f'name: "o" type: "HDF5Output" hdf5_output_param {{ file_name: "{disk}/rows.h5" }}'
output = HDF5Output(parse_text(layer, LayerParameter))
output.setup([], [])
writers = {
    "binary": solvers["BINARYPROTO"].snapshot,
    "hdf5": solvers["HDF5"].snapshot,
    "table": lambda: snapshot.save(disk / "t.npz", spec, 0, [Patch(np.arange(3), np.ones((3, 4), np.float32))]),
    "choice": lambda: choices.write({"name": "n", "tried": []}),
}
for write in writers.values():
    write()
good = {path.name: path.read_bytes() for path in disk.iterdir()}
csv = OutputsFile(str(disk / "outputs.csv"))
csv.__enter__()
with console(log_dir=str(disk)):
    with (disk / "ballast").open("wb", buffering=0) as ballast:
        try:
            while ballast.write(bytes(512)):
                pass
        except OSError:
            pass
    said = {}
    writers |= {"lmdb": lambda: database("lmdb"), "leveldb": lambda: database("leveldb"), "rows": appended}
    for name, write in writers.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                write()
                said[name] = [str(one.message) for one in caught]
            except ConfigError as error:
                said[name] = f"error: {error}"
    for number in range(20):
        logging.getLogger("poseidon.caffe").info("a line %d", number)
        csv.write("train", number, [])
        csv._rows(["x" * 5000])
csv.__exit__()
names = sorted(path.name for path in disk.iterdir())
kept = {name: (disk / name).read_bytes() == content for name, content in good.items()}
print(json.dumps({"said": said, "names": names, "kept": kept}))
"""
KILLED = """
import sys
from poseidon import files
with files.replacing(sys.argv[1], "checkpoint") as temporary, temporary.open("wb") as stream:
    stream.write(bytes(100_000))
    stream.flush()
    print("half", flush=True)
    sys.stdin.read()
"""


def on_small_disk(folder: Path, command: str, size: str) -> subprocess.CompletedProcess[str]:
    """Run a shell's command with a file system of ``size`` mounted as ``folder``/disk, that no other process sees."""
    (folder / DISK).mkdir()
    prepared = f"mount -t tmpfs -o size={size} tmpfs {DISK} || exit 77; {command}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", prepared], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    return done


def poseidon_run(*words: str) -> str:
    return shlex.join([sys.executable, "-m", "poseidon.cli", "run", *words])


def test_a_job_goes_on_without_its_logs(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALKER)
    done = on_small_disk(
        tmp_path,
        poseidon_run("--quiet", "--log-dir", f"{DISK}/logs", "talk.py") + f"; s=$?; ls {DISK}/logs; exit $s",
        "64k",
    )
    assert done.returncode == 0, done.stderr
    assert sum("line " in line for line in done.stdout.splitlines()) == 400
    assert done.stderr.count("warning: the logs in") == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_goes_on_without_its_output(tmp_path: Path) -> None:
    (tmp_path / "talk.py").write_text(TALKER)
    run = poseidon_run("--quiet", "--log-dir", "logs", "talk.py")
    done = on_small_disk(tmp_path, f"{run} > {DISK}/out", "64k")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("warning: the output cannot be written any more (No space left on device)") == 1
    assert (tmp_path / "logs" / "worker-0.log").read_text().count("line ") == 400


def test_what_cannot_be_written_is_said_and_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "writers.py").write_text(WRITERS)
    done = on_small_disk(tmp_path, shlex.join([sys.executable, "writers.py", DISK]), "200k")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("binary", "hdf5", "table", "lmdb", "leveldb", "rows"):
        assert found["said"][name].startswith("error: cannot write "), (name, found["said"][name])
        assert "No space left on device" in found["said"][name]
    (warning,) = found["said"]["choice"]
    assert "No space left on device" in warning
    assert set(found["kept"].values()) == {True}
    assert sorted(found["names"]) == sorted([*found["kept"], "ballast", "caffe.INFO", "outputs.csv"])
    assert done.stderr.count("The log in") == 1, done.stderr
    assert done.stderr.count("ends here (No space left on device); training goes on") == 1
    assert "Traceback" not in done.stderr


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "checkpoint"
    target.write_bytes(b"the old content")
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "half\n"
        os.kill(writer.pid, signal.SIGKILL)
    assert target.read_bytes() == b"the old content"
    files.write_bytes(target, b"new", "checkpoint")
    assert target.read_bytes() == b"new"
