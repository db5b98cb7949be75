"""A finding: what is wrong, where, what is expected, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class Severity(str, Enum):
    """How serious a finding is."""

    ERROR = "error"
    """Training would not start, would hang, or would be wrong."""
    WARNING = "warning"
    """Training works, but is slower or less reproducible than it could be."""


@dataclass(frozen=True)
class Finding:
    """One problem."""

    severity: Severity
    hosts: tuple[str, ...]
    """The host to blame; both ends of a link if either may be."""
    check: str
    """Name of the check; equal for all findings of a kind."""
    seen: str
    expected: str
    fix: str
    """A command, or a sentence if no command helps."""


def error(hosts: str | Iterable[str], check: str, seen: str, expected: str, fix: str) -> Finding:
    """Return a finding that prevents training."""
    return Finding(Severity.ERROR, _names(hosts), check, seen, expected, fix)


def warning(hosts: str | Iterable[str], check: str, seen: str, expected: str, fix: str) -> Finding:
    """Return a finding that does not prevent training."""
    return Finding(Severity.WARNING, _names(hosts), check, seen, expected, fix)


def would_train(findings: Iterable[Finding]) -> bool:
    """Return whether none of the findings prevents training."""
    return all(finding.severity is not Severity.ERROR for finding in findings)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with errors first, otherwise in their order."""
    return sorted(findings, key=lambda finding: finding.severity is not Severity.ERROR)


def _names(hosts: str | Iterable[str]) -> tuple[str, ...]:
    return (hosts,) if isinstance(hosts, str) else tuple(hosts)
