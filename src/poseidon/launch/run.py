"""``poseidon run``: start a script as one job on this machine, or on many over ssh, and follow it to its end.

Started by torchrun, Slurm, Kubernetes or Ray, it joins their job instead. This module turns the command line into
settings and restarts a failed job; :mod:`poseidon.launch.launcher` runs it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from poseidon.errors import ConfigError
from poseidon.job.settings import STEPS, TRACE
from poseidon.launch import ssh
from poseidon.launch.auto_options import AUTO_OPTIONS
from poseidon.launch.balance import add_balance_options, balance_variables
from poseidon.launch.hosts import ClusterFile, Host, check_variable, parse_hosts, read_cluster_file, read_hostfile
from poseidon.launch.join import Joined, find_starter, joined_environment
from poseidon.launch.launcher import Ending, JobSettings, Launcher
from poseidon.launch.observing import JobObserver
from poseidon.launch.output import JobOutput
from poseidon.launch.places import place_workers
from poseidon.launch.roster import Bounds
from poseidon.launch.run_settings import PREFIX, SETTINGS, Chosen, resolve, show
from poseidon.launch.script import check_module, check_script, find_imports
from poseidon.observe.folder import RunFolder
from poseidon.observe.page.server import PageServer
from poseidon.observe.trackers import TRACKERS, TrackerFeed, make_tracker

WRAPPERS = ("accelerate", "transformers", "trl", "lightning", "pytorch_lightning")
"""Packages that wrap a model with torch's class on a user's behalf."""

T = TypeVar("T")

_REPLACEMENTS, _WAIT_S = 100, 600.0
"""Defaults that matter, and are shown, only where they are asked for."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
"""Between two trials to reach the hosts of a job that is restarted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.allow_abbrev = False  # a script's own --h or --n is nobody's business
    parser.usage = "poseidon run [options] script.py [arguments] | [options] -m module [arguments]"
    where = parser.add_argument_group("where (default: this machine, one worker per GPU, or one)")
    where.add_argument(
        "--nproc", metavar="N", help="workers on this machine; MIN:MAX goes on without those that are lost, down to MIN"
    )
    where.add_argument("--hosts", metavar="A,B:2", help="machines, with the number of workers of each after a colon")
    where.add_argument("--hostfile", metavar="F", help="file of `host slots=n` or `id ip port` lines, JSON or TOML")
    where.add_argument(
        "--nodes", metavar="MIN:MAX", help="go on without machines that are lost, as long as MIN are left"
    )
    where.add_argument("-c", "--cluster", metavar="F", help="JSON or TOML file of hosts and settings")
    how = parser.add_argument_group(f"how (each may also come from the cluster file, or from {PREFIX}NAME)")
    for option in SETTINGS:
        how.add_argument(
            option.argument, dest=option.name, type=option.notation.read_argument, default=None, help=option.help
        )
    how.add_argument("--env", action="append", metavar="NAME[=VALUE]", help="a variable for all workers; repeatable")
    how.add_argument(
        "--page",
        nargs="?",
        type=int,
        const=0,
        metavar="PORT",
        help="show the job in a browser, at this port of this machine or a free one",
    )
    how.add_argument(
        "--log-to",
        action="append",
        metavar="KIND[=TARGET]",
        help=f"log speed, loss and waits to {', '.join(TRACKERS)}: a folder, a project, an experiment; repeatable",
    )
    how.add_argument(
        "--trace", type=STEPS.read_argument, metavar="A:B", help="record steps A up to B in full, for Perfetto"
    )
    add_balance_options(how)
    how.add_argument("--quiet", action="store_true", help="do not show the settings at the start")
    what = parser.add_argument_group("what")
    what.add_argument("--auto", action="store_true", help="distribute a script that was written for one device")
    for choice in AUTO_OPTIONS:
        choice.add_to(what)
    what.add_argument("--as-caffe", action="store_true", help="run a pycaffe script as it is")
    what.add_argument(
        "--as-ddp",
        action=argparse.BooleanOptionalAction,
        help="have Poseidon take the place of torch's DistributedDataParallel; by itself for scripts that import "
        + ", ".join(WRAPPERS),
    )
    what.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module instead")
    what.add_argument("command", nargs=argparse.REMAINDER, metavar="script.py arguments")


def run(args: argparse.Namespace) -> int:
    """Run the job; return the status of the worker that failed first."""
    program = take_place(read_program(args), args)
    joined = find_starter(os.environ, count_gpus(os.environ))
    if joined is not None:
        return _join(joined, program, args)
    _check_where(args)
    workers = None if args.nproc is None else parse_bounds(args.nproc, "--nproc")
    cluster = read_cluster(args, None if workers is None else workers.most)
    chosen = resolve(vars(args), cluster.settings, args.cluster or "", os.environ)
    bounds = find_bounds(args, cluster)
    settings = replace(
        make_settings(args, program, cluster, chosen),
        bounds=bounds,
        replacements=_value_or(chosen["replacements"], _REPLACEMENTS),
        wait_s=_value_or(chosen["wait_for_hosts"], _WAIT_S),
        list_hosts=None if bounds is None else make_lister(args, chosen),
    )
    return run_job(settings, chosen, args, program)


def make_lister(args: argparse.Namespace, chosen: Mapping[str, Chosen]) -> Callable[[], Sequence[Host]] | None:
    """Return what reads the hosts again while an elastic job runs; None if they are in no file."""
    if args.hostfile is None and args.cluster is None:
        return None
    values = {name: one.value for name, one in chosen.items()}
    return lambda: [complete_host(host, values) for host in read_cluster(args).hosts]


def parse_bounds(text: str, what: str) -> Bounds:
    """Return the bounds in ``N`` or ``MIN:MAX``. Pure."""
    least, colon, most = text.partition(":")
    try:
        bounds = Bounds(int(least), int(most if colon else least), what == "--nodes")
    except ValueError:
        raise ConfigError(f"{what} is {text!r}, expected a whole number, or MIN:MAX for an elastic job") from None
    if bounds.least < 1:
        raise ConfigError(f"{what} is {text}; a job needs at least 1 {'machine' if what == '--nodes' else 'worker'}")
    if bounds.most < bounds.least:
        raise ConfigError(f"{what} is {text}; the second number is the most, and must not be below the first")
    return bounds


def find_bounds(args: argparse.Namespace, cluster: ClusterFile) -> Bounds | None:
    """Return how many workers or machines an elastic job may have; None if it is not elastic. Pure."""
    if args.nproc is not None and ":" in args.nproc:
        return parse_bounds(args.nproc, "--nproc")
    if args.nodes is None:
        return None
    if args.nproc is not None:
        raise ConfigError(f"--nodes counts machines, --nproc workers of this one; write --nproc {args.nodes}")
    bounds, count = parse_bounds(args.nodes, "--nodes"), len(cluster.hosts)
    if not bounds.least <= count <= bounds.most:
        raise ConfigError(f"--nodes {bounds}, but {count} machine{'s are' if count != 1 else ' is'} given")
    return bounds


@dataclass(frozen=True)
class Program:
    """What every worker runs."""

    argv: tuple[str, ...]
    script: str | None
    name: str

    def check(self, directory: Path) -> None:
        """Check that it can run at all, before anything starts."""
        if self.script is not None:
            check_script(directory / self.script)
        else:
            check_module(self.name, directory)


def start(argv: Sequence[str]) -> int:
    """Run a job with the arguments of ``poseidon run``; for other commands that start one."""
    parser = argparse.ArgumentParser(prog="poseidon run")
    add_arguments(parser)
    return run(parser.parse_args(list(argv)))


def read_program(args: argparse.Namespace) -> Program:
    """Return what to run. Pure."""
    if args.module is not None and (not args.module or args.command):
        raise ConfigError("-m needs a module's name, and no script before it")
    words = list(args.module or args.command)
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ConfigError("no script given; write: poseidon run [options] script.py arguments")
    if words[0].startswith("-"):
        raise ConfigError(f"option {words[0]!r} is not known; `poseidon run --help` lists them")
    if args.auto and args.as_caffe:
        raise ConfigError("--auto is for PyTorch and TensorFlow scripts, --as-caffe for pycaffe's; use one of them")
    if args.as_ddp and (args.auto or args.as_caffe):
        raise ConfigError(
            "--as-ddp is for scripts that distribute themselves with torch; leave --auto and --as-caffe out"
        )
    given = [option.argument for option in AUTO_OPTIONS if option.is_given(args)]
    if given and not args.auto:
        raise ConfigError(f"{', '.join(given)} needs --auto")
    if args.as_caffe and args.module is not None:
        raise ConfigError("--as-caffe runs scripts, not modules")
    script = None if args.module is not None else words[0]
    target = words if script is not None else ["-m", *words]
    if args.as_caffe:
        target = ["-m", "poseidon.caffe.as_caffe", *target]
    elif args.auto:
        target = ["-m", "poseidon.auto", *auto_options(args), *target]
    elif args.as_ddp:
        target = ["-m", "poseidon.trainers", "--asked", *target]
    return Program(tuple(target), script, words[0])


def take_place(program: Program, args: argparse.Namespace) -> Program:
    """Return the program with Poseidon in the place of torch's class, if it has a trainer that wraps the model."""
    if program.script is None or args.auto or args.as_caffe or args.as_ddp is not None:
        return program
    imports = find_imports(Path(program.script))
    found = [name for name in WRAPPERS if name in imports]
    if not found or "poseidon" in imports:
        return program
    return replace(program, argv=("-m", "poseidon.trainers", *program.argv))


def auto_options(args: argparse.Namespace) -> list[str]:
    """Return the options to pass on to ``--auto``. Pure."""
    return [word for option in AUTO_OPTIONS for word in option.words(args)]


def make_settings(
    args: argparse.Namespace, program: Program, cluster: ClusterFile, chosen: Mapping[str, Chosen]
) -> JobSettings:
    """Return the job's settings, checked as far as possible here."""
    directory = str(Path.cwd())
    values = {name: one.value for name, one in chosen.items()}
    if not values["directory"] or values["directory"] == directory:
        is_elsewhere = not any(map(ssh.is_here, cluster.hosts))
        if not (is_elsewhere and program.script and not Path(program.script).exists()):
            program.check(Path(directory))
    return JobSettings(
        hosts=tuple(complete_host(host, values) for host in cluster.hosts),
        argv=program.argv,
        script=program.script,
        directory=directory,
        environ=dict(os.environ),
        env=parse_variables(args.env or (), os.environ) | option_variables(args),
        ssh=ssh.SshSettings.from_environment(),
        port=values["master_port"],
        hang_timeout_s=values["hang_timeout"],
        grace_s=values["grace"],
    )


def option_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that pass options on to the workers. Pure."""
    traced = {} if args.trace is None else {TRACE.name: f"{args.trace[0]}:{args.trace[1]}"}
    return traced | balance_variables(args)


def complete_host(host: Host, values: Mapping[str, object]) -> Host:
    """Return the host with the settings for all hosts filled in where it has none of its own. Pure."""
    names = {"user": "user", "port": "ssh_port", "identity": "identity", "python": "python"}
    names |= {"directory": "directory", "interface": "interface"}
    if host.name == "localhost":  # no login, so no key and no user
        names = {"python": "python", "directory": "directory", "interface": "interface"}
    changes = {field: values[name] for field, name in names.items() if not getattr(host, field) and values[name]}
    return replace(host, **changes)  # type: ignore[arg-type]


def parse_variables(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``--env NAME=VALUE`` and ``--env NAME``, which passes on this process's. Pure."""
    variables = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or (not equals and name not in environ):
            raise ConfigError(f"--env {word!r}: write NAME=VALUE, or the NAME of a variable that is set here")
        variables[name] = value if equals else environ[name]
        check_variable(name, variables[name], "--env")
    return variables


def _check_where(args: argparse.Namespace) -> None:
    given = [f"--{name}" for name in ("nproc", "hosts", "hostfile", "cluster") if getattr(args, name) is not None]
    if len(given) > 1:
        hint = "; write --hosts name:2 for two workers there" if "--nproc" in given else ""
        raise ConfigError(f"{' and '.join(given)} say the same thing in different ways; use one of them{hint}")


def read_cluster(args: argparse.Namespace, workers: int | None = None) -> ClusterFile:
    """Return the hosts that the options name; without any, this machine with ``workers``, or one per GPU."""
    if args.cluster is not None:
        return read_cluster_file(args.cluster)
    if args.hosts is not None:
        return ClusterFile(parse_hosts(args.hosts))
    if args.hostfile is not None:
        return ClusterFile(read_hostfile(args.hostfile))
    return ClusterFile((Host("localhost", slots=workers or max(1, count_gpus(os.environ))),))


def count_gpus(environ: Mapping[str, str]) -> int:
    """Return how many NVIDIA GPUs this process may use, without loading PyTorch."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([word for word in chosen.split(",") if word.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


def run_job(settings: JobSettings, chosen: Mapping[str, Chosen], args: argparse.Namespace, program: Program) -> int:
    """Run the job, restarting it after failures if wanted, and return its status."""
    log_dir = _log_dir(str(chosen["log_dir"].value), program.name)
    places = place_workers(settings.hosts)
    folder = None if log_dir is None else RunFolder(log_dir, is_shared=settings.share is not None)
    output = JobOutput(places, log_dir, folder=folder)
    trackers = [make_tracker(text, program.name, log_dir) for text in args.log_to or ()]
    page: PageServer | None = None
    observer = JobObserver(places, program.name, folder, [TrackerFeed(one) for one in trackers])
    try:
        if args.page is not None:
            page = _open_page(log_dir, args.page)
            output.say(f"the page is at {page.url}", is_logged=False)
        if not args.quiet:
            output.say(_introduce(settings, chosen, args, log_dir))
        restarts = int(chosen["restarts"].value)
        for restart in range(restarts + 1):
            wait_s = _value_or(chosen["wait_for_hosts"], _WAIT_S)
            ending = _run_once(settings, output, observer, restart, wait_s)
            if ending.status == 0 or ending.is_interrupted or restart == restarts:
                break
            output.say(f"restarting ({restart + 1} of {restarts})")
        cause = "" if ending.cause is None else f"{ending.cause.host}: worker {ending.cause.rank}: {ending.cause.how}"
        closing = observer.end(ending.status, cause, ending.is_interrupted, time.monotonic())
        if not args.quiet or ending.status:
            output.say(f"{'ended' if not ending.status else f'status {ending.status}'} after {closing}")
        if ending.status and log_dir is not None:
            output.say(f"the logs are in {log_dir}")
        return ending.status
    finally:
        output.close()
        if folder is not None:
            folder.close()
        if page is not None:
            page.close()


def _open_page(log_dir: Path | None, port: int) -> PageServer:
    if log_dir is None:
        raise ConfigError(
            "--page shows the run's folder, and --log-dir none leaves none; name a folder or leave it out"
        )
    return PageServer(log_dir, port=port)


def _value_or(chosen: Chosen, default: T) -> T:
    value: T = default if chosen.value is None else chosen.value
    return value


def _run_once(
    settings: JobSettings, output: JobOutput, observer: JobObserver | None, restart: int, wait_s: float
) -> Ending:
    """Run the job; before a restart, wait for hosts that do not answer, up to ``wait_s``."""
    deadline, pause_s = time.monotonic() + wait_s, _FIRST_PAUSE_S
    while True:
        try:
            return Launcher(settings, output, restart, observer).run()
        except ConfigError as error:
            left_s = deadline - time.monotonic()
            if not restart or left_s <= 0:
                raise
            pause_s = min(pause_s, left_s)
            output.say(f"{error}\n  trying again in {pause_s:.0f} s (--wait-for-hosts)")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _log_dir(text: str, name: str) -> Path | None:
    if text == "none":
        return None
    if text:
        return Path(text)
    base = Path("runs") / f"{Path(name).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    return next(
        path for path in (base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))) if not path.exists()
    )


def _introduce(
    settings: JobSettings, chosen: Mapping[str, Chosen], args: argparse.Namespace, log_dir: Path | None
) -> str:
    source = next(
        (f"argument --{name}" for name in ("hosts", "hostfile", "cluster", "nproc") if getattr(args, name)), "default"
    )
    hosts = ", ".join(f"{host.name}:{host.slots}" for host in settings.hosts)
    rows = {"hosts": Chosen(hosts, source), **chosen}
    rows["log_dir"] = Chosen(log_dir or "none", chosen["log_dir"].origin)
    options = option_variables(args)
    given = [name for name in settings.env if name not in options]
    rows |= {"env": Chosen(",".join(given), "argument --env")} if given else {}
    for variable, value in options.items():
        name = variable.removeprefix("POSEIDON_").lower()
        rows[name] = Chosen(value, f"argument --{name.replace('_', '-')}")
    count = sum(host.slots for host in settings.hosts)
    command = " ".join(settings.argv)
    return f"{count} worker{'s' * (count > 1)}: {command}\n{show(rows)}"


def _join(joined: Joined, program: Program, args: argparse.Namespace) -> int:
    """Become the worker, or run this machine's workers, of the job that another launcher started."""
    given = [f"--{name}" for name in ("nproc", "hosts", "hostfile", "cluster") if getattr(args, name) is not None]
    if given:
        world = joined.world
        raise ConfigError(
            f"this process is already worker {world.rank} of {world.size}, started by {joined.starter}; "
            f"leave {' and '.join(given)} out, and it joins that job"
        )
    program.check(Path.cwd())
    if joined.share is None:
        sys.stdout.flush()
        sys.stderr.flush()
        argv = [sys.executable, *program.argv]
        os.execve(sys.executable, argv, joined_environment(joined, {**os.environ, **option_variables(args)}))
    chosen = resolve(vars(args), {}, "", os.environ)
    cluster = ClusterFile((Host("localhost", slots=joined.share.workers),))
    settings = replace(make_settings(args, program, cluster, chosen), share=joined.share)
    return run_job(settings, chosen, args, program)
