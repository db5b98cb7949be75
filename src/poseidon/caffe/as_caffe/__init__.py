"""Run unedited scripts: ``import caffe`` imports ``poseidon.caffe``.

In a program: ``poseidon.caffe.as_caffe.install()`` before the first ``import caffe``. From the command line:
``python -m poseidon.caffe.as_caffe script.py its arguments``. For a whole environment, notebooks included:
``python -m poseidon.caffe.as_caffe --install``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from poseidon import files
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


_MODULE = """\
# Made by `python -m poseidon.caffe.as_caffe --install`; `--uninstall` removes it.
import sys

from poseidon.caffe.as_caffe import install

del sys.modules["caffe"]  # this file; install() puts poseidon.caffe in its place
install()
"""


def place(folder: str | None = None) -> str:
    """Write a module ``caffe`` that stands for ours, by default where this environment has its packages; say so."""
    path = _module_path(folder)
    found = None if "caffe" in sys.modules else importlib.util.find_spec("caffe")
    # Without an origin it is a mere folder of that name, which a module takes precedence over.
    if found is not None and found.origin not in (None, str(path)):
        raise ConfigError(f"as_caffe: there is a module caffe already, {found.origin}; remove it first")
    if not path.parent.is_dir():
        raise ConfigError(f"as_caffe: there is no folder {path.parent}")
    files.write_text(path, _MODULE, "module")
    return f"`import caffe` imports poseidon.caffe now, by {path}"


def remove(folder: str | None = None) -> str:
    """Remove what ``place`` wrote; say so."""
    path = _module_path(folder)
    if not path.is_file() or files.read_text(path, "module") != _MODULE:
        raise ConfigError(f"as_caffe: {path} does not exist, or was not written by --install")
    path.unlink()
    return f"removed {path}"


def _module_path(folder: str | None) -> Path:
    return Path(folder or sysconfig.get_path("purelib")).resolve() / "caffe.py"


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
