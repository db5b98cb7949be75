"""``poseidon train``: train a net by its solver's prototxt, with Caffe's flags and the original Poseidon's."""

from __future__ import annotations

import argparse
import sys

from poseidon.caffe.commands.flags import add_bool_flag, add_caffe_flags, add_flag, need, stages_of
from poseidon.errors import ConfigError
from poseidon.job.world import World
from poseidon.launch.hosts import read_hostfile
from poseidon.launch.local import follow_launcher, run_workers
from poseidon.launch.run import start

_SHOWN = ("solver", "snapshot", "weights", "gpu", "level", "stage", "sigint_effect", "sighup_effect")
_DECIDED_HERE = (
    "num_table_threads",
    "num_comm_channels_per_client",
    "num_rows_per_table",
    "init_thread_access_table",
    "num_zmq_threads",
    "bandwidth_mbps",
    "client_bandwidth_mbps",
    "server_bandwidth_mbps",
    "bg_idle_milli",
    "server_idle_milli",
    "oplog_push_upper_bound_kb",
    "oplog_push_staleness_tolerance",
    "thread_oplog_batch_size",
    "row_candidate_factor",
    "server_row_candidate_factor",
    "server_push_row_threshold",
    "update_sort_policy",
    "numa_opt",
    "numa_index",
    "numa_policy",
    "naive_table_oplog_meta",
    "suppression_on",
    "use_approx_sort",
)
"""How the original's tables work inside: accepted with any value, since this engine decides such things itself."""
_EXPLAINED = {
    "num_app_threads": "every net is trained by a process of its own here; use --workers, or `slots=` in the host file",
    "snapshot_clock": "set `snapshot` in the solver's prototxt",
    "snapshot_dir": "set `snapshot_prefix` in the solver's prototxt",
    "resume_clock": "name a .solverstate with --snapshot",
    "resume_dir": "name a .solverstate with --snapshot",
}
"""Flags of the original that have another name here, unless their value changes nothing."""
_NO_EFFECT = {"num_app_threads": "1", "snapshot_clock": "-1", "resume_clock": "-1"}
_CONSISTENCY = ("SSPPush", "SSPAggr", "SSP", "BSP")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_caffe_flags(parser, _SHOWN)
    several = parser.add_argument_group("several workers")
    add_flag(several, "workers", int, None, "workers on this machine (default: one, or one per GPU that --gpu names)")
    add_bool_flag(several, "svb", True, "exchange factors where that is cheaper (default true); false: full gradients")
    add_flag(several, "net_outputs", str, "", "CSV file for all displayed outputs, averaged over the workers")
    add_flag(several, "stats_path", str, "", "JSON file for the speed of the run")
    add_flag(several, "cluster", str, "", "JSON file of link and device speeds, instead of a measurement")
    add_flag(several, "timeout_s", float, None, "seconds to wait for another worker (default: POSEIDON_TIMEOUT)")
    original = parser.add_argument_group("flags of the original Poseidon")
    add_flag(original, "hostfile", str, "", "machines to train on, over ssh: lines `id ip port` or `host slots=n`")
    add_flag(original, "num_clients", int, 1, "number of machines")
    add_flag(original, "client_id", int, 0, "number of this machine")
    add_flag(original, "table_staleness", int, 0, "iterations a worker may be ahead of the slowest; 0: all in step")
    add_flag(
        original, "consistency_model", str, "SSPPush", f"one of {', '.join(_CONSISTENCY)}: the same at staleness 0"
    )
    for name in _DECIDED_HERE:
        original.add_argument(f"-{name}", f"--{name}", nargs="?", help=argparse.SUPPRESS)
        original.add_argument(f"-no{name}", f"--no{name}", dest=name, action="store_const", help=argparse.SUPPRESS)
    for name in _EXPLAINED:
        add_flag(original, name, str, None, argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Train in this process, or in workers that it starts and watches."""
    from poseidon.caffe.training import TrainSettings, check_gpus, parse_gpus, train

    check_original_flags(args)
    settings = TrainSettings(
        solver=need(args.solver, "solver", "a solver's prototxt says what to train and how"),
        snapshot=args.snapshot,
        weights=args.weights,
        gpus=parse_gpus(args.gpu),
        level=args.level,
        stages=tuple(stages_of(args.stage)),
        sigint_effect=args.sigint_effect,
        sighup_effect=args.sighup_effect,
        net_outputs=args.net_outputs,
        stats_path=args.stats_path,
        log_dir=args.log_dir,
        routes=None if args.svb else {"*": "allreduce"},
        cluster=args.cluster,
        timeout_s=args.timeout_s,
        staleness=args.table_staleness,
        consistency_model=args.consistency_model,
    )
    world = World.from_environment()
    if args.hostfile and world.size == 1:
        return start(launch_flags(args))
    check_gpus(settings.gpus, args.gpu)
    count = worker_count(args.workers, settings.gpus, world)
    if count > 1:
        command = [sys.executable, "-m", "poseidon.cli", "train", *worker_flags(args)]
        return run_workers(command, count)
    follow_launcher()
    train(settings)
    return 0


def worker_count(asked: int | None, gpus: tuple[int, ...] | None, world: World) -> int:
    """Return how many workers to start; 1 means that this process trains. Pure."""
    if asked is not None and asked < 1:
        raise ConfigError(f"--workers is {asked}; it must be at least 1")
    if world.size > 1:
        if asked not in (None, world.size):
            raise ConfigError(
                f"--workers {asked}, but this process is worker {world.rank} of {world.size} of a job that was started "
                "otherwise; leave --workers out"
            )
        return 1
    return asked or len(gpus or ()) or 1


def worker_flags(args: argparse.Namespace) -> list[str]:
    """Return the command line of a worker: this one's, without the number of workers. Pure."""
    return [f"--{name}={value}" for name, value in vars(args).items() if name != "workers" and value is not None]


def check_original_flags(args: argparse.Namespace) -> None:
    """Raise if the original's flags contradict each other."""
    if args.consistency_model not in _CONSISTENCY:
        raise ConfigError(f"--consistency_model {args.consistency_model!r} is none of {', '.join(_CONSISTENCY)}")
    if args.table_staleness < 0 or (args.table_staleness and args.consistency_model == "BSP"):
        raise ConfigError(
            f"--table_staleness {args.table_staleness} with --consistency_model {args.consistency_model}: staleness "
            "counts iterations, 0 or more, and BSP allows none"
        )
    for name, advice in _EXPLAINED.items():
        value = getattr(args, name)
        if value not in (None, "", _NO_EFFECT.get(name)):
            raise ConfigError(f"--{name} {value}: {advice}")
    if World.from_environment().size > 1 or (not args.hostfile and args.num_clients == 1):
        return
    if not args.hostfile:
        raise ConfigError(f"--num_clients {args.num_clients} needs --hostfile, which names the machines")
    if args.client_id:
        raise ConfigError(
            f"--client_id {args.client_id}: give the command on the first machine alone; it starts the others over ssh"
        )
    if args.workers is not None:
        raise ConfigError(
            f"--workers {args.workers} counts workers of this machine alone; in {args.hostfile}, write `host slots=n`"
        )
    hosts = len(read_hostfile(args.hostfile))
    if args.num_clients not in (1, hosts):
        raise ConfigError(f"--num_clients {args.num_clients}, but {args.hostfile} names {hosts} machine(s)")


def launch_flags(args: argparse.Namespace) -> list[str]:
    """Return the arguments of ``poseidon`` that start this training on the machines of the host file. Pure."""
    ours = ("workers", "hostfile", "num_clients", "client_id")
    flags = [f"--{name}={value}" for name, value in vars(args).items() if name not in ours and value is not None]
    return ["--hostfile", args.hostfile, "-m", "poseidon.cli", "train", *flags]
