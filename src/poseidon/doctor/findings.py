"""A finding: what is wrong, where, what it should be, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How much a finding matters."""

    ERROR = "error"
    """Training would not start, would hang, or would be wrong."""
    WARNING = "warning"
    """Training works, but slower, or not as reproducible as it could be."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    severity: Severity
    hosts: tuple[str, ...]
    """The host that is to blame; both ends of a link where it cannot be told which."""
    check: str
    """The name of the check, the same for every finding of its kind."""
    seen: str
    expected: str
    fix: str
    """A command, or a sentence where no command helps."""


def error(hosts: str | Iterable[str], check: str, seen: str, expected: str, fix: str) -> Finding:
    """Return a finding that keeps training from working."""
    return Finding(Severity.ERROR, _names(hosts), check, seen, expected, fix)


def warning(hosts: str | Iterable[str], check: str, seen: str, expected: str, fix: str) -> Finding:
    """Return a finding that training survives."""
    return Finding(Severity.WARNING, _names(hosts), check, seen, expected, fix)


def would_train(findings: Iterable[Finding]) -> bool:
    """Whether nothing was found that keeps training from working."""
    return all(finding.severity is not Severity.ERROR for finding in findings)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return the worst first, otherwise in the order they were found."""
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def _names(hosts: str | Iterable[str]) -> tuple[str, ...]:
    return (hosts,) if isinstance(hosts, str) else tuple(hosts)
