"""``python -m poseidon.trainers [--asked] script.py [arguments]``: a worker's script, with ours as torch's class."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from poseidon.errors import PoseidonError
from poseidon.launch.script import find_imports
from poseidon.trainers import in_place

LIGHTNING = {"lightning", "pytorch_lightning"}


def main() -> int:
    """Run the script or module named on the command line, and say if it has wrapped no model."""
    words = sys.argv[1:]
    is_asked = words[:1] == ["--asked"]
    words = words[1:] if is_asked else words
    if not words or words == ["-m"]:
        print("usage: python -m poseidon.trainers script.py arguments | -m module arguments", file=sys.stderr)
        return 2
    in_place.replace()
    in_place.choose_devices()
    status = 0
    try:
        if words[0] == "-m":
            _run_module(words[1:])
        else:
            _run_script(words)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    try:
        in_place.check(is_asked)
    except PoseidonError as error:
        print(f"poseidon as DDP: {error}", file=sys.stderr)
        status = 1
    return status


def _run_module(words: list[str]) -> None:
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _run_script(words: list[str]) -> None:
    script = Path(words[0])
    if LIGHTNING & find_imports(script):
        import poseidon.trainers.lightning  # noqa: F401 - registers strategy="poseidon"
    sys.argv = words
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
