"""Start and end small ``poseidon train`` jobs on a busy machine, again and again: every one has to end, and well.

::

    python benchmarks/caffe_ends.py --runs 300                      # all forms in turn; root
    python benchmarks/caffe_ends.py --runs 300 --forms one,local    # without emulated machines
    python benchmarks/caffe_ends.py --runs 3000 --forms forked --parallel 4

The forms: one worker; two workers here (``local``); two machines over ssh; and two workers that are forked from a
process that has imported everything, which shows many more ends in the same time.

A job trains a few iterations from an LMDB, so threads that read ahead are busy when it ends, writes a snapshot and
leaves. The forms come in turns: with workers in step and with staleness, with tests between and without. A run is wrong
when it is not over ``--limit`` seconds after "Optimization Done", ends with another status than 0, or leaves a process
behind. Of a job that hangs, the stacks of all threads of all its processes are printed before it is killed.

Python's own ``faulthandler`` writes the stacks; py-spy, where it is installed, adds what is inside libraries.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

from poseidon.caffe.io.database import new_database  # noqa: E402
from poseidon.caffe.io.datum import encoded_datum  # noqa: E402
from poseidon.job import members  # noqa: E402

FORMS = ("one", "local", "ssh", "forked")
MARK = "POSEIDON_TEST_JOB"
STACKS = signal.SIGUSR2
START_LIMIT_S = 300.0
"""For a job to reach its last iteration; on a busy machine imports alone take long."""
DONE = "Optimization Done."

NET = """
name: "small"
layer { name: "data" type: "Data" top: "x" top: "y" transform_param { crop_size: 16 mirror: true }
  data_param { source: "%(source)s" backend: LMDB batch_size: 8 prefetch: 4 } }
layer { name: "conv" type: "Convolution" bottom: "x" top: "c" convolution_param {
  num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "ip" type: "InnerProduct" bottom: "c" top: "z" inner_product_param {
  num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "z" bottom: "y" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.001 lr_policy: "fixed" max_iter: 6 display: 3 snapshot_prefix: "%(prefix)s" '
TESTED = "test_iter: 2 test_interval: 3 "
HOOK = """
import faulthandler, os, signal
with open(os.path.join(os.environ["POSEIDON_TEST_STACKS"], f"{os.getpid()}.stacks"), "w") as stream:
    kept = os.dup(stream.fileno())
faulthandler.register(signal.SIGUSR2, file=kept, all_threads=True)
import sys
sys.path.insert(0, os.environ["POSEIDON_TEST_STARTUP"])
import compiler_later
"""


@dataclass
class Outcome:
    """How one run ended."""

    form: str
    seconds: float = 0.0
    ending_s: float = 0.0
    """From "Optimization Done" to the end of the job."""
    wrong: list[str] = field(default_factory=list)
    report: str = ""


class Place:
    """Where jobs run: this machine and, for the form ``ssh``, two emulated ones."""

    def __init__(self, folder: Path, source: Path, lab: Any, env: dict[str, str]) -> None:
        self.folder = folder
        self.source = source
        self.lab = lab
        self.env = env
        self._count = 0
        self._nursery: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """End the process that forks workers."""
        if self._nursery is not None:
            self._nursery.stdin.close()  # type: ignore[union-attr]
            self._nursery.wait(30)

    def run(self, form: str, number: int, limit_s: float) -> Outcome:
        """Run one job to its end."""
        self._count += 1
        name = f"job{self._count}"
        home = self.folder / name
        home.mkdir()
        (home / "net.prototxt").write_text(NET % {"source": self.source})
        text = SOLVER % {"prefix": "small"} + (TESTED if number % 2 else "")
        (home / "solver.prototxt").write_text(text)
        (home / "hosts").write_text("0 10.77.0.1 9999\n1 10.77.0.2 9999\n")
        words = {"local": ["--workers=2"], "ssh": ["--hostfile=hosts"]}.get(form, [])
        staleness = ["--table_staleness=2"] if form != "one" and number // 2 % 3 == 2 else []
        command = [sys.executable, "-m", "poseidon.cli", "train", "--solver=solver.prototxt", *words, *staleness]
        mark = f"{os.getpid()}-{self.folder.name}-{name}"
        env = {**os.environ, **self.env, MARK: mark, "OMP_NUM_THREADS": "1"}
        log = home / "log"
        log.touch()
        outcome = Outcome(form)
        began = time.monotonic()
        process: Any
        if form == "forked":
            process = self._fork(home, command[3:])
        else:
            spawn = subprocess.Popen if form != "ssh" else self._spawn
            with log.open("wb") as stream:
                process = spawn(command, env=env, cwd=home, stdout=stream, stderr=stream)
        status = self._wait(process, log, began, limit_s, outcome)
        outcome.seconds = time.monotonic() - began
        pids = process.pids if form == "forked" else self._pids(form, mark)
        if status is None:
            outcome.wrong.append("it hangs")
            own = [] if form == "forked" else [process.pid]
            outcome.report = stacks([*own, *pids], self.folder / "stacks")
        elif status:
            outcome.wrong.append(f"status {status}")
        elif pids and form != "forked":
            outcome.wrong.append("left behind: " + ", ".join(map(command_of, pids)))
        elif not (home / "small_iter_6.caffemodel").exists():
            outcome.wrong.append("no snapshot")
        members.kill_all(lambda: self._pids(form, mark))
        if process.poll() is None:
            process.kill()
        process.wait()
        if outcome.wrong:
            outcome.report += "\n" + log.read_text(errors="replace")
        shutil.rmtree(home)
        return outcome

    def _fork(self, home: Path, words: list[str]) -> Forked:
        if self._nursery is None:
            env = {**os.environ, **self.env, "OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE
            self._nursery = subprocess.Popen(
                [sys.executable, __file__, "--nursery"], env=env, stdin=pipe, stdout=pipe, text=True
            )
        return Forked(self._nursery, home, words)

    def _spawn(self, command: list[str], **options: Any) -> Any:
        return self.lab.spawn(0, command, **options)

    def _wait(self, process: Any, log: Path, began: float, limit_s: float, outcome: Outcome) -> int | None:
        """Return the job's status; None if it did not end in time."""
        done: float | None = None
        while True:
            status: int | None = process.poll()
            now = time.monotonic()
            if done is None and DONE in log.read_text(errors="replace"):
                done = now
            if done is not None:
                outcome.ending_s = now - done
            if status is not None:
                return status
            if outcome.ending_s > limit_s or (done is None and now - began > START_LIMIT_S):
                return None
            time.sleep(0.05)

    def _pids(self, form: str, mark: str) -> list[int]:
        """Return the processes of a job; over ssh its environment does not travel, so all but the servers count."""
        found = members.pids_marked(MARK, mark)
        if form == "ssh":
            found += [pid for pid in self.lab.processes() if pid not in found and "sshd" not in command_of(pid)]
        return found


class Forked:
    """Two workers that a warm process has forked; looks like a process."""

    def __init__(self, nursery: Any, home: Path, words: list[str]) -> None:
        self._nursery = nursery
        print(json.dumps([str(home), words]), file=nursery.stdin, flush=True)
        self.pids: list[int] = json.loads(nursery.stdout.readline())
        self.pid = nursery.pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the status when both have ended."""
        if self._status is None and select.select([self._nursery.stdout], [], [], 0)[0]:
            self._status = max(map(abs, json.loads(self._nursery.stdout.readline())))
        return self._status

    def kill(self) -> None:
        """End both."""
        members.send_signal(self.pids, signal.SIGKILL)

    def wait(self) -> None:
        """Return when both have ended."""
        while self.poll() is None:
            time.sleep(0.02)


def nurse() -> int:
    """Fork the workers of one job after the other; a worker ends as the command would."""
    import torch.fx.experimental.symbolic_shapes  # noqa: F401  # imported by the first backward otherwise

    import poseidon.caffe.distributed
    import poseidon.caffe.drifting
    import poseidon.caffe.training
    from poseidon.cli.main import main as poseidon
    from poseidon.job.closing import end_after_hooks
    from poseidon.job.interfaces import reserve_port
    from poseidon.launch.local import worker_environment

    for line in iter(sys.stdin.readline, ""):
        home, words = json.loads(line)
        pids = []
        with reserve_port("127.0.0.1") as meeting:
            for rank in range(2):
                pid = os.fork()
                if not pid:
                    os.environ.update(worker_environment(rank, 2, meeting.getsockname()[1], os.environ))
                    os.chdir(home)
                    log = os.open("log", os.O_WRONLY | os.O_APPEND)
                    stacks = Path(os.environ["POSEIDON_TEST_STACKS"]) / f"{os.getpid()}.stacks"
                    faulthandler.register(STACKS, file=stacks.open("w"))
                    for number in (1, 2):
                        os.dup2(log, number)
                    status = poseidon(words)
                    end_after_hooks(status)
                    return status
                pids.append(pid)
            print(json.dumps(pids), flush=True)
            print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
    return 0


def stacks(pids: list[int], folder: Path) -> str:
    """Return the stacks of all threads of these processes."""
    spy = shutil.which("py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    lines = []
    for pid in dict.fromkeys(pids):
        lines.append(f"\n=== {pid}: {command_of(pid)}")
        file = folder / f"{pid}.stacks"
        if file.exists() and catches(pid, STACKS):
            os.kill(pid, STACKS)
            time.sleep(2.0)
            lines.append(file.read_text(errors="replace"))
        for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
            with contextlib.suppress(OSError):
                wait = (task / "wchan").read_text()
                lines.append(f"thread {task.name} {(task / 'comm').read_text().strip()}: {wait}")
        if spy is not None:
            told = subprocess.run([spy, "dump", "--native", "--pid", str(pid)], capture_output=True, text=True)
            lines.append(told.stdout or told.stderr)
    return "\n".join(lines)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def command_of(pid: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def make_source(path: Path) -> None:
    """Write a small database of JPEGs."""
    random = np.random.default_rng(0)
    with new_database("lmdb", str(path)) as writer:
        for number in range(64):
            done, content = cv2.imencode(".jpg", random.integers(0, 256, (20, 20, 3), np.uint8))
            assert done
            writer.put(b"%08d" % number, encoded_datum(content.tobytes(), number % 5).SerializeToString())


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep this many processes busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@contextlib.contextmanager
def places(folder: Path, count: int, with_lab: bool) -> Iterator[list[Place]]:
    """Make the places where jobs run side by side."""
    source = folder / "source"
    make_source(source)
    with contextlib.ExitStack() as stack:
        made = []
        for number in range(count):
            home = folder / f"place{number}"
            for part in ("stacks", "hook"):
                (home / part).mkdir(parents=True)
            (home / "hook" / "sitecustomize.py").write_text(HOOK)
            env = {
                "PYTHONPATH": str(home / "hook"),
                "POSEIDON_TEST_STACKS": str(home / "stacks"),
                "POSEIDON_TEST_STARTUP": str(TESTS / "startup"),
            }
            lab = None
            if with_lab:
                from sshd import serving

                from poseidon.lab import Lab

                lab = stack.enter_context(Lab(machines=2, rate="1gbit"))
                env |= stack.enter_context(serving(lab, home, login_env=env)).env
            made.append(Place(home, source, lab, env))
            stack.callback(made[-1].close)
        yield made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--forms", default=",".join(FORMS), help="which of " + ", ".join(FORMS))
    parser.add_argument("--limit", type=float, default=60.0, help="seconds from the last iteration to the end")
    parser.add_argument(
        "--load", type=int, default=2 * (os.cpu_count() or 1), help="processes that keep the cores busy"
    )
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time")
    args = parser.parse_args()
    forms = args.forms.split(",")
    if not set(forms) <= set(FORMS):
        parser.error(f"--forms {args.forms}: expected some of {', '.join(FORMS)}")
    wrong: list[Outcome] = []
    endings: dict[str, list[float]] = {form: [] for form in forms}
    with tempfile.TemporaryDirectory() as folder, places(Path(folder), args.parallel, "ssh" in forms) as made:
        free: queue.Queue[Place] = queue.Queue()
        for place in made:
            free.put(place)

        def run(number: int) -> Outcome:
            place = free.get()
            try:
                return place.run(forms[number % len(forms)], number // len(forms), args.limit)
            finally:
                free.put(place)

        with busy(args.load), ThreadPoolExecutor(args.parallel) as pool:
            for number, outcome in enumerate(pool.map(run, range(args.runs)), 1):
                verdict = ", ".join(outcome.wrong) or "ok"
                endings[outcome.form].append(outcome.ending_s)
                print(
                    f"{number:4d} {outcome.form:6s} {outcome.seconds:6.1f} s, the end {outcome.ending_s:5.2f} s: "
                    f"{verdict}{outcome.report}",
                    flush=True,
                )
                if outcome.wrong:
                    wrong.append(outcome)
    for form, values in endings.items():
        if values:
            print(f"{form}: {len(values)} runs, from the last iteration to the end at most {max(values):.1f} s")
    print(f"{args.runs} runs, {len(wrong)} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    if sys.argv[1:] == ["--nursery"]:
        sys.exit(nurse())
    main()
