"""The settings of ``poseidon run``: from arguments, cluster file, environment or defaults, in this order. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from poseidon.errors import ConfigError, unknown_name

PREFIX = "POSEIDON_RUN_"


@dataclass(frozen=True)
class Setting:
    """One thing that can be set."""

    name: str
    kind: Callable[[str], Any]
    default: Any
    help: str
    least: float | None = None


@dataclass(frozen=True)
class Chosen:
    """A setting's value and who said so."""

    value: Any
    origin: str


SETTINGS = (
    Setting("user", str, "", "who logs in on the hosts; default: as ssh is configured"),
    Setting("ssh_port", int, None, "port of the hosts' ssh servers; default: as ssh is configured", 1),
    Setting("identity", str, "", "file of the private key for ssh; default: as ssh is configured"),
    Setting("python", str, "", "interpreter on the hosts; default: the path of this one"),
    Setting("directory", str, "", "where workers start; default: this directory's path"),
    Setting("interface", str, "", "network interface for the job's traffic; default: the one ssh came in by"),
    Setting("master_port", int, None, "port on the first host where workers meet; default: a free one", 1),
    Setting("log_dir", str, "", "folder for a log file per worker; default: runs/SCRIPT-TIME; `none` writes none"),
    Setting("restarts", int, 0, "how often to start again after a failure (default 0)", 0),
    Setting("hang_timeout", float, 0.0, "seconds without any progress after which the job is ended; 0: never", 0),
    Setting("grace", float, 30.0, "seconds workers have to end in order after Ctrl-C (default 30)", 0),
)
_FROM_HOSTS = ("user", "ssh_port", "identity", "python", "directory", "interface")
"""What a cluster file says of these it says in its hosts."""


def resolve(
    given: Mapping[str, Any], file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]
) -> dict[str, Chosen]:
    """Return every setting with where it came from; ``given`` holds None for what was not an argument."""
    known = [setting.name for setting in SETTINGS if setting.name not in _FROM_HOSTS]
    for name in file:
        if name not in known:
            raise unknown_name(f"setting in {file_name}", name, known)
    return {setting.name: _choose(setting, given, file, file_name, environ) for setting in SETTINGS}


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
    setting: Setting, given: Mapping[str, Any], file: Mapping[str, Any], file_name: str, environ: Mapping[str, str]
) -> Chosen:
    argument = f"--{setting.name.replace('_', '-')}"
    variable = PREFIX + setting.name.upper()
    if given.get(setting.name) is not None:
        return Chosen(_check(setting, given[setting.name], argument), f"argument {argument}")
    if setting.name in file:
        return Chosen(_check(setting, _convert(setting, file[setting.name], file_name), file_name), f"file {file_name}")
    if variable in environ:
        value = _convert(setting, environ[variable], f"environment variable {variable}")
        return Chosen(_check(setting, value, variable), f"environment {variable}")
    return Chosen(setting.default, "default")


def _convert(setting: Setting, value: Any, source: str) -> Any:
    try:
        return setting.kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{source}: {setting.name} is {value!r}; a number is expected") from None


def _check(setting: Setting, value: Any, source: str) -> Any:
    if setting.least is not None and value < setting.least:
        raise ConfigError(f"{source}: {setting.name} is {value}; it must be at least {setting.least:g}")
    return value


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
