"""Upgrade files of nets and solvers to the current form."""

from __future__ import annotations

import logging
import re
from pathlib import Path

from poseidon.caffe.schema import NetParameter, SolverParameter
from poseidon.caffe.schema.files import read_binary, read_text, write_binary, write_text
from poseidon.caffe.upgrade import upgrade_net, upgrade_solver
from poseidon.errors import ConfigError, unknown_name

log = logging.getLogger("poseidon.caffe")

KINDS = ("auto", "net_text", "net_binary", "solver_text")
_SOLVER_ONLY = set(SolverParameter.DESCRIPTOR.fields_by_name) - set(NetParameter.DESCRIPTOR.fields_by_name)


def upgrade_file(source: str, target: str, kind: str = "auto") -> bool:
    """Upgrade a net (text or binary) or a solver; return whether anything changed.

    The target is always written, as Caffe's tools do.
    """
    if kind not in KINDS:
        raise unknown_name("kind of file", kind, KINDS)
    kind = detect_kind(source) if kind == "auto" else kind
    proto: NetParameter | SolverParameter
    if kind == "solver_text":
        proto = read_text(source, SolverParameter)
        changed = upgrade_solver(proto, source)
    else:
        proto = (read_binary if kind == "net_binary" else read_text)(source, NetParameter)
        changed = upgrade_net(proto, source)
    if not changed:
        log.error("File already in latest proto format: %s", source)
    (write_binary if kind == "net_binary" else write_text)(target, proto)
    log.info("Wrote upgraded %s %s proto to %s", proto.DESCRIPTOR.name, kind.rpartition("_")[2], target)
    return changed


def detect_kind(source: str) -> str:
    """Return the kind of a file by its content: a binary net, or a net or solver in text form."""
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {source}: {error.strerror}") from None
    if b"\0" in content or not _is_text(content):
        return "net_binary"
    return "solver_text" if _top_level_fields(content.decode()) & _SOLVER_ONLY else "net_text"


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _top_level_fields(text: str) -> set[str]:
    """Return the names of the fields outside all braces."""
    bare = re.sub(r'#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', "", text)
    fields: set[str] = set()
    depth = 0
    for match in re.finditer(r"[{}]|(\w+)\s*(?=[:{])", bare):
        if match[1]:
            if depth == 0:
                fields.add(match[1])
        else:
            depth += 1 if match[0] == "{" else -1
    return fields
