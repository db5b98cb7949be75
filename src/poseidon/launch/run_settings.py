"""The settings of ``poseidon run``: from arguments, cluster file, environment or defaults, in this order. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poseidon.errors import unknown_name
from poseidon.job.settings import NUMBER, TEXT, WHOLE, Notation, Variable, check_least, check_port

PREFIX = "POSEIDON_RUN_"


@dataclass(frozen=True)
class RunOption:
    """One setting of a job: an option ``--name``, a key of the cluster file, and a variable ``POSEIDON_RUN_*``."""

    name: str
    notation: Notation[Any]
    default: Any
    help: str
    least: float | None = None
    is_port: bool = False

    @property
    def argument(self) -> str:
        """The option on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> Variable[Any]:
        """The environment variable."""
        return Variable(PREFIX + self.name.upper(), self.notation, self.default, "launch/run_settings.py", self.help)


@dataclass(frozen=True)
class Chosen:
    """A setting's value and where it came from."""

    value: Any
    origin: str


SETTINGS = (
    RunOption("user", TEXT, "", "who logs in on the hosts; default: as ssh is configured"),
    RunOption("ssh_port", WHOLE, None, "port of the hosts' ssh servers; default: as ssh is configured", is_port=True),
    RunOption("identity", TEXT, "", "file of the private key for ssh; default: as ssh is configured"),
    RunOption("python", TEXT, "", "interpreter on the hosts; default: the path of this one"),
    RunOption("directory", TEXT, "", "where workers start; default: the path of this directory"),
    RunOption("interface", TEXT, "", "network interface for the job's traffic; default: the one ssh came in on"),
    RunOption(
        "master_port", WHOLE, None, "port on the first host where workers meet; default: a free one", is_port=True
    ),
    RunOption("log_dir", TEXT, "", "folder for a log file per worker; default: runs/SCRIPT-TIME; `none`: no logs"),
    RunOption("restarts", WHOLE, 0, "how often to restart the job after a failure (default 0)", 0),
    RunOption("replacements", WHOLE, None, "how many lost workers and machines an elastic job starts again; 100", 0),
    RunOption("wait_for_hosts", NUMBER, None, "seconds to wait for hosts before a restart, or below MIN; 600", 0),
    RunOption("hang_timeout", NUMBER, 0.0, "seconds without progress after which the job is ended; 0: never", 0),
    RunOption("grace", NUMBER, 30.0, "seconds that workers have to end after Ctrl-C (default 30)", 0),
)
FROM_HOSTS = ("user", "ssh_port", "identity", "python", "directory", "interface")
"""Settings that a cluster file gives with its hosts."""


def resolve(
    given: Mapping[str, Any], file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]
) -> dict[str, Chosen]:
    """Return every setting with its origin; ``given`` holds None for options that are not on the command line."""
    known = [option.name for option in SETTINGS if option.name not in FROM_HOSTS]
    for name in file:
        if name not in known:
            raise unknown_name(f"setting in {file_name}", name, known)
    return {option.name: _choose(option, given, file, file_name, environ) for option in SETTINGS}


def show(rows: Mapping[str, Chosen]) -> str:
    """Return the settings that have a value as lines: name, value, origin."""
    lines = [
        (name.replace("_", "-"), _text(chosen.value), chosen.origin)
        for name, chosen in rows.items()
        if chosen.value not in (None, "")
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(f"  {name:<{widths[0]}}  {value:<{widths[1]}}  ({origin})" for name, value, origin in lines)


def _choose(
    option: RunOption, given: Mapping[str, Any], file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]
) -> Chosen:
    variable = option.variable
    if given.get(option.name) is not None:
        value, what, origin = given[option.name], option.argument, f"argument {option.argument}"
    elif option.name in file:
        what = f"{file_name}: {option.name}"
        value, origin = option.notation.read(file[option.name], what), f"file {file_name}"
    elif variable.name in environ:
        what = f"environment variable {variable.name}"
        value, origin = variable.read(environ), f"environment {variable.name}"
    else:
        return Chosen(option.default, "default")
    check_least(value, option.least, what)
    if option.is_port:
        check_port(value, what)
    return Chosen(value, origin)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
