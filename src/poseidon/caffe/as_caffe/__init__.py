"""Run unedited scripts: ``import caffe`` imports ``poseidon.caffe``.

In a program: ``poseidon.caffe.as_caffe.install()`` before the first ``import caffe``. From the command line:
``python -m poseidon.caffe.as_caffe script.py its arguments``.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from poseidon.caffe import glog, process
from poseidon.errors import ConfigError

_OURS = "poseidon.caffe"
_SUBMODULES = (
    "_caffe",
    "classifier",
    "coord_map",
    "detector",
    "draw",
    "io",
    "layers",
    "net_spec",
    "proto",
    "proto.caffe_pb2",
    "pycaffe",
)


def install() -> None:
    """Make ``import caffe`` import ours in this process, submodules included, even where a real Caffe is installed."""
    ours = importlib.import_module(_OURS)
    present = sys.modules.get("caffe")
    if present is not None and present is not ours:
        raise ConfigError(
            f"as_caffe: another module called caffe is already imported, from {getattr(present, '__file__', '?')}; "
            "call install() before the first `import caffe`"
        )
    sys.modules["caffe"] = ours
    for name in _SUBMODULES:
        sys.modules[f"caffe.{name}"] = importlib.import_module(f"{_OURS}.{name}")


def run_script(script: str | os.PathLike[str], arguments: Sequence[str] = ()) -> None:
    """Run a script as Python would, with ``import caffe`` importing ours.

    Nets and solvers log to stderr as in Caffe, from the level in GLOG_minloglevel.
    """
    if not Path(script).is_file():
        raise ConfigError(f"as_caffe: there is no script {script}")
    install()
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    with glog.console(is_root=process.solver_rank() == 0):
        runpy.run_path(str(script), run_name="__main__")
