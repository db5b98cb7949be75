"""The program of every rank of a comparison by time to a loss: lessons learned by one system after the other.

Started by :mod:`poseidon.lab.loss_bench` inside a lab, with one of three purposes. ``curves``: train as fast as this
machine can, for losses by step. ``tempos``: time steps with paced compute, for seconds and bytes per step. ``timed``:
train with paced compute on the clock, for losses by second. Rank 0 reports as :mod:`poseidon.lab.bench_worker` does:
``begin`` before each cell, ``run``, ``tempo`` or ``failure`` after it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poseidon.lab.bench_worker import bytes_sent, choose, do_together, prepare, run_worker, settle, tell_nobody
from poseidon.lab.bench_worker import tell_parent as report
from poseidon.lab.loss_results import REFERENCE, SMOOTHED
from poseidon.lab.pace import paced
from poseidon.lab.system_names import traits_of
from poseidon.lab.systems import Trainer, wrap
from poseidon.zoo.lessons import Lesson, make_lesson

RankMark = tuple[int, float, float, float, int]
"""Step, seconds, bytes, the summed loss of a rank's validation batches, and how many these are."""

LEAST_TIMED, LEAST_WARM = 8, 4
"""Steps that a tempo is measured over, and steps before them; more where a system's traffic repeats less often."""
STALLED_STEPS = 40
"""Steps that a tempo is measured over where workers stall at random."""


@dataclass(frozen=True)
class LossCell:
    """What one system does with one seed."""

    system: str
    seed: int
    steps: int
    """At most."""
    least: int = 0
    """A curve ends after so many steps at the earliest, once it has reached the target."""


@dataclass(frozen=True)
class LossWorkerSettings:
    """Everything a rank needs to know; passed as JSON on the command line."""

    purpose: str
    """curves, tempos or timed."""
    lesson: str
    cells: tuple[LossCell, ...]
    batch: int
    every: int
    """Steps between evaluations."""
    paced_ms: tuple[float, float] | None = None
    """Time of forward and backward; used for tempos and timed runs only."""
    stalls: tuple[float, float] | None = None
    """Probability that a worker stalls in a step, and for how many steps' time."""
    tolerance: float = 0.0
    """How far above the reference's final loss a curve may end, as a fraction."""
    targets: tuple[tuple[int, float], ...] = ()
    """Seeds whose target is known, each with it."""
    tiny: bool = False
    threads: int = 1
    device: str = "cpu"
    limit_s: float = 600.0
    """A timed run ends at the next evaluation after this."""
    timeout_s: float = 120.0
    """How long collectives wait for a missing rank."""


@dataclass(kw_only=True)
class Student(Trainer):
    """A system that learns a lesson: every step has a batch of its own, and may stall."""

    lesson: Lesson
    settings: LossWorkerSettings
    seed: int
    device: torch.device
    done: int = 0
    """Steps taken so far."""

    def step(self) -> Tensor:
        """Train one step; a stalled worker's gradients come late."""
        rank, device = dist.get_rank(), self.device
        inputs, targets = self.lesson.training_batch(self.settings.batch, self.seed, self.done, rank)
        self.optimizer.zero_grad()
        outputs = self.module(*(part.to(device) for part in inputs))
        loss = self.network.loss(outputs, targets.to(device))
        if self.settings.purpose != "curves":
            time.sleep(stall_s(self.settings, self.seed, self.done, rank))
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return loss.detach()


def stall_s(settings: LossWorkerSettings, seed: int, step: int, rank: int) -> float:
    """Return how long a worker stalls in a step: the same for every system."""
    if settings.stalls is None or settings.paced_ms is None:
        return 0.0
    probability, steps = settings.stalls
    is_stalled = random.Random(f"{seed} {step} {rank}").random() < probability
    return steps * sum(settings.paced_ms) / 1e3 if is_stalled else 0.0


def main(settings: LossWorkerSettings) -> None:
    """Work through all cells."""
    device = prepare(settings.device, settings.threads, settings.timeout_s)
    tell = report if dist.get_rank() == 0 else tell_nobody
    targets = dict(settings.targets)
    for cell in settings.cells:
        tell("begin", system=cell.system, seed=cell.seed)
        if settings.purpose == "tempos":
            tempos, failure = do_together(partial(_time, settings, cell, device), device)
            if not failure:
                slowest = max(tempo[0] for tempo in tempos)
                tell(
                    "tempo",
                    system=cell.system,
                    step_ms=slowest,
                    sent_bytes=fmean(t[1] for t in tempos),
                    note=tempos[0][2],
                )
        else:
            train = partial(_train, settings, cell, device, targets.get(cell.seed))
            curves, failure = do_together(train, device)
            if not failure:
                marks = _combine([curve[0] for curve in curves])
                tell("run", system=cell.system, seed=cell.seed, note=curves[0][1], marks=marks)
                if cell.system == REFERENCE:
                    targets.setdefault(cell.seed, _final_loss(marks) * (1 + settings.tolerance))
        if failure:
            tell("failure", system=cell.system, seed=cell.seed, failure=failure)
    settle(device)


def _enrol(settings: LossWorkerSettings, cell: LossCell, device: torch.device) -> Student:
    lesson = make_lesson(settings.lesson, cell.seed, tiny=settings.tiny)
    model = lesson.network.model.to(device)
    if settings.paced_ms is not None and settings.purpose != "curves":
        paced(model, *settings.paced_ms)
    module, optimizer = wrap(cell.system, model, lesson.make_optimizer(model))
    return Student(
        lesson.network, module, optimizer, (), lesson=lesson, settings=settings, seed=cell.seed, device=device
    )


def _time(settings: LossWorkerSettings, cell: LossCell, device: torch.device) -> tuple[float, float, str]:
    """Return milliseconds and bytes of a step, and the system's remarks."""
    period = traits_of(cell.system).period
    least = STALLED_STEPS if settings.stalls else LEAST_TIMED
    steps = -(-least // period) * period
    student = _enrol(settings, cell, device)
    try:
        choose(student)
        for _ in range(max(LEAST_WARM, period)):
            student.step()
        settle(device)
        sent_before = bytes_sent()
        settle(device)
        began = time.perf_counter()
        for _ in range(steps):
            student.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        settle(device)
        return seconds / steps * 1e3, (bytes_sent() - sent_before) / steps, student.note()
    finally:
        student.close()


def _train(
    settings: LossWorkerSettings, cell: LossCell, device: torch.device, target: float | None
) -> tuple[list[RankMark], str]:
    """Return this rank's marks, and remarks.

    Every rank validates its own replica, each on its share of the data. Where the clock counts, parameters are copied
    at each mark and validated after training, which nothing must disturb; a curve is validated as it goes.
    """
    student = _enrol(settings, cell, device)
    # A network of its own, without the hooks that pace and exchange.
    judge = _Judge(make_lesson(settings.lesson, cell.seed, tiny=settings.tiny), device)
    is_timed, is_drifting = settings.purpose == "timed", traits_of(cell.system).is_drifting
    copies: list[dict[str, Tensor]] = []
    scores: list[tuple[float, int]] = []
    moments: list[tuple[int, float, float]] = []
    try:
        settle(device)
        sent_before = bytes_sent()
        settle(device)
        began = time.perf_counter()
        for step in range(1, cell.steps + 1):
            student.step()
            if step % settings.every and step != cell.steps:
                continue
            state = _copy(student)
            seconds = time.perf_counter() - began
            moments.append((step, seconds, bytes_sent() - sent_before))
            if is_timed:
                copies.append(state)
                if _is_over(seconds > settings.limit_s, is_drifting):
                    break
            else:
                scores.append(judge.score(state))
                if step >= cell.least and target is not None and _mean_of_last(scores) <= target:
                    break
        note = student.note()
    finally:
        student.close()
    # Workers that drift may have ended at different marks.
    common = torch.tensor(len(moments))
    dist.all_reduce(common, dist.ReduceOp.MIN)
    scores += [judge.score(state) for state in copies[: int(common)]]
    return [(*moment, *score) for moment, score in zip(moments[: int(common)], scores, strict=True)], note


def _mean_of_last(scores: list[tuple[float, int]]) -> float:
    """Return the loss that counts at the last mark, over all ranks. Collective."""
    last = torch.tensor(scores[-SMOOTHED:], dtype=torch.float64)
    dist.all_reduce(last)
    return float((last[:, 0] / last[:, 1]).mean())


def _final_loss(marks: list[list[float]]) -> float:
    return fmean(mark[1] for mark in marks[-SMOOTHED:])


def _is_over(is_late: bool, is_drifting: bool) -> bool:
    """Return whether to end; those in lockstep end together, the others each by its own clock."""
    if is_drifting:
        return is_late
    late = torch.tensor(int(is_late))
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return bool(late)


def _copy(student: Student) -> dict[str, Tensor]:
    state = student.module.state_dict()
    return {name.removeprefix("module."): value.detach().to("cpu", copy=True) for name, value in state.items()}


class _Judge:
    """Scores states of a lesson's network on this rank's share of the validation data."""

    def __init__(self, lesson: Lesson, device: torch.device) -> None:
        self._network = lesson.network
        self._device = device
        self._model = lesson.network.model.to(device).eval()
        self._batches = lesson.validation[dist.get_rank() :: dist.get_world_size()]

    @torch.no_grad()
    def score(self, state: dict[str, Tensor]) -> tuple[float, int]:
        """Return the summed loss of the share's batches, and their number."""
        self._model.load_state_dict(state)
        losses = [
            self._network.loss(self._model(*(part.to(self._device) for part in inputs)), targets.to(self._device))
            for inputs, targets in self._batches
        ]
        return sum(loss.item() for loss in losses), len(losses)


def _combine(curves: list[list[RankMark]]) -> list[list[float]]:
    """Return [step, loss, seconds, bytes] of each mark: over all validation data, and on the slowest rank's clock."""
    return [
        [
            marks[0][0],
            sum(mark[3] for mark in marks) / sum(mark[4] for mark in marks),
            max(mark[1] for mark in marks),
            fmean(mark[2] for mark in marks),
        ]
        for marks in zip(*curves, strict=True)
    ]


def _from_json(text: str) -> LossWorkerSettings:
    data: dict[str, Any] = json.loads(text)
    for name in ("paced_ms", "stalls"):
        data[name] = None if data[name] is None else tuple(data[name])
    data["cells"] = tuple(LossCell(**cell) for cell in data["cells"])
    return LossWorkerSettings(**data)


if __name__ == "__main__":
    run_worker(lambda: main(_from_json(sys.argv[1])))
