"""``poseidon lab``: run jobs on emulated machines, keep labs, break them on purpose, remove them."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.job.settings import check_port
from poseidon.lab import cluster, gpu, ssh, state
from poseidon.lab.cluster import Lab
from poseidon.lab.job import Job, JobOptions, JobResult
from poseidon.lab.network import Traffic
from poseidon.lab.spec import format_rate, machine_address, machine_name, parse_machines

CHOOSING = ("reset", "half-open", "flip")
"""Faults of connections, which can be chosen by peer and port."""
FAULTS = ("cut", "pause", "kill", "slow", "lossy", *CHOOSING, "heal")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions ``run``, ``up``, ``status``, ``down``, ``fault`` and ``exec``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="run|up|status|down|fault|exec")
    run_parser = actions.add_parser("run", help="run a job in a lab that lasts as long as the job")
    _add_network_options(run_parser)
    _add_job_options(run_parser)
    up = actions.add_parser("up", help="start a lab that stays")
    _add_network_options(up)
    up.add_argument("--ssh", action="store_true", help="an ssh server on every machine, to rehearse a real cluster")
    actions.add_parser("status", help="show the labs on this machine")
    down = actions.add_parser("down", help="remove labs, and whatever killed ones left behind")
    down.add_argument("names", nargs="*", metavar="NAME", help="labs to remove; default: all that no job is using")
    down.add_argument("--all", action="store_true", help="also labs whose job is still running")
    fault = actions.add_parser("fault", help="break machines, links and connections while a job runs, and heal them")
    fault.add_argument("fault", choices=FAULTS)
    fault.add_argument("machines", metavar="N", help="machine numbers: 2, or 0,3, or 1-3")
    fault.add_argument("--peer", type=int, metavar="M", help="reset, half-open, flip: only connections with machine M")
    fault.add_argument("--port", type=int, help="reset, half-open, flip: only connections with this port at either end")
    fault.add_argument("--times", type=int, metavar="T", help="flip: in how many packets (default 1)")
    fault.add_argument("--factor", type=float, metavar="F", help="slow: how many times slower (default 100)")
    fault.add_argument("--share", type=float, metavar="S", help="lossy: which share of the packets (default 0.02)")
    fault.add_argument("--lab", metavar="NAME", help="which lab, when there are several")
    execute = actions.add_parser("exec", help="run one command on one machine of a running lab")
    execute.add_argument("--lab", metavar="NAME", help="which lab, when there are several")
    execute.add_argument("machine", type=int, metavar="N")
    execute.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def run(args: argparse.Namespace) -> int:
    """Perform the action; the status of ``run`` is the job's."""
    actions = {"run": _run, "up": _up, "status": _status, "down": _down, "fault": _fault, "exec": _execute}
    return actions[args.action](args)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into a clean exit of this process, so that the lab is removed."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _add_network_options(parser: argparse.ArgumentParser) -> None:
    # No defaults here: when `run` uses an existing lab, given options must be distinguishable from defaults.
    parser.add_argument("--machines", type=int, metavar="N", help="how many machines (default 4)")
    parser.add_argument("--rate", help="link speed for all, or one each: 10gbit,10gbit,1gbit; or none (default 1gbit)")
    parser.add_argument("--delay", help="added to each packet's way, such as 0.1ms")
    parser.add_argument("--loss", help="share of packets lost, such as 0.01%%")
    parser.add_argument("--queue", help="depth of each port's queue (default 5ms)")
    parser.add_argument("--slow", action="append", metavar="N:FACTORx", help="slow a machine, as 3:2.5x")
    parser.add_argument("--name", help="the lab's name (default: made up)")


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lab", metavar="NAME", help="run in this lab, made by `up`, instead of a new one")
    parser.add_argument("--workers-per-machine", type=int, default=1, metavar="W")
    parser.add_argument("--gpu", choices=("none", "share"), default="none", help="share: all workers use one GPU")
    parser.add_argument(
        "--on-failure",
        choices=("stop", "wait"),
        default="stop",
        help="when a worker fails: stop the others (default), or wait to see how they react",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after this time (status 124)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write status, time and bytes as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the network options that were given."""
    names = ("machines", "rate", "delay", "loss", "queue", "slow")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _make_lab(args: argparse.Namespace) -> Lab:
    given = _given(args)
    if "machines" not in given and "," in given.get("rate", ""):
        given["machines"] = len(given["rate"].split(","))
    return Lab(**given, name=args.name)


def _find_lab(args: argparse.Namespace) -> Lab:
    if given := _given(args):
        options = ", ".join(f"--{name}" for name in given)
        raise ConfigError(f"lab {args.lab!r} already exists; leave out {options}, or leave out --lab")
    return Lab.attach(args.lab)


def _run(args: argparse.Namespace) -> int:
    lab = _make_lab(args) if args.lab is None else _find_lab(args)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    options = JobOptions(
        workers_per_machine=args.workers_per_machine,
        share_gpu=args.gpu == "share",
        stop_on_failure=args.on_failure == "stop",
        timeout_s=args.timeout,
    )
    Job(lab, command, options)  # report a bad command before creating anything
    with ended_by_signals(), lab, gpu.sharing(lab.name, options.share_gpu) as mps_folder:
        print(f"lab: {lab.name}: {lab.spec.describe()}", file=sys.stderr, flush=True)
        options = JobOptions(**{**vars(options), "mps_folder": mps_folder})
        result = Job(lab, command, options).run()
    print(_report(result), file=sys.stderr, flush=True)
    if args.report is not None:
        files.write_json(args.report, {"lab": lab.spec.to_json(), **asdict(result)}, "report", indent=2)
    return result.status


def _report(result: JobResult) -> str:
    lines = [f"lab: {machine_name(number):<10} {_bytes(moved)}" for number, moved in enumerate(result.traffic)]
    total = sum(moved.sent for moved in result.traffic)
    lines.append(f"lab: all machines sent {total / 1e6:.3f} MB in {result.seconds:.2f} s; status {result.status}")
    if result.reason:
        lines.append(f"lab: {result.reason}")
    return "\n".join(lines)


def _bytes(traffic: Traffic) -> str:
    return f"sent {traffic.sent / 1e6:12.3f} MB  received {traffic.received / 1e6:12.3f} MB"


def _up(args: argparse.Namespace) -> int:
    lab = _make_lab(args)
    with ended_by_signals(), lab:
        if args.ssh:
            ssh.serve(lab)
        lab.keep()
    print(f"lab {lab.name} is up: {lab.spec.describe()}")
    if args.ssh:
        print(f"  poseidon lab exec --lab {lab.name} 0 -- ssh machine1     log in from one machine on another")
        print(f"  poseidon lab exec --lab {lab.name} 0 -- poseidon run --hosts machine0,machine1 train.py")
    print(f"  poseidon lab run --lab {lab.name} -- COMMAND     run a job in it")
    print(f"  poseidon lab exec --lab {lab.name} 0 -- bash     a shell on machine 0")
    print(f"  poseidon lab down {lab.name}                     remove it")
    return 0


def _status(_: argparse.Namespace) -> int:
    labs = state.load_all()
    if not labs:
        print("no lab is running")
    for lab in labs:
        if lab.is_abandoned:
            print(f"lab {lab.name}: left behind by a killed process; remove it with `poseidon lab down`")
            continue
        kept = "until `poseidon lab down`" if lab.owner is None else f"while process {lab.owner.pid} runs"
        print(f"lab {lab.name}: {lab.spec.describe()}, {kept}")
        for number, traffic in enumerate(Lab.attach(lab.name).traffic()):
            faults = [word for word in state.FAULTS if number in getattr(lab, word)]
            print(
                f"  {machine_name(number):<10} {machine_address(number):<12} "
                f"{format_rate(lab.spec.rates_bits[number]):>8}  {len(lab.processes(number)):3d} processes  "
                f"{_bytes(traffic)}  {' '.join(faults)}".rstrip()
            )
    return 0


def _down(args: argparse.Namespace) -> int:
    labs = state.load_all()
    chosen = [state.choose(name, labs) for name in args.names]
    if not args.names:
        chosen = [lab for lab in labs if args.all or lab.is_abandoned or lab.owner is None]
        for lab in labs:
            if lab not in chosen and lab.owner is not None:
                print(f"lab {lab.name} left alone: process {lab.owner.pid} is using it (name it, or use --all)")
    for lab in chosen:
        cluster.remove(lab)
        print(f"lab {lab.name} removed")
    if not labs:
        print("no lab is running")
    return 0


def _fault(args: argparse.Namespace) -> int:
    lab = Lab.attach(args.lab)
    _check_fault_options(args)
    for machine in parse_machines(args.machines, lab.machines):
        print(f"lab {lab.name}: {args.fault} {machine_name(machine)}{_act(lab, machine, args)}")
    return 0


def _check_fault_options(args: argparse.Namespace) -> None:
    fitting = {"peer": CHOOSING, "port": CHOOSING, "times": ("flip",), "factor": ("slow",), "share": ("lossy",)}
    for name, faults in fitting.items():
        if getattr(args, name) is not None and args.fault not in faults:
            raise ConfigError(f"--{name} goes with {', '.join(faults)}, not with {args.fault}")
    check_port(args.port, "--port")


def _act(lab: Lab, machine: int, args: argparse.Namespace) -> str:
    """Do it; return what else to say of it."""
    chosen = (args.peer, args.port or 0)
    if args.fault == "reset":
        return f": {lab.reset(machine, *chosen)} connections"
    if args.fault == "half-open":
        lab.half_open(machine, *chosen)
    elif args.fault == "flip":
        lab.flip(machine, *chosen, times=1 if args.times is None else args.times).close()
    elif args.fault == "slow":
        lab.slow(machine, 100.0 if args.factor is None else args.factor)
    elif args.fault == "lossy":
        lab.lossy(machine, 0.02 if args.share is None else args.share)
    else:
        {"cut": lab.cut, "heal": lab.heal, "kill": lab.kill, "pause": lab.pause}[args.fault](machine)
    return ""


def _execute(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("no command given; write it after --, as in: poseidon lab exec 0 -- bash")
    # In this process's session and with its terminal, so that a shell works.
    process = Lab.attach(args.lab).spawn(args.machine, command, stdin=None, start_new_session=False)
    with contextlib.suppress(KeyboardInterrupt):
        return process.wait()
    return process.wait()
