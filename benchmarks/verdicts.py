"""Does the verdict name the right machine and cause? Injects causes into a running job in a lab and counts.

    python benchmarks/verdicts.py --rounds 40 --seed 1

A job of four machines runs on ``poseidon run`` over ssh; one cause after the other begins, and the verdict in the run's
folder is read three seconds later: right, unsure (it says so, or names nothing), or wrong although it claims to be
sure. Needs root, sshd, and the extra ``lab``. Results go to ``--output`` as JSON, a line for every round. A seed stands
for one sequence of machines and causes.

All emulated machines share the processors of this one. So while one machine is ``busy``, its processes have a processor
of their own together with the loops that keep it busy, and all other machines have another.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1] / "tests" / "cluster")]

from sshd import ensure_sshd, serving  # noqa: E402

from poseidon.lab import Lab  # noqa: E402
from poseidon.observe.folder import STATE, read_json  # noqa: E402

MACHINES = 4
KINDS = ("slow", "link", "lossy", "input", "disk", "busy", "hang", "stalls", "pause", "none")
RIGHT = {
    "slow": {"slow", "busy"},
    # A port that is slower than what is sent to it drops packets, so both are true.
    "link": {"link", "loss"},
    "lossy": {"loss"},
    "input": {"input"},
    "disk": {"input"},
    "busy": {"busy"},
    "hang": {"hung"},
    "stalls": {"stalls"},
    "pause": {"silent"},
    "none": {"computation", "busy"},
}
WAIT_S = 3.0
BATCH = array.array("f", (random.Random(0).gauss(0, 1) for _ in range(16 * 512))).tobytes()
"""What the job reads at once."""


class Disks:
    """What the workers' slow disks are: a pipe to ask for a batch and one to read it from, and a thread for each."""

    def __init__(self, folder: Path) -> None:
        self.seconds = 0.0
        """What the next read takes."""
        (folder / "batches").write_bytes(BATCH)
        for rank in range(MACHINES):
            ask, disk = folder / f"ask{rank}", folder / f"disk{rank}"
            os.mkfifo(ask)
            os.mkfifo(disk)
            threading.Thread(target=self._answer, args=(ask, disk), daemon=True).start()

    def _answer(self, ask: Path, disk: Path) -> None:
        asked, answers = os.open(ask, os.O_RDWR), os.open(disk, os.O_RDWR)
        while os.read(asked, 1):
            time.sleep(self.seconds)
            os.write(answers, BATCH)


class Busy:
    """Loops that share a processor with one machine, while the others have another."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._all = os.sched_getaffinity(0)
        self._loops: list[subprocess.Popen[bytes]] = []

    def begin(self, machine: int, loops: int) -> None:
        """Crowd a machine."""
        if len(self._all) < 2:
            raise SystemExit("a busy machine needs a processor of its own, and there is only one")
        mine, others, *_ = sorted(self._all)
        command = ["sh", "-c", "while :; do :; done"]
        self._loops = [self._lab.spawn(machine, command) for _ in range(loops)]
        for number in range(MACHINES):
            self._pin(number, {mine if number == machine else others})

    def end(self) -> None:
        """Give everybody all processors again."""
        for loop in self._loops:
            loop.kill()
            loop.wait()
        self._loops = []
        for number in range(MACHINES):
            self._pin(number, self._all)

    def _pin(self, machine: int, processors: set[int]) -> None:
        for process in self._lab.processes(machine):
            with contextlib.suppress(OSError):  # it has just ended
                for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208 - names, not paths
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(int(thread), processors)


@dataclass
class Faults:
    """What causes are made with."""

    lab: Lab
    control: Path
    disks: Disks
    busy: Busy


def inject(kind: str, machine: int, draw: random.Random, faults: Faults) -> str:
    """Begin a cause; return it in words."""
    lab = faults.lab
    asked = {"kind": kind, "rank": machine, "factor": 1.0, "seconds": 0.0}
    text = kind
    if kind == "slow":
        asked["factor"] = round(draw.uniform(1.3, 3.0), 2)
        text = f"slow {asked['factor']}x"
    elif kind == "input":
        asked["seconds"] = round(draw.uniform(0.03, 0.15), 3)
        text = f"input {asked['seconds']} s"
    elif kind == "link":
        factor = round(draw.uniform(8, 20), 1)
        lab.slow(machine, factor)
        text = f"link {factor}x"
    elif kind == "lossy":
        # A packet here has up to 64 KB, so there are far fewer losses in a second than a cable would have.
        share = round(draw.uniform(0.05, 0.12), 3)
        lab.lossy(machine, share)
        text = f"lossy {share:.1%}"
    elif kind == "disk":
        faults.disks.seconds = round(draw.uniform(0.03, 0.15), 3)
        text = f"disk {faults.disks.seconds} s"
    elif kind == "busy":
        loops = draw.randint(4, 8)
        faults.busy.begin(machine, loops)
        text = f"busy {loops} loops"
    elif kind == "pause":
        lab.pause(machine)
    write(faults.control, asked)
    return text


def write(control: Path, asked: dict[str, object]) -> None:
    temporary = control.with_suffix(".tmp")
    temporary.write_text(json.dumps(asked))
    temporary.replace(control)


def hold(kind: str, machine: int, lab: Lab, until: float) -> None:
    """Wait; for stalls, stop and continue the machine meanwhile."""
    while time.monotonic() < until:
        if kind == "stalls":
            lab.pause(machine)
            time.sleep(0.6)
            lab.heal(machine)
            time.sleep(0.5)
        else:
            time.sleep(0.05)


def heal(kind: str, machine: int, faults: Faults) -> None:
    write(faults.control, {"kind": "none", "rank": -1, "factor": 1.0, "seconds": 0.0})
    if kind in ("link", "lossy", "pause", "stalls"):
        faults.lab.heal(machine)
    elif kind == "busy":
        faults.busy.end()


def wait_for_steps(state: Path, limit_s: float) -> None:
    """Wait until all workers train again."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        seen = read_json(state)
        workers = seen.get("workers", []) if time.time() - seen.get("updated_at", 0.0) < 3 else []
        if len(workers) == MACHINES and all(0 < worker["step_s"] < 1 and worker["silent_s"] < 1 for worker in workers):
            return
        time.sleep(0.1)
    raise SystemExit(f"the job does not train: {read_json(state).get('verdict')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--mode", choices=("wrapper", "distribute"), default="wrapper")
    parser.add_argument("--route", default="allreduce", help="allreduce or sharded")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--machine", type=int, help="always this one")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    problem = ensure_sshd()
    if problem:
        raise SystemExit(problem)
    draw = random.Random(args.seed)
    counts: Counter[str] = Counter()
    rows = []
    with tempfile.TemporaryDirectory() as text, Lab(machines=MACHINES, rate=args.rate) as lab:
        folder = Path(text)
        with serving(lab, folder) as ssh:
            control, run = folder / "control.json", folder / "run"
            write(control, {"kind": "none", "rank": -1, "factor": 1.0, "seconds": 0.0})
            faults = Faults(lab, control, Disks(folder), Busy(lab))
            job = Path(__file__).with_name("verdicts_job.py").resolve()
            hosts = ",".join(f"machine{number}" for number in range(MACHINES))
            command = [sys.executable, "-m", "poseidon", "run", "--quiet", "--log-dir", str(run), "--hosts", hosts]
            command += ["--env", f"VERDICTS_MODE={args.mode}", "--env", f"VERDICTS_ROUTE={args.route}"]
            env = {**os.environ, **ssh.env, "OMP_NUM_THREADS": "1"}
            output = (folder / "output").open("wb")
            process = lab.spawn(0, [*command, str(job), str(control)], env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                wait_for_steps(run / STATE, 180)
                time.sleep(8)  # the first plan
                kinds = args.kinds.split(",")
                for number in range(args.rounds):
                    kind, machine = kinds[number % len(kinds)], draw.randrange(MACHINES)
                    machine = machine if args.machine is None else args.machine
                    if kind == "pause":
                        machine = draw.randrange(1, MACHINES)  # the launcher runs on the first
                    words = inject(kind, machine, draw, faults)
                    hold(kind, machine, lab, time.monotonic() + WAIT_S)
                    state = read_json(run / STATE)
                    verdict, age_s = state["verdict"], round(time.time() - state["updated_at"], 2)
                    heal(kind, machine, faults)
                    host = "" if kind == "none" else f"machine{machine}"
                    # All emulated machines share the processors of this one: whichever lacks them is rightly named.
                    is_right = verdict["cause"] in RIGHT[kind] and (verdict["host"] == host or kind == "none")
                    outcome = "right" if is_right else "wrong" if verdict["is_sure"] else "unsure"
                    counts[outcome] += 1
                    load = round(os.getloadavg()[0], 1)  # to see afterwards whether the machine was in use
                    rows.append(
                        {
                            "kind": words,
                            "host": host,
                            "outcome": outcome,
                            "age_s": age_s,
                            "load": load,
                            "verdict": verdict,
                        }
                    )
                    print(f"{number:3} {outcome:6} {words:14} {host:9} | {verdict['text']}", flush=True)
                    wait_for_steps(run / STATE, 60)
                    time.sleep(3.5)
            except BaseException:
                print((folder / "output").read_text()[-6000:])
                raise
            finally:
                write(control, {"kind": "stop", "rank": -1, "factor": 1.0, "seconds": 0.0})
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    process.wait(timeout=30)
    print(", ".join(f"{counts[name]} {name}" for name in ("right", "unsure", "wrong")), f"of {sum(counts.values())}")
    if args.output:
        args.output.write_text(json.dumps({"arguments": vars(args) | {"output": ""}, "rows": rows}, indent=1) + "\n")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
