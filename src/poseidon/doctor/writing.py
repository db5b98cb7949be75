"""Formats the examination for people (tables, then problems and their fixes) and as JSON. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from poseidon.doctor.conduct import Examination
from poseidon.doctor.facts import OPEN, HostReport, PairFacts, to_json
from poseidon.doctor.findings import Finding, Severity, would_train
from poseidon.planning.cluster import format_rate
from poseidon.planning.table import format_bytes, format_table

_HOST_HEADER = (
    "host", "address", "card", "speed", "mtu", "python", "poseidon", "torch", "cpu", "threads", "memory", "disk",
    "gpus", "clock",
)  # fmt: skip
_PAIR_HEADER = ("from", "to", "latency", "1 stream", "streams", "packets", "ports")
_MOST_PAIRS = 30
_UNKNOWN = "-"
_WIDTH = 116


def format_examination(examination: Examination) -> str:
    """Return tables of hosts and links, every finding with its fix, and the verdict."""
    parts = []
    if examination.hosts:
        parts.append(format_table(_HOST_HEADER, [_host_row(host) for host in examination.hosts]))
    if examination.pairs:
        parts.append(_format_pairs(examination.pairs))
    parts += [_format_finding(finding) for finding in examination.findings]
    parts.append(verdict(examination.findings))
    return "\n\n".join(parts)


def verdict(findings: Sequence[Finding]) -> str:
    """Return one line that says whether training would work."""
    errors = sum(finding.severity is Severity.ERROR for finding in findings)
    warnings = len(findings) - errors
    if errors:
        return f"training would not work: {_count(errors, 'error')}, {_count(warnings, 'warning')}"
    return (
        f"training would work: {_count(warnings, 'warning')}" if warnings else "training would work: no problems found"
    )


def examination_to_json(examination: Examination) -> dict[str, Any]:
    """Return the examination as plain data."""
    return {
        "would_train": would_train(examination.findings),
        "hosts": [to_json(host) for host in examination.hosts],
        "pairs": [{**to_json(pair), "path_mtu": pair.path_mtu} for pair in examination.pairs],
        "findings": [{**to_json(one), "severity": one.severity.value} for one in examination.findings],
    }


def _host_row(host: HostReport) -> tuple[str, ...]:
    facts, card = host.facts, host.interface
    return (
        host.name,
        host.address or _UNKNOWN,
        card.name if card else _UNKNOWN,
        format_rate(card.speed_mbit * 1e6) if card and card.speed_mbit else _UNKNOWN,
        str(card.mtu) if card else _UNKNOWN,
        facts.python or _UNKNOWN,
        facts.poseidon or _UNKNOWN,
        facts.torch or _UNKNOWN,
        facts.cpu_capability or _UNKNOWN,
        f"{facts.threads}/{facts.cores}",
        f"{format_bytes(facts.free_memory_bytes)}",
        f"{format_bytes(facts.free_disk_bytes)}",
        f"{len(facts.gpus)} x {facts.gpus[0].name}" if facts.gpus else "none",
        "here" if host.is_local else f"{host.clock.ahead_s * 1e3:+.0f} ms",
    )


def _format_pairs(pairs: Sequence[PairFacts]) -> str:
    shown = sorted(pairs, key=lambda pair: (pair.source, pair.target))
    note = ""
    if len(shown) > _MOST_PAIRS:
        shown = sorted(pairs, key=lambda pair: pair.best_bits_per_s or 0.0)[:_MOST_PAIRS]
        note = f"\n({len(pairs)} links, the {_MOST_PAIRS} slowest shown; --json has all)"
    return format_table(_PAIR_HEADER, [_pair_row(pair) for pair in shown]) + note


def _pair_row(pair: PairFacts) -> tuple[str, ...]:
    is_open = [outcome == OPEN for outcome in pair.ports.values()]
    return (
        pair.source,
        pair.target,
        _UNKNOWN if pair.latency_s is None else f"{pair.latency_s * 1e6:.0f} us",
        _UNKNOWN if pair.one_stream_bits_per_s is None else format_rate(pair.one_stream_bits_per_s),
        _UNKNOWN if pair.many_stream_bits_per_s is None else format_rate(pair.many_stream_bits_per_s),
        _UNKNOWN if pair.path_mtu is None else str(pair.path_mtu),
        "open" if all(is_open) else f"{sum(is_open)} of {len(is_open)} open",
    )


def _format_finding(finding: Finding) -> str:
    lines = (
        f"{finding.severity.value}: {', '.join(finding.hosts)}: {finding.check}",
        f"  seen:     {finding.seen}",
        f"  expected: {finding.expected}",
        # Not wrapped, so that it can be copied.
        f"  fix:      {finding.fix}",
    )
    wrapped = [textwrap.fill(line, _WIDTH, subsequent_indent=" " * 12, break_long_words=False) for line in lines[:3]]
    return "\n".join([*wrapped, lines[3]])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
