"""The program of every rank of a benchmark: every model, and for each all systems in turn, in one process group.

Started by :mod:`poseidon.lab.bench` inside a lab. Rank 0 reports progress as JSON in lines that begin with
:data:`MARK`: for every model ``model`` and ``profile``, then ``begin`` before a system's repetition, ``repetition`` or
``failure`` after it, ``end`` after all.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import poseidon
from poseidon import zoo
from poseidon.engine.stopwatch import Laps
from poseidon.lab.pace import paced
from poseidon.lab.results import Repetition
from poseidon.lab.systems import OPTIMIZERS, Trainer, autocast, make_trainer
from poseidon.planning.profile import Profile
from poseidon.profiling.measuring import profile_model
from poseidon.team.calibrate import measure_flops

T = TypeVar("T")

MARK = "@bench "
END = "end"
"""The event after everything of one model was measured: the time limit begins anew."""
PROFILED_STEPS = 3
COMPARED_STEPS = 14
"""Losses are compared after so many steps at most: where training is about to diverge, rounding alone tells systems
apart some steps later."""
MOST_CHOOSING = 400
"""Steps within which a system has chosen its plan; more than that are not waited for."""


@dataclass(frozen=True)
class WorkerSettings:
    """Everything a rank needs to know to measure one model; those of all models are passed as JSON."""

    model: str
    systems: tuple[str, ...]
    batch: int
    steps: int
    warmup: int
    repetitions: int
    threads: int
    device: str
    tiny: bool = False
    width: float | None = None
    image_size: int | None = None
    paced_ms: tuple[float, float] | None = None
    """Forward and backward time of the whole model in place of the real ones."""
    precision: str = "float32"
    """What forward computes in: float32 (TF32 on CUDA), or bf16 under autocast."""
    optimizer: str = "sgd"
    accumulate: int = 1
    """Batches in a step; all but the last under ``no_sync()``."""
    timeout_s: float = 120.0
    """How long collectives wait for a missing rank."""


@dataclass(frozen=True)
class _Block:
    """What one rank saw of one repetition."""

    step_ms: float
    sent_bytes: float
    first_loss: float
    last_loss: float
    note: str
    laps_ms: tuple[float, ...]


def main(cells: Sequence[WorkerSettings]) -> None:
    """Measure one model after the other; they differ in nothing that the process group depends on."""
    device = prepare(cells[0].device, cells[0].threads, cells[0].timeout_s)
    tell = tell_parent if dist.get_rank() == 0 else tell_nobody
    for settings in cells:
        _measure_model(settings, device, tell)
        settle(device)
        tell(END)
    # No rank leaves before all are done; the group ends with the process, since destroying it may hang.
    settle(device)


def _measure_model(settings: WorkerSettings, device: torch.device, tell: Callable[..., None]) -> None:
    """Measure every system in turn, ``repetitions`` times."""
    torch.manual_seed(0)
    original = build(settings)
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in original.model.parameters()]
    tell("model", parameters=sum(n for n, _ in sizes), parameter_bytes=sum(n * size for n, size in sizes))
    profile, flops = _profile(settings, original, device)
    _free(device)
    tell("profile", profile=profile.to_dict(), flops=flops)
    broken: set[str] = set()
    for _ in range(settings.repetitions):
        for system in settings.systems:
            if system in broken:
                continue
            tell("begin", system=system)
            measure = partial(_measure, settings, system, original, device)
            blocks, failure = do_together(measure, device)
            if failure:
                broken.add(system)
                tell("failure", system=system, failure=failure)
            else:
                tell("repetition", system=system, note=blocks[0].note, **asdict(_combine(blocks)))


def build(settings: WorkerSettings) -> zoo.Network:
    """Return the network to train, without dropout so that all systems compute the same thing."""
    return zoo.build(
        settings.model, tiny=settings.tiny, width=settings.width, image_size=settings.image_size, dropout=0.0
    )


def prepare(device: str, threads: int, timeout_s: float) -> torch.device:
    """Join the other ranks with the same group and the same settings for all systems; return where to compute."""
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    poseidon.init(backend, timeout_s=timeout_s)
    return torch.device(device, 0) if device == "cuda" else torch.device("cpu")


def do_together(task: Callable[[], T], device: torch.device) -> tuple[list[T], str]:
    """Do something on all ranks; return what every rank made of it, and the error of the first that failed."""
    mine: T | None = None
    failure = ""
    try:
        mine = task()
    except Exception as error:
        traceback.print_exc()
        failure = f"rank {dist.get_rank()}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    _free(device)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, failure))
    failures = [text for _, text in everyone if text]
    return ([], failures[0]) if failures else ([result for result, _ in everyone], "")


def _profile(settings: WorkerSettings, original: zoo.Network, device: torch.device) -> tuple[Profile, float]:
    """Time every unit while all ranks compute at once, and the device's matrix rate: the basis of predictions."""
    network = _own_copy(settings, original, device)
    inputs, targets = network.batch(settings.batch, seed=dist.get_rank() + 1, device=device)
    optimizer = OPTIMIZERS[settings.optimizer](network.model)
    settle(device)
    profile = profile_model(
        network.model,
        inputs,
        name=settings.model,
        batch=settings.batch,
        loss=lambda outputs: network.loss(outputs, targets),
        update=optimizer.step,
        around=lambda: autocast(settings.precision, device),
        meet=lambda: settle(device),
        repetitions=PROFILED_STEPS,
    )
    settle(device)
    return profile, measure_flops(device)


def _combine(blocks: list[_Block]) -> Repetition:
    slowest = max(blocks, key=lambda block: block.step_ms)
    return Repetition(
        step_ms=slowest.step_ms,
        sent_bytes=fmean(block.sent_bytes for block in blocks),
        first_loss=fmean(block.first_loss for block in blocks),
        last_loss=fmean(block.last_loss for block in blocks),
        laps_ms=slowest.laps_ms,
    )


def _measure(settings: WorkerSettings, system: str, original: zoo.Network, device: torch.device) -> _Block:
    network = _own_copy(settings, original, device)
    seeds = [dist.get_rank() + 1 + dist.get_world_size() * part for part in range(settings.accumulate)]
    batches = [network.batch(settings.batch, seed=seed, device=device) for seed in seeds]
    trainer = make_trainer(system, network, batches, settings.optimizer, settings.precision)
    try:
        choose(trainer)
        return _time_steps(trainer, settings, device)
    finally:
        trainer.close()


def choose(trainer: Trainer) -> None:
    """Train until a system that tries several plans has kept one; then begin anew from the same weights."""
    if not getattr(trainer.module, "is_choosing", False):
        return
    initial = copy.deepcopy(trainer.network.model.state_dict())
    for _ in range(MOST_CHOOSING):
        trainer.step()
        if not getattr(trainer.module, "is_choosing", False):
            break
    finish = getattr(trainer.module, "finish_step", None)
    if callable(finish):
        finish()
    trainer.network.model.load_state_dict(initial)
    trainer.optimizer.state.clear()
    trainer.optimizer.zero_grad()


def _own_copy(settings: WorkerSettings, original: zoo.Network, device: torch.device) -> zoo.Network:
    """Return a copy to train: the original stays unchanged on the CPU, so that all start from the same weights."""
    network = replace(original, model=copy.deepcopy(original.model).to(device))
    if settings.paced_ms is not None:
        paced(network.model, *settings.paced_ms)
    return network


def _time_steps(trainer: Trainer, settings: WorkerSettings, device: torch.device) -> _Block:
    """Time a block of steps as a whole: a system may overlap one step's exchange with the next step."""
    losses = [trainer.step() for _ in range(settings.warmup)]
    settle(device)
    sent_before = bytes_sent()
    settle(device)
    # One more that is not timed: what its forward would have to wait for has arrived while all met.
    losses.append(trainer.step())
    laps = Laps(device)
    laps.mark()
    for _ in range(settings.steps):
        losses.append(trainer.step())
        laps.mark()
    seconds = laps.seconds()
    settle(device)
    sent_bytes = (bytes_sent() - sent_before) / (settings.steps + 1)
    first, last = (losses[step].item() for step in (0, min(len(losses), COMPARED_STEPS) - 1))
    laps_ms = tuple(round(lap_s * 1e3, 2) for lap_s in seconds)
    return _Block(fmean(seconds) * 1e3, sent_bytes, first, last, trainer.note(), laps_ms)


def settle(device: torch.device) -> None:
    """Wait until all ranks are done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    # A tensor on the CPU, so that gloo carries it and NCCL's threads are not involved.
    dist.all_reduce(torch.zeros(1))


def _free(device: torch.device) -> None:
    """Free a system's memory before the next one; ranks may share one GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def bytes_sent(interface: str = "eth0") -> int:
    """Return the bytes this machine has sent so far; 0 without such an interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0


def tell_parent(event: str, **details: Any) -> None:
    """Report an event to the process that started the ranks."""
    print(MARK + json.dumps({"event": event, **details}), flush=True)


def tell_nobody(event: str, **details: Any) -> None:
    """Say nothing: the other ranks' part of :func:`tell_parent`."""


def _from_json(data: dict[str, Any]) -> WorkerSettings:
    pair = data["paced_ms"]
    data["systems"] = tuple(data["systems"])
    data["paced_ms"] = None if pair is None else (pair[0], pair[1])
    return WorkerSettings(**data)


def run_worker(work: Callable[[], None]) -> None:
    """Run and exit at once: libraries' threads may hang in the interpreter's shutdown."""
    # A worker that is ended past the cell's limit says where each of its threads stands.
    faulthandler.register(signal.SIGTERM, chain=True)
    status = 1
    try:
        work()
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    run_worker(lambda: main([_from_json(cell) for cell in json.loads(sys.argv[1])["cells"]]))
