"""One worker's run of an unmodified script: the hooks installed before it and the checks after it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import runpy
import secrets
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from poseidon.auto.engines import Engines
from poseidon.auto.evaluation import SharedEvaluation
from poseidon.auto.files import Overlay
from poseidon.auto.frameworks import Frameworks
from poseidon.auto.gradients import TorchGradients
from poseidon.auto.loaders import Loaders
from poseidon.auto.local import LocalSteps
from poseidon.auto.losses import SameLoss, tell_of_own_losses
from poseidon.auto.output import silence
from poseidon.auto.owners import Census
from poseidon.auto.private.moving import move_between_disks
from poseidon.auto.private.view import PRIVATE
from poseidon.auto.step import ScriptStep
from poseidon.auto.usage import Usage
from poseidon.errors import ConfigError, PoseidonError
from poseidon.files import came_of_full_disk
from poseidon.following.options import AutoOptions, ScriptTarget
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.following.streams import Streams
from poseidon.job.settings import VIEW
from poseidon.job.world import World, init
from poseidon.launch.local import follow_launcher
from poseidon.team.epochs import refuse_elastic
from poseidon.team.team import Team

_JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
_JOB_PREFIXES = ("TORCHELASTIC_", "ROLE_", "GROUP_WORLD", "SLURM_")


def run(options: AutoOptions, target: ScriptTarget) -> int:
    """Run the script as one of the workers that the environment describes; return its exit status."""
    refuse_elastic("--auto")
    follow_launcher()
    world = init(timeout_s=options.timeout_s)
    script: dict[str, Any] = {}
    if world.size == 1:
        sys.excepthook = lambda _kind, error, _calls: _print_error(error)
        return _run_script(target, script)
    patches = Patches()
    tail = silence(patches) if world.rank and options.output == "first" else None
    status, team = 1, None
    try:
        team = Team(None, options.timeout_s)
        report = ScriptReport(world.rank == 0)
        with _kept_files(team, options, report, patches), _alone(patches):
            gradients, loaders, frameworks = _install(world, team, options, report, patches)
            # What was imported so far stays. Collecting garbage, which workers do when they must agree on what is in
            # use, then looks through the script's own objects only: milliseconds instead of a fifth of a second.
            gc.freeze()
            status = _run_script(target, script)
            if status == 0:
                loaders.conclude()
                frameworks.conclude()
                if options.local is not None and frameworks.has_trained:
                    report.say("--local is for PyTorch: what TensorFlow or Keras trained was exchanged in every step")
                if options.accumulate and frameworks.has_trained:
                    report.say("--accumulate is for PyTorch: TensorFlow and Keras exchanged whatever they computed")
                gradients.conclude(is_alone=not frameworks.has_trained)
                script.clear()
                # No worker leaves before all are done: worker 0 hosts the job's store.
                team.gather_ints([0], "the others to end the script")
            patches.undo()
        team.close()
    except BaseException as error:
        patches.undo()
        if team is not None:
            # The others learn it at once, and not that this worker has finished.
            team.close(error)
        if tail is not None and not isinstance(error, KeyboardInterrupt):
            print(*(f"worker {world.rank} | {line}" for line in tail.last_lines()), sep="\n", file=sys.stderr)
        _print_error(error)
        if world.rank and came_of_full_disk(error):
            print(
                f"worker {world.rank}: the disk is full; its own files are on the disk of {Path.cwd()} until it ends: "
                "free as much space as the script writes, for each worker",
                file=sys.stderr,
            )
        status = error.exit_status if isinstance(error, PoseidonError) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def _install(
    world: World, team: Team, options: AutoOptions, report: ScriptReport, patches: Patches
) -> tuple[TorchGradients, Loaders, Frameworks]:
    seed = options.seed if options.seed is not None else secrets.randbits(31)
    seed = team.gather_ints([seed], "the seed")[0][0]
    streams, step = Streams(world.rank, seed), ScriptStep()
    census = Census()
    local = None if options.local is None else LocalSteps(options.local, options.outer, report)
    engines = Engines(team, census, step, streams, report, local, options.lossy, options.accumulate)
    usage = Usage(step, report)
    same_loss = SameLoss(team, step, report) if options.same_loss else None
    gradients = TorchGradients(team, engines, usage, step, streams, report, options, same_loss)
    loaders = Loaders(team, options, engines, usage, streams, report, same_loss)
    report.say(describe(world.size, options, seed))
    census.install(patches)
    streams.install(patches)
    gradients.install(patches)
    usage.install(patches)
    if same_loss is not None:
        same_loss.install(patches)
    else:
        tell_of_own_losses(patches, step, report)
    if local is not None:
        local.install(patches)
    loaders.install(patches)
    if options.evaluation != "full":
        SharedEvaluation(team, options.evaluation == "first", engines, step, report).install(patches)
    frameworks = Frameworks(team, options, seed, report, gradients.aside)
    frameworks.install(patches)
    return gradients, loaders, frameworks


def describe(size: int, options: AutoOptions, seed: int) -> str:
    """Describe in one line how the script is run. Pure."""
    batch = (
        "a batch size counts one worker's samples"
        if options.batch == "per-worker"
        else "a DataLoader's batches are divided"
    )
    steps = "" if options.local is None else f"; {options.local} local steps between exchanges ({options.outer})"
    rate = f"learning rates times {size}" if options.scale_lr else "learning rates as they are"
    writers = {"first": "worker 0's", "each": "everybody's"}
    files = writers["each" if options.files == "shared" else "first"]
    once = "; gradients are exchanged once per step" if options.accumulate else ""
    lossy = "" if options.lossy is None else f"; gradients are lossy, as asked for ({options.lossy})"
    return (
        f"{size} workers, seed {seed}; {batch}; {rate}; evaluation: {options.evaluation}; "
        f"{writers[options.output]} output, {files} files{steps}{once}{lossy}"
    )


def _run_script(target: ScriptTarget, script: dict[str, Any]) -> int:
    """Run the script as Python itself would, in this process.

    ``script`` gets what it leaves: its models are compared when it has ended, and would be gone by then.
    """
    sys.argv = [target.name, *target.arguments]
    try:
        if target.is_module:
            sys.path.insert(0, str(Path.cwd()))
            script |= runpy.run_module(target.name, run_name="__main__", alter_sys=True)
        else:
            if not Path(target.name).exists():
                raise ConfigError(f"there is no script {target.name!r} in {Path.cwd()}")
            sys.path.insert(0, str(Path(target.name).resolve().parent))
            script |= runpy.run_path(target.name, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0


def _print_error(error: BaseException) -> None:
    """Print an error as Python does that runs the script itself: without the calls that lead to the script.

    Where a Ctrl-C met calls of ours does not matter either: it tells where the script was.
    """
    calls = error.__traceback__
    while calls is not None and calls.tb_frame.f_code.co_filename in _STARTING:
        calls = calls.tb_next
    if isinstance(error, KeyboardInterrupt) and calls is not None:
        shown = list(itertools.takewhile(lambda call: not call.filename.startswith(_OURS), traceback.extract_tb(calls)))
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(shown)] if shown else []
        print(*lines, *traceback.format_exception_only(error), sep="", end="", file=sys.stderr)
    else:
        traceback.print_exception(type(error), error, calls)


_STARTING = (__file__, str(Path(__file__).with_name("__main__.py")), runpy.run_path.__code__.co_filename)
_OURS = str(Path(__file__).parents[1]) + os.sep


@contextlib.contextmanager
def _kept_files(team: Team, options: AutoOptions, report: ScriptReport, patches: Patches) -> Iterator[None]:
    """Keep files of all workers but worker 0 apart while the script runs."""
    view = os.environ.pop(VIEW.name, "no private view was made when the process started")
    if options.files == "private":
        # All have looked at the files before worker 0's script changes any.
        views = team.gather_json(view)
        without = [rank for rank, one in enumerate(views) if rank and one != PRIVATE]
        if without:
            report.say(
                f"files: worker {without[0]} has no private view of the file system ({views[without[0]]}); only "
                "Python's own calls are redirected, not what libraries in C or Rust and other programs write"
            )
    if team.rank == 0 or options.files == "shared":
        yield
        return
    if options.files == "private" and view == PRIVATE:
        move_between_disks(patches)
        yield
        return
    scratch = Path(tempfile.mkdtemp(prefix=f"poseidon-auto-{team.rank}-"))
    try:
        Overlay(scratch).install(patches)
        yield
    finally:
        patches.undo()
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _alone(patches: Patches) -> Iterator[None]:
    """Hide the job from the script and its libraries, which would otherwise distribute themselves too."""
    hidden = {
        name: value for name, value in os.environ.items() if name in _JOB_VARIABLES or name.startswith(_JOB_PREFIXES)
    }
    for name in hidden:
        del os.environ[name]
    patches.wrap(dist, "init_process_group", _refuse_group)
    patches.wrap(dist, "is_initialized", lambda original: _is_ours() and original())
    for name in ("get_rank", "get_world_size"):
        patches.wrap(dist, name, _ask_group)
    try:
        yield
    finally:
        os.environ.update(hidden)


def _is_ours() -> bool:
    """Whether a patched function of torch was called by this package or torch, and not by the script's libraries."""
    frame = sys._getframe(3)  # beyond this, the patch and its wrapper
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in ("poseidon", "torch")


def _ask_group(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    if not _is_ours():
        raise ValueError("Default process group has not been initialized: this script runs as if alone (--auto).")
    return original(*args, **kwargs)


def _refuse_group(*_: object, **__: object) -> None:
    raise ConfigError("this script distributes itself (torch.distributed.init_process_group); run it without --auto")
