"""Every environment variable that Poseidon reads: its name, how its value is written, its default and its purpose.

Values are read and checked in one way, and a wrong one is refused in one form: the variable, the value seen, the value
expected. Two families are declared where their fields are: ``POSEIDON_WIRE_*`` in ``wire/settings.py`` and
``POSEIDON_RUN_*`` in ``launch/run_settings.py``. ``docs/settings.md`` lists them all; a test compares it with the code.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from poseidon.errors import ConfigError

T = TypeVar("T")


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


def refuse(what: str, seen: object, expected: str) -> ConfigError:
    """Return the error for a setting with a value that cannot work."""
    return ConfigError(f"{what} is {seen!r}, expected {expected}")


def check_least(value: float | None, least: float | None, what: str) -> None:
    """Refuse a value below ``least``."""
    if value is not None and least is not None and value < least:
        raise refuse(what, value, f"at least {least:g}")


def number(text: str) -> float:
    """Return a finite number."""
    value = float(text)
    if not math.isfinite(value):
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


def words(text: str) -> tuple[str, ...]:
    """Return words as a shell splits them."""
    return tuple(shlex.split(text))


TEXT = Notation("a text", str)
WHOLE = Notation("a whole number", int)
NUMBER = Notation("a number", number)
SWITCH = Notation("1 or 0", switch)
TRIAL_MODE = Notation("1, 0 or fresh", trial_mode)
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
LIFELINE: Variable[int | None] = Variable(
    "POSEIDON_LIFELINE",
    WHOLE,
    None,
    "launch/local.py",
    "File descriptor of a pipe that closes when the launcher is gone.",
    is_internal=True,
)
LAB = Variable(
    "POSEIDON_LAB", TEXT, "", "job/members.py", "The lab a process belongs to; marks its processes.", is_internal=True
)
JOB = Variable(
    "POSEIDON_JOB", TEXT, "", "job/members.py", "The job in a lab a process belongs to; marks it.", is_internal=True
)

VARIABLES: tuple[Variable[Any], ...] = (
    CLUSTER,
    TRIALS,
    MACHINE,
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
    RUN,
    REPORT,
    LIFELINE,
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
        "launch/join.py",
        "Kubernetes' PyTorchJob, where a pod runs several workers.",
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
