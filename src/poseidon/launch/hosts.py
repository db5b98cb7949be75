"""The machines of a job, from ``--hosts``, host files and cluster files. Pure apart from reading files.

There are four notations: ``a,b:2`` on the command line, a file of ``host slots=n`` lines, the original Poseidon's file
of ``id ip port`` lines, and a JSON or TOML file with ``hosts`` (or the original's ``worker_nodes``).
"""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError

MOST_WORKERS = 1024
"""More on one machine are a mistake: each is a process with a device or at least a core."""


def check_word(word: str, what: str) -> None:
    """Refuse a text that no argument, path or variable can hold."""
    if "\0" in word or not _is_encodable(word):
        raise ConfigError(f"{what} is {word!r}, expected a text without zero bytes and broken characters")


def check_variable(name: str, value: str, what: str) -> None:
    """Refuse a variable that no process can be given."""
    if not name or "=" in name:
        raise ConfigError(f"{what}: {name!r} is not the name of a variable: it must not be empty nor hold an `=`")
    check_word(name, f"{what}: the name of a variable")
    check_word(value, f"{what}: {name}")


def _is_encodable(word: str) -> bool:
    try:
        os.fsencode(word)
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Host:
    """One machine that runs workers, and how to reach it."""

    name: str
    """The user's name for it; shown in all messages."""
    address: str = ""
    """Where ssh and the other machines reach it; empty: the name."""
    slots: int = 1
    """Number of workers on it."""
    user: str = ""
    """User for the login; empty: as ssh is configured."""
    port: int | None = None
    """Port of the ssh server; not given: as ssh is configured."""
    identity: str = ""
    """File of the private key; empty: as ssh is configured."""
    python: str = ""
    """The interpreter there; empty: the same path as the launcher's."""
    directory: str = ""
    """Where workers start; empty: the same path as the launcher's."""
    interface: str = ""
    """Network interface for the job's traffic; empty: the one the address belongs to."""
    service_port: int | None = None
    """Port where workers meet if this is the first host; not given: a free one."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables for the workers of this machine, on top of the job's."""

    def __post_init__(self) -> None:
        if not self.address:
            object.__setattr__(self, "address", self.name)
        for what in ("name", "address", "user"):
            word = getattr(self, what)
            # ssh would take a word that starts with a dash for an option.
            is_bad = re.search(r"[\s\0\"'\\;|&$<>()`]", word) or not _is_encodable(word) or word.startswith("-")
            if is_bad or (what != "user" and not word):
                raise ConfigError(f"host {self.name!r}: {what} {word!r} is not the name of a host or user")
        if not 1 <= self.slots <= MOST_WORKERS:
            raise ConfigError(
                f"host {self.name}: slots is {self.slots}, expected 1 to {MOST_WORKERS}: the workers on this machine"
            )
        for what in ("identity", "python", "directory", "interface"):
            check_word(getattr(self, what), f"host {self.name}: {what}")
        for name, value in self.env:
            check_variable(name, value, f"host {self.name}: env")
        for what in ("port", "service_port"):
            port = getattr(self, what)
            if port is not None and not 0 < port < 65536:
                raise ConfigError(f"host {self.name}: {what} is {port}; ports are 1 to 65535")


@dataclass(frozen=True)
class ClusterFile:
    """The content of a cluster file: hosts, and settings of the job."""

    hosts: tuple[Host, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)


_WORDS = {"slots": int, "port": int, "service_port": int}
_HOST_KEYS = tuple(item.name for item in fields(Host))
_DEFAULT_KEYS = ("user", "port", "identity", "python", "directory", "interface", "slots", "env")
"""Keys that a cluster file may set once for all its hosts."""
ORIGINAL_KEYS = ("worker_nodes", "server_nodes", "master_node", "virtualenv", "username", "pem_file")
"""Keys of the original's cluster file."""


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of ``a,user@b:2,[fe80::1]:4``: names, each with its number of workers after a colon."""
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise ConfigError("--hosts names no host; write for example --hosts node1,node2:2")
    if not all(words):
        raise ConfigError(f"--hosts {text!r} has an empty place between its commas")
    return check_hosts(tuple(_parse_word(word) for word in words), "--hosts")


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts of a file: ``host slots=n`` lines, the original's ``id ip port``, JSON, or TOML."""
    path = Path(path)
    if path.suffix in (".json", ".toml"):
        return read_cluster_file(path).hosts
    text = _read(path)
    if text.lstrip().startswith("{"):
        return parse_cluster(_load_json(text, path), str(path)).hosts
    return parse_hostfile(text, str(path))


def parse_hostfile(text: str, source: str = "host file") -> tuple[Host, ...]:
    """Return the hosts of a host file's lines; ``#`` starts a comment."""
    numbered = [(number, line.split("#")[0].split()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, words) for number, words in numbered if words]
    if not lines:
        raise ConfigError(f"{source} names no host; write a line for each, such as `node1 slots=2`")
    if all(_is_original(words) for _, words in lines):
        return _parse_original(lines, source)
    hosts = []
    for number, words in lines:
        if _is_original(words):
            raise ConfigError(f"{source}:{number}: {' '.join(words)!r} is `id ip port`, but other lines are not")
        hosts.append(_parse_line(words, f"{source}:{number}"))
    return check_hosts(tuple(hosts), source)


def read_cluster_file(path: str | Path) -> ClusterFile:
    """Return the content of a ``.json`` or ``.toml`` cluster file, checked."""
    return parse_cluster(load_cluster_data(path), str(path))


def load_cluster_data(path: str | Path) -> Any:
    """Return the data in a ``.json`` or ``.toml`` file, unchecked."""
    path = Path(path)
    text = _read(path)
    return _load_toml(text, path) if path.suffix == ".toml" else _load_json(text, path)


def parse_cluster(data: Any, source: str = "cluster file") -> ClusterFile:
    """Return the hosts and settings in a cluster file's data, in our form or the original's."""
    if not isinstance(data, dict) or not ("hosts" in data or "worker_nodes" in data):
        raise ConfigError(f"{source} has no `hosts` (and no `worker_nodes`); write {{'hosts': ['node1', 'node2:2']}}")
    if "worker_nodes" in data:
        return _parse_worker_nodes(data, source)
    defaults = {key: value for key, value in data.items() if key in _DEFAULT_KEYS}
    settings = {key: value for key, value in data.items() if key not in _DEFAULT_KEYS and key != "hosts"}
    entries = data["hosts"]
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{source}: hosts is {entries!r}; it must be a list that names at least one")
    hosts = tuple(_parse_entry(entry, defaults, source) for entry in entries)
    return ClusterFile(check_hosts(hosts, source), settings)


def check_hosts(hosts: tuple[Host, ...], source: str) -> tuple[Host, ...]:
    """Return the hosts, or raise if one is named twice."""
    seen: set[tuple[str, int | None]] = set()
    for host in hosts:
        # Several ssh servers behind one address are several machines.
        place = (host.address, host.port)
        if place in seen:
            raise ConfigError(
                f"{source} names {host.name} twice; write it once, with slots for its workers: {host.name}:2"
            )
        seen.add(place)
    return hosts


def _parse_word(word: str) -> Host:
    return Host(**_values_of(word))


def _values_of(word: str) -> dict[str, Any]:
    """Return the parts of ``user@name:slots`` that are given."""
    match = re.fullmatch(r"(?:([^@]+)@)?(\[[^\]]+\]|[^:]+)(?::(.*))?", word)
    bare = word.rpartition("@")[2]
    if _is_new_address(bare):
        raise ConfigError(f"host {word!r}: write an IPv6 address in brackets, [{bare}] or [{bare}]:WORKERS")
    if match is None:
        raise ConfigError(f"host {word!r} is not understood; write NAME, NAME:WORKERS or USER@NAME:WORKERS")
    user, name, slots = match.groups()
    if slots is not None and not is_number(slots):
        raise ConfigError(f"host {word!r}: {slots!r} after the colon is not a number of workers")
    values: dict[str, Any] = {"name": name.strip("[]")}
    if slots is not None:
        values["slots"] = int(slots)
    if user is not None:
        values["user"] = user
    return values


def _is_new_address(word: str) -> bool:
    """Return whether a word is an IPv6 address."""
    try:
        return ipaddress.ip_address(word.partition("%")[0]).version == 6
    except ValueError:
        return False


def split_port(node: str) -> tuple[str, str]:
    """Return the name and the port, perhaps empty, of ``name:port``, ``[::1]:port`` or ``::1``."""
    if _is_new_address(node):
        return node, ""
    match = re.fullmatch(r"\[([^\]]+)\](?::(.*))?", node)
    if match is not None:
        return match[1], match[2] or ""
    name, _, port = node.partition(":")
    return name, port


def is_number(word: str) -> bool:
    """Return whether a word is a whole number that is worth reading: ``int`` refuses endless ones."""
    return word.isascii() and word.isdigit() and len(word) < 20


def _parse_line(words: Sequence[str], where: str) -> Host:
    host = _parse_word(words[0])
    for word in words[1:]:
        key, equals, value = word.partition("=")
        known = tuple(name for name in _HOST_KEYS if name not in ("name", "env"))
        if not equals or key not in known:
            raise ConfigError(
                f"{where}: {word!r} is not understood; a host's name may be followed by "
                f"{', '.join(f'{name}=...' for name in known)}"
            )
        if key in _WORDS and not is_number(value):
            raise ConfigError(f"{where}: {word!r}: {key} must be a whole number")
        host = _changed(host, {key: _WORDS.get(key, str)(value)})
    return host


def _is_original(words: Sequence[str]) -> bool:
    return len(words) == 3 and is_number(words[0]) and is_number(words[2])


def _parse_original(lines: Sequence[tuple[int, Sequence[str]]], source: str) -> tuple[Host, ...]:
    found: dict[int, Host] = {}
    for number, words in lines:
        identity = int(words[0])
        if identity in found:
            raise ConfigError(f"{source}:{number}: id {identity} is already that of {found[identity].name}")
        found[identity] = Host(words[1], service_port=int(words[2]))
    return check_hosts(tuple(found[identity] for identity in sorted(found)), source)


def _parse_entry(entry: Any, defaults: Mapping[str, Any], source: str) -> Host:
    if isinstance(entry, str):
        entry = _values_of(entry)
    if not isinstance(entry, dict) or "name" not in entry:
        raise ConfigError(f"{source}: host {entry!r} is neither a string nor a table with a name")
    unknown = sorted(set(entry) - set(_HOST_KEYS))
    if unknown:
        raise ConfigError(
            f"{source}: host {entry['name']}: unknown {', '.join(unknown)}; known: {', '.join(_HOST_KEYS)}"
        )
    merged = {**defaults, **entry}
    if isinstance(defaults.get("env"), dict) and isinstance(entry.get("env"), dict):
        merged["env"] = {**defaults["env"], **entry["env"]}
    return _changed(Host(str(entry["name"])), merged, source)


def _changed(host: Host, values: Mapping[str, Any], source: str = "") -> Host:
    for key, value in values.items():
        kind: type = _WORDS.get(key, dict if key == "env" else str)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ConfigError(f"{source}: host {host.name}: {key} is {value!r}; it must be of type {kind.__name__}")
    changes = dict(values)
    if "env" in changes:
        changes["env"] = tuple((str(name), str(text)) for name, text in changes["env"].items())
    return replace(host, **changes)


def _parse_worker_nodes(data: Mapping[str, Any], source: str) -> ClusterFile:
    nodes = data["worker_nodes"]
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, str) for node in nodes):
        raise ConfigError(f"{source}: worker_nodes is {nodes!r}; it must be a list of addresses")
    python = str(Path(str(data["virtualenv"])) / "bin" / "python") if data.get("virtualenv") else ""
    hosts: dict[str, Host] = {}
    for node in nodes:
        name, port = split_port(node)
        if port and not is_number(port):
            raise ConfigError(f"{source}: worker node {node!r} is neither an address nor address:port")
        if name in hosts:
            # Each entry is a worker; a machine named again runs one more.
            hosts[name] = replace(hosts[name], slots=hosts[name].slots + 1)
            continue
        user, key = str(data.get("username", "")), str(data.get("pem_file", ""))
        hosts[name] = Host(name, user=user, identity=key, python=python, service_port=int(port) if port else None)
    master = split_port(str(data.get("master_node") or ""))[0]
    # Workers meet where the original's master ran, if that is a worker's host: it comes first.
    ordered = sorted(hosts.values(), key=lambda host: host.name != master)
    settings = {key: value for key, value in data.items() if key not in ORIGINAL_KEYS}
    return ClusterFile(check_hosts(tuple(ordered), source), settings)


def _read(path: Path) -> str:
    return files.read_text(path, "host file")


def _load_json(text: str, path: Path) -> Any:
    return files.parse_json(text, str(path))


def _load_toml(text: str, path: Path) -> Any:
    try:
        # By name: the oldest supported Python has no such module.
        toml = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise ConfigError(f"{path}: TOML needs Python 3.11 or newer; write the same as JSON") from None
    try:
        return toml.loads(text)
    except RecursionError:
        raise ConfigError(f"{path} is not usable TOML: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
