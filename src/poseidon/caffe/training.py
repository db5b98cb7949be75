"""One run of ``poseidon train``: from checked settings to a trained net, alone or as one worker of a job."""

from __future__ import annotations

import contextlib
import csv
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch

from poseidon import files
from poseidon.caffe import device
from poseidon.caffe.distributed import Together
from poseidon.caffe.drifting import Drifting
from poseidon.caffe.glog import console
from poseidon.caffe.schema import SolverParameter
from poseidon.caffe.solver import Solver, get_solver
from poseidon.caffe.solver.net_outputs import NetOutput
from poseidon.caffe.solver.signals import SignalActions
from poseidon.caffe.solver.workers import SoleWorker, Workers
from poseidon.caffe.upgrade import read_solver
from poseidon.engine.assemble import ExchangeOptions
from poseidon.errors import ConfigError
from poseidon.job.world import World, init

log = logging.getLogger("poseidon.caffe")


@dataclass(frozen=True)
class TrainSettings:
    """The settings of one training run."""

    solver: str
    """The solver's prototxt."""
    snapshot: str = ""
    """Snapshot to resume from; empty: start from scratch."""
    weights: str = ""
    """Files of parameters to start from, separated by commas."""
    gpus: tuple[int, ...] | None = None
    """GPUs to use, one per worker; empty: the CPU; None: follow the solver."""
    level: int = 0
    stages: tuple[str, ...] = ("",)
    sigint_effect: str = "stop"
    sighup_effect: str = "snapshot"
    net_outputs: str = ""
    """File that receives every displayed output, averaged over the workers."""
    stats_path: str = ""
    """File that receives the figures of the whole run."""
    log_dir: str = ""
    routes: Mapping[str, str] | None = None
    cluster: str = ""
    timeout_s: float | None = None
    staleness: int = 0
    """How many iterations a worker may be ahead of the slowest; 0 keeps all in step."""
    consistency_model: str = "SSPPush"
    """How updates travel with staleness; see ``drifting.py``."""

    def __post_init__(self) -> None:
        if self.snapshot and self.weights:
            raise ConfigError("give --snapshot to resume training or --weights to finetune, but not both")


def train(settings: TrainSettings) -> None:
    """Train as the settings say; in an environment with several workers, be one of them."""
    signals = SignalActions(settings.sigint_effect, settings.sighup_effect)
    world = init(_backend(World.from_environment()))
    with console(world.rank == 0, log_dir=settings.log_dir or None) as bar, signals:
        param = read_solver(settings.solver)
        param.train_state.level = settings.level
        param.train_state.stage.extend(settings.stages)
        if settings.weights:
            param.weights.append(settings.weights)
        choose_device(_gpus_for(param, settings.gpus), world.local_rank)
        if world.size > 1:
            log.info("Worker %d of %d", world.rank, world.size)
        solver = get_solver(param, lambda made: _connect(made, world, settings))
        solver.set_action_function(signals)
        solver.add_callback(lambda: bar.update(solver.iter, param.max_iter, solver.smoothed_loss), _nothing)
        if settings.snapshot:
            log.info("Resuming from %s", settings.snapshot)
            solver.restore(settings.snapshot)
        _solve(solver, world, settings)
        solver.close()
    _leave()


def choose_device(gpus: Sequence[int], local_rank: int = 0) -> None:
    """Compute on the CPU or on this worker's GPU."""
    if not gpus:
        log.info("Use CPU.")
        device.set_mode_cpu()
        return
    index = gpus[local_rank % len(gpus)]
    device.set_device(index)
    device.set_mode_gpu()
    torch.cuda.set_device(index)
    log.info("Using GPUs %d", index)
    log.info("GPU %d: %s", index, torch.cuda.get_device_name(index))


def parse_gpus(text: str) -> tuple[int, ...] | None:
    """Return the GPUs that a flag such as ``0,2`` or ``all`` names; None for an empty one."""
    if not text:
        return None
    if text == "all":
        if not torch.cuda.is_available():
            raise ConfigError("--gpu all: this machine has no usable GPU; leave --gpu out to use the CPU")
        return tuple(range(torch.cuda.device_count()))
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"--gpu {text!r} is not understood; write numbers such as 0,1, or all") from None


def check_gpus(gpus: Sequence[int] | None, flag: str) -> None:
    """Refuse GPUs that this machine does not have, in the words of the command line."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = [index for index in gpus or () if not 0 <= index < count]
    if missing and not count:
        raise ConfigError(f"--gpu {flag}: this machine has no usable GPU; leave --gpu out to use the CPU")
    if missing:
        raise ConfigError(f"--gpu {flag}: there is no GPU {missing[0]}; this machine has 0 to {count - 1}")


def _backend(world: World) -> str | None:
    """Return "gloo" if workers share a GPU, which NCCL does not support; None means the default."""
    gpus = torch.cuda.device_count()
    return "gloo" if gpus and (world.local_size or 1) > gpus else None


def _gpus_for(param: SolverParameter, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    if chosen is not None:
        return chosen
    if param.solver_mode != SolverParameter.GPU:
        return ()
    if not torch.cuda.is_available():
        # The default mode is GPU: on a machine without one, an unset mode can only mean the CPU.
        log.warning("solver_mode is GPU, but this machine has no usable GPU: training on the CPU")
        return ()
    return (param.device_id,) if param.HasField("device_id") else tuple(range(torch.cuda.device_count()))


def _connect(solver: Solver, world: World, settings: TrainSettings) -> Workers:
    if world.size == 1:
        return SoleWorker()
    if settings.staleness:
        return Drifting(solver.net, settings.staleness, settings.consistency_model, settings.timeout_s)
    options = ExchangeOptions(settings.routes, settings.cluster or None, settings.timeout_s)
    return Together(solver.net, options)


def _solve(solver: Solver, world: World, settings: TrainSettings) -> None:
    first, began = solver.iter, time.monotonic()
    log.info("Starting Optimization")
    if settings.net_outputs and world.rank == 0:
        with OutputsFile(settings.net_outputs) as file:
            solver.output_listeners.append(file.write)
            solver.solve()
    else:
        solver.solve()
    log.info("Optimization Done.")
    if settings.stats_path and world.rank == 0:
        write_stats(settings.stats_path, solver.iter - first, time.monotonic() - began, world.size)


class OutputsFile:
    """A CSV file of outputs, a row per value: which net, iteration, seconds since the start, name, value."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._began = time.monotonic()
        self._stream: TextIO | None = None

    def __enter__(self) -> OutputsFile:
        try:
            self._stream = Path(self._path).open("w", newline="")
        except OSError as error:
            raise files.cannot("write", "--net_outputs", self._path, error) from None
        self._rows(["net", "iteration", "seconds", "output", "value"])
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, which: str, iteration: int, outputs: Sequence[NetOutput]) -> None:
        """Add the outputs of one display or test."""
        seconds = f"{time.monotonic() - self._began:.3f}"
        self._rows(*[[which, iteration, seconds, output.name, f"{output.value:.8g}"] for output in outputs])

    def _rows(self, *rows: Sequence[object]) -> None:
        if self._stream is None:
            return
        try:
            csv.writer(self._stream).writerows(rows)
            self._stream.flush()
        except OSError as error:
            self._close()
            log.warning("--net_outputs %s ends here (%s); training goes on", self._path, error.strerror)

    def _close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def write_stats(path: str, iterations: int, seconds: float, workers: int) -> None:
    """Write the figures of a run as JSON (which is YAML too)."""
    figures = {
        "workers": workers,
        "iterations": iterations,
        "seconds": round(seconds, 3),
        "iterations_per_second": round(iterations / seconds, 3) if seconds else 0.0,
    }
    files.write_json(path, figures, "--stats_path")


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _nothing() -> None:
    pass
