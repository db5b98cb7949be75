"""``python -m poseidon.auto [options] script.py [arguments]``: one worker of a distributed plain script."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from poseidon.auto.private.view import PRIVATE, enter
from poseidon.errors import PoseidonError
from poseidon.following.options import AutoOptions, ScriptTarget, parse
from poseidon.job.settings import VIEW
from poseidon.job.world import World

_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU of this machine."""


def main() -> int:
    """Run the script named on the command line and return its exit status."""
    try:
        options, target = parse([*shlex.split(os.environ.get("POSEIDON_AUTO", "")), *sys.argv[1:]])
        _prepare_process(options, target)
        from poseidon.auto.session import run

        return run(options, target)
    except PoseidonError as error:
        print(f"poseidon auto: {error}", file=sys.stderr)
        return error.exit_status


def _prepare_process(options: AutoOptions, target: ScriptTarget) -> None:
    """Set what must hold before Python and CUDA start.

    Strings hash the same, a worker sees only its own GPU, and all but worker 0 have their own view of the files.
    """
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if "CUDA_VISIBLE_DEVICES" not in os.environ and _DRIVER.exists():
        visible = [str(number) for number in range(len(list(_DRIVER.iterdir())))]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if len(visible) > 1:
        # "cuda:0" in a script then means the worker's own GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]
    is_new = False
    if options.files == "private" and VIEW.name not in os.environ and World.from_environment(os.environ).rank > 0:
        is_new = True
        os.environ[VIEW.name] = enter(Path.cwd(), target.arguments) or PRIVATE
    if "PYTHONHASHSEED" not in os.environ:
        # The order of a vocabulary built from a set of strings depends on their hashes, which differ between processes.
        os.environ["PYTHONHASHSEED"] = "0"
        is_new = True
    if is_new:
        os.execv(sys.executable, [sys.executable, "-m", "poseidon.auto", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
