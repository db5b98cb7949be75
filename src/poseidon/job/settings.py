"""Every environment variable that Poseidon reads: its name, how its value is written, its default and its purpose.

Values are read and checked in one way, and a wrong one is refused in one form: the variable, the value seen, the value
expected. Two families are declared where their fields are: ``POSEIDON_WIRE_*`` in ``wire/settings.py`` and
``POSEIDON_RUN_*`` in ``launch/run_settings.py``. ``docs/settings.md`` lists them all; a test compares it with the code.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from poseidon.errors import ConfigError

T = TypeVar("T")
TOTAL, PER_WORKER = BATCHES = ("total", "per-worker")
"""What the size of a batch may count: the samples of all workers or of one."""
LAST_PORT = 65535


@dataclass(frozen=True)
class Notation(Generic[T]):
    """How a value is written."""

    expected: str
    """What a value must be, for messages."""
    parse: Callable[[str], T]
    """Returns the value of a text, or raises ``ValueError``."""

    def read(self, value: Any, what: str) -> T:
        """Return the value of a text, or of a text or number from a file; ``what`` names the setting in the error."""
        try:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(value)
            return self.parse(str(value))
        except ValueError:
            raise refuse(what, value, self.expected) from None

    def read_argument(self, text: str) -> T:
        """Return the value of a word on the command line; argparse names the option in the error."""
        try:
            return self.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is given, expected {self.expected}") from None


def refuse(what: str, seen: object, expected: str) -> ConfigError:
    """Return the error for a setting with a value that cannot work."""
    return ConfigError(f"{what} is {seen!r}, expected {expected}")


def check_least(value: float | None, least: float | None, what: str) -> None:
    """Refuse a value below ``least``."""
    if value is not None and least is not None and value < least:
        raise refuse(what, value, f"at least {least:g}")


def check_port(value: int | None, what: str) -> None:
    """Refuse a port that a user names and that does not exist."""
    if value is not None and not 0 < value <= LAST_PORT:
        raise refuse(what, value, f"a port from 1 to {LAST_PORT}")


def number(text: str) -> float:
    """Return a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def count(text: str) -> int:
    """Return how many of something there are, at least one."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def switch(text: str) -> bool:
    """Return whether a switch is on."""
    answers = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in answers:
        raise ValueError(text)
    return answers[text.lower()]


def trial_mode(text: str) -> str:
    """Return one of the ways to try plans."""
    if text not in ("1", "0", "fresh"):
        raise ValueError(text)
    return text


def what_is_fixed(text: str) -> str:
    """Return what a batch size counts."""
    if text not in BATCHES:
        raise ValueError(text)
    return text


def words(text: str) -> tuple[str, ...]:
    """Return words as a shell splits them."""
    return tuple(shlex.split(text))


def step_range(text: str) -> tuple[int, int]:
    """Return the first step of a range and the one after its last."""
    first, _, last = text.partition(":")
    if not 0 <= int(first) < int(last):
        raise ValueError(text)
    return int(first), int(last)


TEXT = Notation("a text", str)
WHOLE = Notation("a whole number", int)
COUNT = Notation("a whole number above 0", count)
NUMBER = Notation("a number", number)
SWITCH = Notation("1 or 0", switch)
TRIAL_MODE = Notation("1, 0 or fresh", trial_mode)
STEPS = Notation("a range of steps such as 100:110", step_range)
WHAT_IS_FIXED = Notation("total or per-worker", what_is_fixed)
WORDS = Notation("words, quoted as in a shell", words)


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable."""

    name: str
    notation: Notation[Any]
    default: T
    place: str
    """The file that reads it, below ``src/poseidon``."""
    purpose: str
    """One line for ``docs/settings.md``."""
    is_internal: bool = False
    """Whether Poseidon sets it for its own processes, so that no user has to."""

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return its value in the environment, or the default if it is not set."""
        text = (os.environ if environ is None else environ).get(self.name)
        if text is None:
            return self.default
        value: T = self.notation.read(text, f"environment variable {self.name}")
        return value


TIMEOUT = Variable(
    "POSEIDON_TIMEOUT",
    NUMBER,
    300.0,
    "job/limits.py",
    "Seconds after which a worker is lost whose heartbeat has stopped, or workers that all wait in exchanges, each for "
    "something else; `timeout_s=` overrides it. A worker that beats and works outside of exchanges (evaluates, writes "
    "a checkpoint, loads data) has all the time it needs.",
)
CLUSTER = Variable(
    "POSEIDON_CLUSTER",
    TEXT,
    "",
    "team/calibrate.py",
    "On rank 0: the file that describes the cluster. Read instead of measuring links and devices; written by the first "
    "run if it does not exist.",
)
TRIALS = Variable(
    "POSEIDON_TRIALS",
    TRIAL_MODE,
    "1",
    "engine/choosing.py",
    "Whether training tries several plans and keeps the fastest: 1, once for each job, remembered in the user's cache "
    "folder; `fresh`, without what earlier runs remember; 0, never.",
)
MACHINE = Variable(
    "POSEIDON_MACHINE",
    TEXT,
    "",
    "team/team.py",
    "Name of this worker's machine; workers with equal names share one. Default: host name, boot and network "
    "namespace.",
)
INPUT_THREADS: Variable[int | None] = Variable(
    "POSEIDON_INPUT_THREADS",
    COUNT,
    None,
    "caffe/io/prefetch.py",
    "How many threads read, decode and transform for each data layer of a Caffe net. Default: the machine's cores "
    "divided by its workers.",
)
CAFFE_REPLAY = Variable(
    "POSEIDON_CAFFE_REPLAY",
    SWITCH,
    True,
    "caffe/replay.py",
    "Whether a Caffe solver alone on its GPU records a net's passes as a CUDA graph and replays them.",
)
SHARED_MEMORY = Variable(
    "POSEIDON_SHARED_MEMORY",
    SWITCH,
    True,
    "team/board.py",
    "Whether workers that share a machine sum gradients on the CPU in memory that they share, where the system has it.",
)
SECRET = Variable(
    "POSEIDON_SECRET",
    TEXT,
    "",
    "job/secret.py",
    "The job's secret, at least 16 bytes, equal on all workers. `poseidon run` draws one for every start. Without it "
    "and `POSEIDON_SECRET_FILE`: the user's own, `poseidon/secret` in the user's configuration folder, made when first "
    "needed.",
)
SECRET_FILE = Variable(
    "POSEIDON_SECRET_FILE",
    TEXT,
    "",
    "job/secret.py",
    "A file with the job's secret, which only its owner may read (mode 600), for Slurm, Kubernetes and torchrun.",
)
AUTO = Variable(
    "POSEIDON_AUTO", WORDS, (), "auto/__main__.py", "More options for `--auto`, before those of the command line."
)
SYNC_BATCHNORM = Variable(
    "POSEIDON_SYNC_BATCHNORM",
    SWITCH,
    False,
    "tensorflow/batch_moments.py",
    "TensorFlow: batch normalisation uses the moments of all workers' rows.",
)
CHECK_REPLICAS = Variable(
    "POSEIDON_CHECK_REPLICAS",
    WHOLE,
    8,
    "api.py",
    "On rank 0: steps between two comparisons of a sixteenth of the parameters with the other workers'; 0: never.",
)
RESTART = Variable(
    "POSEIDON_RESTART",
    WHOLE,
    0,
    "launch/places.py",
    "Set by `poseidon run` for scripts: how often the job was restarted. Above 0, load the last checkpoint.",
)
SSH_OPTIONS: Variable[tuple[str, ...]] = Variable(
    "POSEIDON_SSH_OPTIONS", WORDS, (), "launch/ssh.py", "More options for every ssh, such as `-F my_config`."
)
TRACEBACK = Variable(
    "POSEIDON_TRACEBACK",
    TEXT,
    "",
    "cli/main.py",
    "Any value: the `poseidon` command shows the tracebacks of its errors.",
)
LAB_FOLDER = Variable(
    "POSEIDON_LAB_FOLDER",
    TEXT,
    "",
    "lab/state.py",
    "Folder for the state files of labs. Default: below /run, the user's runtime folder or the temp folder.",
)
PROBE_CLOCK_OFFSET = Variable(
    "POSEIDON_PROBE_CLOCK_OFFSET",
    NUMBER,
    0.0,
    "doctor/probe.py",
    "On a host that `poseidon doctor` asks: seconds added to its clock, to rehearse a wrong one.",
)
FAILPOINTS: Variable[tuple[str, ...]] = Variable(
    "POSEIDON_FAILPOINTS",
    WORDS,
    (),
    "team/team.py",
    "Makes workers fail on purpose, such as `unsafe wire.send=raise@20#1` (see faults.md); refused unless its first "
    "word is `unsafe`.",
)
TRACE: Variable[tuple[int, int] | None] = Variable(
    "POSEIDON_TRACE",
    STEPS,
    None,
    "team/watch.py",
    "Steps that workers of `poseidon run` record in full, such as `100:110`; `--trace` sets it.",
)
BALANCE = Variable(
    "POSEIDON_BALANCE",
    SWITCH,
    False,
    "data/samplers.py",
    "Whether `ElasticSampler` divides batches by the workers' measured speeds; `--balance` sets it, and `balance=` "
    "overrides it.",
)
BALANCE_MAX: Variable[int | None] = Variable(
    "POSEIDON_BALANCE_MAX",
    COUNT,
    None,
    "data/samplers.py",
    "The largest share of a batch that this worker can hold, in samples; `--balance-max` sets it for all, a host's "
    "`env` in the cluster file for one machine, and `balance_max=` overrides it.",
)
FIXED_BATCH = Variable(
    "POSEIDON_FIXED_BATCH",
    WHAT_IS_FIXED,
    TOTAL,
    "data/samplers.py",
    "What the batch size of `ElasticSampler` counts, and what stays when workers come and go; `--fixed-batch` sets it, "
    "and `fixed_batch=` overrides it.",
)
RUN = Variable(
    "POSEIDON_RUN",
    TEXT,
    "",
    "job/world.py",
    "The start of a job and the machine a worker belongs to; marks all processes of `poseidon run`.",
    is_internal=True,
)
REPORT = Variable(
    "POSEIDON_REPORT",
    TEXT,
    "",
    "job/tell.py",
    "The pipe from a worker to its agent: file descriptor and inode.",
    is_internal=True,
)
ELASTIC = Variable(
    "POSEIDON_ELASTIC",
    TEXT,
    "",
    "job/elastic.py",
    "Of a worker of an elastic job: the pipe from its agent, its address, and how many workers there may be.",
    is_internal=True,
)
LIFELINE: Variable[int | None] = Variable(
    "POSEIDON_LIFELINE",
    WHOLE,
    None,
    "launch/local.py",
    "File descriptor of a pipe that closes when the launcher is gone.",
    is_internal=True,
)
VIEW = Variable(
    "POSEIDON_VIEW",
    TEXT,
    "",
    "auto/session.py",
    "Of a worker under `--auto`: `private` if it has its own view of the file system, else why not.",
    is_internal=True,
)
LAB = Variable(
    "POSEIDON_LAB", TEXT, "", "job/members.py", "The lab a process belongs to; marks its processes.", is_internal=True
)
JOB = Variable(
    "POSEIDON_JOB", TEXT, "", "job/members.py", "The job in a lab a process belongs to; marks it.", is_internal=True
)

VARIABLES: tuple[Variable[Any], ...] = (
    TIMEOUT,
    CLUSTER,
    TRIALS,
    MACHINE,
    INPUT_THREADS,
    CAFFE_REPLAY,
    SHARED_MEMORY,
    SECRET,
    SECRET_FILE,
    CHECK_REPLICAS,
    RESTART,
    SSH_OPTIONS,
    AUTO,
    SYNC_BATCHNORM,
    LAB_FOLDER,
    PROBE_CLOCK_OFFSET,
    TRACEBACK,
    FAILPOINTS,
    TRACE,
    BALANCE,
    BALANCE_MAX,
    FIXED_BATCH,
    RUN,
    REPORT,
    ELASTIC,
    LIFELINE,
    VIEW,
    LAB,
    JOB,
)
"""All variables but the two families."""


@dataclass(frozen=True)
class ForeignVariables:
    """Variables that other tools define and Poseidon reads."""

    names: tuple[str, ...]
    place: str
    purpose: str


FOREIGN = (
    ForeignVariables(
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        "job/world.py",
        "torchrun's: which worker this is, and where the workers meet.",
    ),
    ForeignVariables(
        (
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_JOB_ID",
            "SLURM_STEP_NODELIST",
            "SLURM_NODELIST",
        ),
        "job/world.py",
        "Slurm's, in tasks that srun started: the same.",
    ),
    ForeignVariables(
        ("PET_NPROC_PER_NODE", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
        "job/world.py",
        "torchrun's arguments, which Kubeflow's operators set for a pod: the same, where torchrun's own are absent; "
        "and how many workers a pod runs.",
    ),
    ForeignVariables(
        ("ACCELERATE_USE_CPU",), "trainers/in_place.py", "Set, unless set, with `--as-ddp` on a machine without a GPU."
    ),
    ForeignVariables(
        ("TORCHELASTIC_RUN_ID", "KUBERNETES_SERVICE_HOST"), "launch/join.py", "Which launcher started this process."
    ),
    ForeignVariables(
        ("GLOO_SOCKET_IFNAME",), "wire/address.py", "The interface for gloo and, unless set otherwise, for the wire."
    ),
    ForeignVariables(("NCCL_NET", "NCCL_IB_DISABLE"), "team/nccl.py", "Whether NCCL uses TCP."),
    ForeignVariables(("NCCL_MAX_NCHANNELS",), "job/world.py", "Set to 1, unless set, for one worker per machine."),
    ForeignVariables(("CUDA_VISIBLE_DEVICES",), "launch/run.py", "The GPUs of this machine that a job may use."),
    ForeignVariables(
        ("OMP_NUM_THREADS",), "launch/places.py", "Threads per worker. Default: the machine's cores, shared out."
    ),
    ForeignVariables(("SSH_CONNECTION",), "launch/agent.py", "The address at which ssh reached a machine."),
    ForeignVariables(("NO_COLOR", "TERM"), "launch/output.py", "Whether the terminal shows colours."),
    ForeignVariables(("XDG_CACHE_HOME",), "engine/choices.py", "The user's cache folder."),
    ForeignVariables(("XDG_CONFIG_HOME", "HOME"), "job/secret.py", "The user's configuration folder."),
    ForeignVariables(("XDG_RUNTIME_DIR",), "lab/state.py", "The user's runtime folder."),
    ForeignVariables(("GLOG_minloglevel",), "caffe/glog.py", "Caffe's log level."),
)
