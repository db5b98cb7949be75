"""Plays one round of faults on an elastic job and checks what it leaves; ``benchmarks/elastic_rounds.py`` plays many.

A round trains ``elastic_job.py``, whose workers write down what they do. Afterwards every step must have been taken
once, with exactly the samples of its batch. All workers must end with the same bits, and with the parameters of a run
alone up to the order of additions.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

import torch

JOB = Path(__file__).with_name("elastic_job.py")
RUN = [sys.executable, "-m", "poseidon", "run", "--quiet", "--log-dir", "none"]
SIGNALS = {"stop": signal.SIGSTOP, "pause": signal.SIGSTOP, "leave": signal.SIGTERM}
"""Of the other kinds: SIGKILL."""
TOLERANCE = 1e-9
"""Of parameters in double precision: what the order of additions may change."""


@dataclass(frozen=True)
class Work:
    """What the job of a round does."""

    workers: int = 4
    least: int = 1
    mode: str = "wrapper"
    """Or ``distribute``, or ``server``: where the owners take the steps."""
    replicas: int = 1
    """Of each owner's state."""
    model: str = "mlp"
    epochs: int = 6
    samples: int = 120
    batch: int = 12
    pause_s: float = 0.05
    replacements: int = 0
    """How many lost workers come back."""
    kinds: tuple[str, ...] = ("kill", "kill", "stop", "pause", "leave", "two", "during")
    die: str = ""
    """A worker and where in its program it is killed before it trains, such as ``1:model``."""
    last: str = ""
    """A worker that joins last, and how: ``1:waits`` inside gloo until its epoch is over, ``1:fails`` there then."""
    pace_s: float = 0.0
    """Seconds per sample of a fast worker, with ``--balance``; 0: all workers are equal."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        return self.epochs * (self.samples // self.batch)

    def arguments(self, notes: Path) -> list[str]:
        """Return the words after the program's name."""
        given = {"mode": self.mode, "epochs": self.epochs, "samples": self.samples, "batch": self.batch}
        given |= {"model": self.model, "pause": self.pause_s, "pace": self.pace_s, "notes": notes}
        given |= {"replicas": self.replicas, "die": self.die, "last": self.last}
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]


@dataclass
class Outcome:
    """What a round has shown."""

    faults: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    noticed_s: list[float] = field(default_factory=list)
    """From each fault that removes a worker until the first of the others leaves the step under way."""
    recoveries_s: list[float] = field(default_factory=list)
    """From then to the first step of the next epoch."""
    joined: int = 0
    """Workers that came when the job was under way."""


class Site(Protocol):
    """Where the workers are: on this machine, or on several emulated ones."""

    def start(self, work: Work, words: list[str], output: IO[str]) -> subprocess.Popen[Any]:
        """Start ``poseidon run`` with the words of its program."""

    def harm(self, kind: str, host: str) -> bool:
        """Do something to a machine; False: it cannot be done to this one."""

    def heal(self) -> None:
        """Undo what was done."""

    def is_harmed(self, host: str) -> bool:
        """Whether a machine is cut off or paused."""


class OneMachine:
    """Workers of this machine."""

    def start(self, work: Work, words: list[str], output: IO[str]) -> subprocess.Popen[Any]:
        """Start ``poseidon run`` with the words of its program."""
        command = [*RUN, "--nproc", f"{work.least}:{work.workers}", "--replacements", str(work.replacements)]
        command += ["--balance"] if work.pace_s else []
        return subprocess.Popen([*command, *words], stdout=output, stderr=subprocess.STDOUT)

    def harm(self, kind: str, host: str) -> bool:
        """Leave the only machine alone."""
        return False

    def heal(self) -> None:
        """Nothing was done."""

    def is_harmed(self, host: str) -> bool:
        """Never: nothing was done."""
        return False


class Notes:
    """What the workers of a job have written down."""

    def __init__(self, folder: Path) -> None:
        self.pids: dict[str, int] = {}
        self.hosts: dict[int, str] = {}
        """By process."""
        self.left: list[tuple[int, float]] = []
        """Epochs in which a worker was interrupted, and when."""
        self.tries: dict[tuple[int, int], dict[str, list[int]]] = defaultdict(dict)
        """By epoch and step: the samples of each worker."""
        self.done: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        """By step and epoch: the workers that have completed it."""
        self.entered: list[tuple[int, int, float]] = []
        """Epoch, steps done, and when."""
        self.begins: dict[int, dict[str, int]] = defaultdict(dict)
        """By epoch: the steps that each of its workers had done when it entered."""
        self.trained: set[str] = set()
        self.ends: dict[str, str] = {}
        self.furthest = 0
        for path in sorted(folder.glob("worker-*")):
            self._read(path.name.removeprefix("worker-"), path.read_text().split("\n")[:-1])

    def completed_in(self, step: int) -> set[int]:
        """Return the epochs in which a step was completed, by the notes of some worker or of those who went on from it.

        A worker may complete a step and be lost before the others have what it sent them. They begin the next epoch
        without that step and take it again, so what the lost one noted does not count.
        """
        epochs = set()
        for epoch, names in self.done.get(step, {}).items():
            after = self.begins.get(min((later for later in self.begins if later > epoch), default=-1), {})
            if not after or min(after.values()) >= step or names & set(after):
                epochs.add(epoch)
        return epochs or self.left_with(step)

    def left_with(self, step: int) -> set[int]:
        """Return the epoch that ended with a step: the workers went on from it, and none came to note that."""
        later = [epoch for epoch, done, _ in self.entered if done == step]
        tried = [epoch for epoch, each in self.tries if each == step and later and epoch < min(later)]
        return {max(tried)} if tried else set()

    def _read(self, name: str, lines: list[str]) -> None:
        for line in lines:
            kind, *words = line.split()
            if kind == "pid":
                self.pids[name] = int(words[0])
                self.hosts[int(words[0])] = words[1]
            elif kind == "left":
                self.left.append((int(words[0]), float(words[1])))
            elif kind == "try":
                self.tries[int(words[0]), int(words[1])][name] = [int(word) for word in words[2:]]
            elif kind == "done":
                self.done[int(words[1])][int(words[0])].add(name)
                self.furthest = max(self.furthest, int(words[1]))
            elif kind == "enter":
                self.trained.add(name)
                self.entered.append((int(words[0]), int(words[1]), float(words[2])))
                self.begins[int(words[0])][name] = int(words[1])
                # An epoch may end with the last step, and nobody comes to note that.
                self.furthest = max(self.furthest, int(words[1]))
            elif kind == "end":
                self.ends[name] = words[0]


def check(folder: Path, work: Work, expected: dict[str, torch.Tensor]) -> list[str]:
    """Return what is wrong after a round; nothing if all is well.

    ``expected`` are the parameters of a run alone; empty where workers take local steps, and nothing equals that.
    """
    notes, problems = Notes(folder), []
    per_epoch = work.samples // work.batch
    for step in range(1, work.steps + 1):
        epochs = notes.completed_in(step)
        if len(epochs) != 1:
            problems.append(f"step {step} was completed in epochs {sorted(epochs)}")
            continue
        used = [number for ids in notes.tries[next(iter(epochs)), step].values() for number in ids]
        turn, place = divmod(step - 1, per_epoch)
        order = torch.randperm(work.samples, generator=torch.Generator().manual_seed(3 + turn)).tolist()
        batch = order[place * work.batch : (place + 1) * work.batch]
        # Nobody waits for the steps of one that takes them alone: what it had of this one may be lost with it.
        if sorted(used) != sorted(batch) and not (work.mode == "local" and set(used) < set(batch)):
            problems.append(f"step {step} used samples {sorted(used)} instead of {sorted(batch)}")
    for epoch, begins in sorted(notes.begins.items()):
        if len(set(begins.values())) > 1:
            problems.append(f"the workers of epoch {epoch} began it after different steps: {begins}")
    if notes.furthest != work.steps:
        problems.append(f"{notes.furthest} steps instead of {work.steps}")
    if not notes.ends:
        problems.append("no worker came to the end")
    if len(set(notes.ends.values())) > 1:
        problems.append(f"the workers end with different bits: {notes.ends}")
    for path in folder.glob("final-*.pt"):
        final = torch.load(path)
        worst = max((float((final[name] - value).abs().max()) for name, value in expected.items()), default=0.0)
        if not worst <= TOLERANCE:
            problems.append(f"{path.name} differs by {worst:.3g} from the run alone")
    return problems


def train_alone(work: Work, folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters after a training without workers or faults."""
    folder.mkdir()
    command = [sys.executable, JOB, *work.arguments(folder), "--pause", "0", "--pace", "0", "--die", "", "--last", ""]
    # As many threads as a worker has.
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    (path,) = folder.glob("final-*.pt")
    found: dict[str, torch.Tensor] = torch.load(path)
    return found


class Round:
    """One job with faults."""

    def __init__(self, work: Work, folder: Path, seed: int, site: Site | None = None) -> None:
        self._work = work
        self._folder = folder
        self._random = random.Random(seed)
        self._site = site or OneMachine()
        self._gone: set[int] = set()
        """Processes that were told to end, and may take their time."""
        self.outcome = Outcome()
        folder.mkdir()
        self._output = (folder / "output").open("w")
        self._job = self._site.start(work, [str(JOB), *work.arguments(folder)], self._output)

    def play(self, limit_s: float) -> Outcome:
        """Train to the end, with faults on the way."""
        deadline = time.monotonic() + limit_s
        try:
            while self._await_step(deadline):
                spare = len(self._present()) - self._work.least
                if spare > 0:
                    self._harm(spare)
                elif not self._work.replacements:
                    break
            self._site.heal()
            status = self._job.wait(max(0.0, deadline - time.monotonic()))
            if status:
                self.outcome.problems.append(f"the job ended with status {status}")
        except subprocess.TimeoutExpired:
            self.outcome.problems.append(f"the job did not end within {limit_s:g} s")
        finally:
            self._site.heal()
            self._job.terminate()
            self._job.wait()
            self._output.close()
        notes = Notes(self._folder)
        self.outcome.joined = max(0, len(notes.trained) - self._work.workers)
        return self.outcome

    def _present(self) -> list[int]:
        """Return the processes of the workers that train."""
        notes = Notes(self._folder)
        there = [pid for name, pid in notes.pids.items() if name in notes.trained and Path(f"/proc/{pid}").exists()]
        return [pid for pid in there if pid not in self._gone and not self._site.is_harmed(notes.hosts[pid])]

    def _await_step(self, deadline: float) -> bool:
        """Wait until some steps from now; return whether that is before the end of the job."""
        done = Notes(self._folder).furthest
        last = self._work.steps - 2
        wanted = min(last, done + self._random.randint(1, max(1, (last - done) // 3)))
        while Notes(self._folder).furthest < wanted:
            if self._job.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        time.sleep(self._random.uniform(0, 2 * self._work.pause_s))
        return done < last

    def _harm(self, most: int) -> None:
        """Do something to one or two workers."""
        alive = self._present()
        kinds = self._work.kinds if most > 1 else [each for each in self._work.kinds if each not in ("two", "during")]
        kind = self._random.choice(kinds)
        self._site.heal()
        notes = Notes(self._folder)
        epoch = max(entry[0] for entry in notes.entered)
        count = min(len(alive) - 1, 2 if kind in ("two", "during") else 1)
        victims = self._random.sample(alive, count)
        began = time.time()
        if kind in ("cut", "sleep") and not self._site.harm(kind, notes.hosts[victims[0]]):
            kind = "kill"  # the launcher's own machine
        self.outcome.faults.append(kind)
        for place, pid in enumerate(victims if kind not in ("cut", "sleep") else []):
            if kind == "during" and place:
                time.sleep(self._random.uniform(0, 0.5))
            send(pid, SIGNALS.get(kind, signal.SIGKILL))
        if kind == "pause":
            time.sleep(self._random.uniform(0.1, 2.0))
            for pid in victims:
                send(pid, signal.SIGCONT)
            return
        self._gone.update(victims)
        self._await_epoch(epoch, began)

    def _await_epoch(self, epoch: int, began: float) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._job.poll() is None:
            notes = Notes(self._folder)
            later = [when for number, _, when in notes.entered if number > epoch]
            left = [when for number, when in notes.left if number >= epoch and when >= began]
            if later and left:
                self.outcome.noticed_s.append(min(left) - began)
                self.outcome.recoveries_s.append(max(0.0, min(later) - min(left)))
                return
            time.sleep(0.1)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    subprocess.run(["kill", f"-{int(number)}", str(pid)], check=False, stderr=subprocess.DEVNULL)
