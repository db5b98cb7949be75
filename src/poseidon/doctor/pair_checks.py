"""Judges the measured links and finds the host to blame. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from poseidon.doctor.blame import blame
from poseidon.doctor.facts import BUSY, OPEN, HostReport, PairFacts
from poseidon.doctor.findings import Finding, error, warning
from poseidon.doctor.ports import opening_command
from poseidon.doctor.speed_checks import (
    check_latencies,
    check_rates,
    far_links,
    needs_several_streams,
    slow_links,
)


def check_pairs(hosts: Sequence[HostReport], pairs: Sequence[PairFacts]) -> list[Finding]:
    """Return the problems of the links between hosts."""
    by_name = {host.name: host for host in hosts}
    return [
        *_check_ports(by_name, pairs),
        *_check_bulk(by_name, pairs),
        *check_rates(by_name, pairs),
        *check_latencies(pairs),
    ]


def broken_links(pairs: Sequence[PairFacts]) -> set[tuple[str, str]]:
    """Return the links on which something does not get through."""
    return {
        (pair.source, pair.target)
        for pair in pairs
        if any(outcome not in (OPEN, BUSY) for outcome in pair.ports.values())
        or not all(pair.packets.values())
        or pair.is_stuck
    }


def sluggish_links(pairs: Sequence[PairFacts]) -> set[tuple[str, str]]:
    """Return the links on which everything gets through, but too slowly."""
    narrow = {(pair.source, pair.target) for pair in pairs if needs_several_streams(pair)}
    return (narrow | far_links(pairs) | set(slow_links(pairs))) - broken_links(pairs)


def packet_sizes(first_mtu: int, second_mtu: int) -> tuple[int, ...]:
    """Return the packet sizes to try between two interfaces: their MTU, and what tunnels leave of it."""
    promised = min(first_mtu, second_mtu, 9000)
    usual = (1280, 1400, 1450, 1492, 1500, 4000, 8000)
    return tuple(sorted({promised, *(size for size in usual if size < promised)}))


def _check_ports(hosts: Mapping[str, HostReport], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    links = [(pair.source, pair.target) for pair in pairs]
    blocked: dict[tuple[str, str], dict[int, str]] = {}
    for pair in pairs:
        closed = {port: outcome for port, outcome in pair.ports.items() if outcome not in (OPEN, BUSY)}
        if closed:
            blocked[pair.source, pair.target] = closed
    yield from _check_busy(pairs)
    if len(blocked) == len(links) > 2:
        yield _blocked_everywhere(hosts, blocked)
        return
    incoming, outgoing = blame(list(blocked), links)
    for name in sorted(incoming):
        mine = {link: closed for link, closed in blocked.items() if link[1] == name}
        yield _blocked_at(hosts, name, mine)
    for name in sorted(outgoing - incoming):
        mine = {link: closed for link, closed in blocked.items() if link[0] == name and link[1] not in incoming}
        others = ", ".join(link[1] for link in mine)
        yield error(
            name,
            "ports",
            f"{name} cannot reach any other host: {_outcomes(mine)} at {others}",
            "connections to every port of the other hosts",
            f"check the rules for outgoing connections on {name}: sudo iptables -S OUTPUT; sudo nft list ruleset",
        )
    for (source, target), closed in blocked.items():
        if target not in incoming and source not in outgoing:
            yield _blocked_link(hosts, source, target, closed)


def _check_busy(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    busy = {(pair.target, port) for pair in pairs for port, outcome in pair.ports.items() if outcome == BUSY}
    for name, port in sorted(busy):
        yield warning(
            name,
            "ports",
            f"another program listens at port {port}",
            "a free port where workers meet",
            f"sudo ss -ltnp 'sport = :{port}'",
        )


def _blocked_everywhere(
    hosts: Mapping[str, HostReport], blocked: Mapping[tuple[str, str], Mapping[int, str]]
) -> Finding:
    addresses = [host.address for host in hosts.values()]
    return error(
        hosts,
        "ports",
        f"no host reaches {_outcomes(blocked)} of any other",
        "connections both ways to any port: workers meet and exchange there",
        f"on every host: {opening_command(next(iter(hosts.values())).facts.firewall, addresses)}",
    )


def _blocked_at(
    hosts: Mapping[str, HostReport], name: str, blocked: Mapping[tuple[str, str], dict[int, str]]
) -> Finding:
    sources = [link[0] for link in blocked]
    return error(
        name,
        "ports",
        f"no other host reaches {_outcomes(blocked)}",
        "connections from every other host to any port: workers meet and exchange there",
        f"on {name}: {opening_command(hosts[name].facts.firewall, [hosts[source].address for source in sources])}",
    )


def _blocked_link(hosts: Mapping[str, HostReport], source: str, target: str, closed: Mapping[int, str]) -> Finding:
    return error(
        (target, source),
        "ports",
        f"{source} does not reach {_outcomes({(source, target): closed})} of {target}",
        "connections both ways to any port: workers meet and exchange there",
        f"on {target}: {opening_command(hosts[target].facts.firewall, [hosts[source].address])}",
    )


def _outcomes(blocked: Mapping[tuple[str, str], Mapping[int, str]]) -> str:
    """Write ``ports 29500, 36789 (timed out)``."""
    by_outcome: dict[str, set[int]] = {}
    for closed in blocked.values():
        for port, outcome in closed.items():
            by_outcome.setdefault(outcome, set()).add(port)
    return "; ".join(
        f"port{'s' * (len(ports) > 1)} {', '.join(map(str, sorted(ports)))} ({outcome})"
        for outcome, ports in by_outcome.items()
    )


def _check_bulk(hosts: Mapping[str, HostReport], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Find packets that vanish because of their size: such a network seems to work until the first gradient."""
    for pair in pairs:
        lost = [size for size, arrived in pair.packets.items() if not arrived]
        link = f"from {pair.source} to {pair.target}"
        card = hosts[pair.source].interface
        if lost and pair.path_mtu is not None:
            name = card.name if card is not None else "NAME"
            # If streams flow nevertheless, something limits their packets, and only datagrams suffer.
            say = error if pair.is_stuck else warning
            yield say(
                (pair.source, pair.target),
                "path-mtu",
                f"packets above {pair.path_mtu} bytes vanish {link} (tried {', '.join(map(str, sorted(lost)))})",
                f"packets of {max(lost)} bytes, the MTU of both interfaces, or a smaller MTU",
                f"on {pair.source} and {pair.target}: sudo ip link set {name} mtu {pair.path_mtu}"
                "  (or allow larger frames on the switch)",
            )
        elif pair.is_stuck:
            yield error(
                (pair.source, pair.target),
                "bulk",
                f"connections open {link}, but data does not get through: {pair.stream_error}",
                "a steady stream",
                f"on {pair.source}: ping -c 20 -s 1400 {hosts[pair.target].address}",
            )
