"""Asks the probes of all hosts, then lets pairs of hosts measure their links, round by round.

It decides which questions to ask, in which order and with which deadline; the checks decide what the answers mean.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from poseidon.doctor.asking import Conversation, LostProbeError, NoProbeError, start
from poseidon.doctor.choosing import choose_address
from poseidon.doctor.cluster_checks import check_cluster
from poseidon.doctor.facts import HostReport, PairFacts, host_from_json
from poseidon.doctor.findings import Finding, error, in_order
from poseidon.doctor.host_checks import check_host
from poseidon.doctor.listening import TOKEN_BYTES
from poseidon.doctor.pair_checks import broken_links, check_pairs, packet_sizes, sluggish_links
from poseidon.doctor.ports import ports_to_try
from poseidon.doctor.rounds import pair_rounds
from poseidon.doctor.ssh_checks import check_start
from poseidon.launch.hosts import Host
from poseidon.launch.ssh import SshSettings

T = TypeVar("T")
R = TypeVar("R")

_ANSWER_S = 20.0
_MOST_AT_ONCE = 64
_MORE_LOOKS = 2
"""How often a link that looks bad is measured again: a busy moment is not a finding."""


@dataclass(frozen=True)
class ExaminationOptions:
    """What to try, and for how long."""

    ports: tuple[int, ...] = (29500,)
    """Where workers may meet; tried on every host."""
    seconds: float = 0.5
    """How long each stream is measured."""
    streams: int = 4
    """Number of streams of the second measurement."""
    start_s: float = 60.0
    """How long a host has to start its probe, and again to load torch and report."""


@dataclass(frozen=True)
class Examination:
    """The complete result."""

    hosts: tuple[HostReport, ...]
    """Hosts whose probe answered."""
    pairs: tuple[PairFacts, ...]
    findings: tuple[Finding, ...]
    """Worst first."""


@dataclass(frozen=True)
class _Patient:
    """A host under examination, and its answers so far."""

    conversation: Conversation
    report: HostReport

    @property
    def name(self) -> str:
        return self.report.name


def examine(
    hosts: Sequence[Host],
    options: ExaminationOptions,
    settings: SshSettings | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Ask every host and measure every pair; ``tell`` is called with the current activity."""
    settings = settings or SshSettings.from_environment()
    # ssh gives up before we do, so that it can report why.
    settings = replace(settings, connect_timeout_s=min(settings.connect_timeout_s, max(1, int(options.start_s / 2))))
    lost: dict[str, Finding] = {}
    with contextlib.ExitStack() as stack:
        tell(f"asking {len(hosts)} host{'s' * (len(hosts) > 1)}")
        begun = _each(hosts, lambda host: _begin(stack, host, options, settings), lost)
        patients = _each(begun, lambda one: _look_at(one, options), lost)
        patients = [_with_address(one, patients) for one in patients]
        pairs = _measure_pairs(patients, options, tell, lost)
        for conversation in begun:
            conversation.hang_up()
    reports = tuple(one.report for one in patients)
    is_alone = len(hosts) == 1
    found = [*lost.values(), *(finding for report in reports for finding in check_host(report, is_alone))]
    found += [*check_cluster(reports), *check_pairs(reports, pairs)]
    return Examination(reports, tuple(pairs), tuple(in_order(found)))


def _begin(stack: contextlib.ExitStack, host: Host, options: ExaminationOptions, settings: SshSettings) -> Conversation:
    try:
        conversation = stack.enter_context(start(host, settings))
    except OSError as problem:
        raise NoProbeError(host, 127, str(problem)) from problem
    conversation.greet(options.start_s)
    return conversation


def _look_at(conversation: Conversation, options: ExaminationOptions) -> _Patient:
    host = conversation.host
    details = {"directory": host.directory or str(Path.cwd()), "slots": host.slots, "env": dict(host.env)}
    facts = host_from_json(conversation.ask("facts", options.start_s, **details))
    clock = conversation.read_clock(_ANSWER_S)
    report = HostReport(
        name=host.name,
        facts=facts,
        slots=host.slots,
        clock=clock,
        wanted_interface=host.interface,
        is_local=conversation.is_local,
    )
    return _Patient(conversation, report)


def _with_address(one: _Patient, patients: Sequence[_Patient]) -> _Patient:
    """Choose the address at which the other hosts reach this one."""
    others = [other for other in patients if other is not one]
    peers = [other.report.facts.ssh_server or other.conversation.host.address for other in others]
    towards: list[str] = []
    if one.conversation.is_local and peers:
        with contextlib.suppress(LostProbeError):
            towards = one.conversation.ask("towards", _ANSWER_S, peers=peers)
    report = one.report
    address = choose_address(report.facts, report.wanted_interface, one.conversation.host.address, towards)
    return replace(one, report=replace(report, address=address))


def _measure_pairs(
    patients: Sequence[_Patient], options: ExaminationOptions, tell: Callable[[str], None], lost: dict[str, Finding]
) -> list[PairFacts]:
    token = secrets.token_hex(TOKEN_BYTES)
    # Without an interface there is nothing to listen on; a probe never listens on all of them.
    able = [one for one in patients if one.report.interface is not None] if len(patients) > 1 else []
    listening = dict(_each(able, lambda one: (one.name, _listen(one, options, token)), lost))
    ready = {one.name: one for one in patients if one.name in listening}
    found: dict[tuple[str, str], PairFacts] = {}
    wanted = set(itertools.permutations(ready, 2))

    def measure(pair: tuple[str, str]) -> None:
        for source, target in (pair, pair[::-1]):
            if (source, target) in wanted:
                heard = {**listening[target], "token": token}
                seen = _measure(ready[source], ready[target], heard, options)
                found[source, target] = found[source, target].better(seen) if (source, target) in found else seen

    for look in range(1 + _MORE_LOOKS):
        rounds = [[pair for pair in pairs if {pair, pair[::-1]} & wanted] for pairs in pair_rounds(list(ready))]
        for number, pairs in enumerate(rounds, 1):
            if pairs:
                tell(f"measuring links: {'again, ' * bool(look)}round {number} of {len(rounds)}")
                _each(pairs, measure, lost)
        # A busy moment affects speed for longer than connectivity.
        wanted = sluggish_links(list(found.values())) | (set() if look else broken_links(list(found.values())))
    return list(found.values())


def _listen(one: _Patient, options: ExaminationOptions, token: str) -> Mapping[str, Any]:
    service = one.conversation.host.service_port
    rendezvous = options.ports if service is None else (*options.ports, service)
    ports = ports_to_try(rendezvous, one.report.facts.ephemeral_ports)
    answer: Mapping[str, Any] = one.conversation.ask(
        "listen", _ANSWER_S, address=one.report.address, ports=ports, token=token
    )
    return answer


def _measure(
    source: _Patient, target: _Patient, listening: Mapping[str, Any], options: ExaminationOptions
) -> PairFacts:
    cards = (source.report.interface, target.report.interface)
    mtus = [card.mtu for card in cards if card is not None and card.mtu]
    bulk_port = int(listening["bulk_port"])
    found = source.conversation.ask(
        "measure",
        # Every step of a measurement has its own deadline; this one is for a host that is gone.
        60.0 + 4 * options.seconds,
        address=target.report.address,
        token=listening["token"],
        bulk_port=bulk_port,
        ports=[port for port in listening["ports"] if port != bulk_port],
        packets=packet_sizes(min(mtus, default=1500), max(mtus, default=1500)),
        seconds=options.seconds,
        streams=options.streams,
    )
    ports = {int(port): outcome for port, outcome in [*found.pop("ports").items(), *listening["failed"].items()]}
    packets = {int(size): arrived for size, arrived in found.pop("packets", {}).items()}
    return PairFacts(source.name, target.name, ports=ports, packets=packets, **found)


def _each(things: Iterable[T], do: Callable[[T], R], lost: dict[str, Finding]) -> list[R]:
    """Apply ``do`` to all things concurrently; a failure is dropped from the result and becomes a finding."""

    def attempt(thing: T) -> R | None:
        try:
            return do(thing)
        except NoProbeError as problem:
            lost[problem.host.name] = check_start(problem.host, problem.status, problem.stderr)
        except LostProbeError as problem:
            lost.setdefault(problem.host.name, _lost_probe(problem))
        return None

    with ThreadPoolExecutor(_MOST_AT_ONCE, "doctor") as pool:
        return [result for result in pool.map(attempt, things) if result is not None]


def _lost_probe(problem: LostProbeError) -> Finding:
    return error(
        problem.host.name,
        "probe",
        str(problem),
        "a host that keeps answering",
        f"check whether it is up, busy or out of memory: ssh {problem.host.address} uptime",
    )
