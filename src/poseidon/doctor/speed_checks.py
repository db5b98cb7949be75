"""Judges the speed and latency of links. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

from poseidon.doctor.blame import blame
from poseidon.doctor.facts import HostReport, PairFacts
from poseidon.doctor.findings import Finding, warning
from poseidon.planning.cluster import format_rate

SLOW_SHARE = 0.5
"""A link below this share of the usual rate is slow."""
FAR_TIMES, FAR_MORE_S = 5.0, 0.002
"""A link is far if its latency exceeds the usual one by this factor and by this much."""
MOST_LATENCY_S = 0.005
Links = Mapping[tuple[str, str], float]


def slow_links(pairs: Sequence[PairFacts]) -> dict[tuple[str, str], float]:
    """Return the links much slower than usual, with their rates."""
    rates = _rates(pairs)
    least = SLOW_SHARE * _usual(rates, max) if rates else 0.0
    return {link: rate for link, rate in rates.items() if rate < least}


def far_links(pairs: Sequence[PairFacts]) -> set[tuple[str, str]]:
    """Return the links whose latency is far above the usual."""
    latencies = _latencies(pairs)
    usual = _usual(latencies, min) if latencies else 0.0
    return {link for link, one in latencies.items() if one > max(FAR_TIMES * usual, usual + FAR_MORE_S)}


def needs_several_streams(pair: PairFacts) -> bool:
    """Return whether one connection cannot fill the link."""
    one, many = pair.one_stream_bits_per_s, pair.many_stream_bits_per_s
    return one is not None and many is not None and one < SLOW_SHARE * many


def check_rates(hosts: Mapping[str, HostReport], pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Yield links and hosts that are slower than usual here, or than their cards' speed."""
    rates, slow = _rates(pairs), slow_links(pairs)
    if not rates:
        return
    incoming, outgoing = blame(list(slow), list(rates))
    for name in sorted(incoming | outgoing):
        way = "to and from" if name in incoming & outgoing else "to" if name in incoming else "from"
        own = format_rate(statistics.median(rate for link, rate in slow.items() if name in link))
        yield _slow([hosts[name]], f"every link {way} {name} is slow: {own}", rates)
    for (source, target), rate in slow.items():
        if target not in incoming and source not in outgoing:
            seen = f"the link from {source} to {target} is slow: {format_rate(rate)}"
            yield _slow([hosts[source], hosts[target]], seen, rates)
    yield from _check_cards({name: host for name, host in hosts.items() if name not in incoming | outgoing}, rates)
    yield from _check_single_streams(pairs, set(slow))


def _slow(hosts: Sequence[HostReport], seen: str, rates: Links) -> Finding:
    card = _card_name(hosts[0])
    return warning(
        [host.name for host in hosts],
        "slow-link",
        seen,
        f"about {format_rate(_usual(rates, max))}, as elsewhere: the slowest link sets the pace of the whole job",
        f"on {' and '.join(host.name for host in hosts)}: check cable, switch port and other traffic: "
        f"sudo ethtool {card}; ip -s link show {card}",
    )


def _check_cards(hosts: Mapping[str, HostReport], rates: Links) -> Iterator[Finding]:
    promised = {
        name: host.interface.speed_mbit * 1e6
        for name, host in hosts.items()
        if host.interface is not None and host.interface.speed_mbit
    }
    for name, speed in promised.items():
        # The slower of its two cards limits a link.
        shares = [
            rate / min(speed, promised.get(link[0], speed), promised.get(link[1], speed))
            for link, rate in rates.items()
            if name in link
        ]
        if shares and max(shares) < SLOW_SHARE:
            best = max(rate for link, rate in rates.items() if name in link)
            yield warning(
                name,
                "slow-link",
                f"its best link carries {format_rate(best)}",
                f"about {format_rate(speed)}, the speed of its card {_card_name(hosts[name])}",
                f"on {name}: ip -s link show {_card_name(hosts[name])}; look for other traffic and a slower switch",
            )


def _check_single_streams(pairs: Sequence[PairFacts], slow: set[tuple[str, str]]) -> Iterator[Finding]:
    for pair in pairs:
        one, many = pair.one_stream_bits_per_s, pair.many_stream_bits_per_s
        if one is None or many is None or (pair.source, pair.target) in slow or not needs_several_streams(pair):
            continue
        yield warning(
            (pair.source, pair.target),
            "one-stream",
            f"{pair.source} to {pair.target}: one connection carries {format_rate(one)}, several {format_rate(many)}",
            "about the same: most of a job's traffic between two hosts goes over one connection",
            "on both: sudo sysctl -w net.core.rmem_max=67108864 net.core.wmem_max=67108864 "
            "net.ipv4.tcp_rmem='4096 131072 67108864' net.ipv4.tcp_wmem='4096 65536 67108864'",
        )


def check_latencies(pairs: Sequence[PairFacts]) -> Iterator[Finding]:
    """Yield links and hosts with a higher latency than the others, or all if none is low."""
    latencies = _latencies(pairs)
    if not latencies:
        return
    usual = _usual(latencies, min)
    far = far_links(pairs)
    incoming, outgoing = blame(sorted(far), list(latencies))
    for name in sorted(incoming & outgoing):
        own = statistics.median(latencies[link] for link in far if name in link)
        yield _far(name, f"every link of {name} takes {own * 1e3:.3g} ms", usual)
    for source, target in sorted(far):
        is_reported = (target, source) in far and target < source
        if not {source, target} & (incoming & outgoing) and not is_reported:
            yield _far((source, target), f"{source} to {target} takes {latencies[source, target] * 1e3:.3g} ms", usual)
    if usual > MOST_LATENCY_S:
        names = dict.fromkeys(name for link in latencies for name in link)
        yield _far(names, f"the hosts are {usual * 1e3:.3g} ms apart", 0.0002)


def _far(hosts: str | Sequence[str] | Mapping[str, None], seen: str, usual: float) -> Finding:
    return warning(
        hosts,
        "latency",
        seen,
        f"about {usual * 1e3:.2g} ms one way",
        "check the path for a wireless bridge, a tunnel or another site (traceroute ADDRESS)",
    )


def _rates(pairs: Sequence[PairFacts]) -> Links:
    return {(pair.source, pair.target): rate for pair in pairs if (rate := pair.best_bits_per_s) is not None}


def _latencies(pairs: Sequence[PairFacts]) -> Links:
    return {(pair.source, pair.target): one for pair in pairs if (one := pair.latency_s) is not None}


def _usual(links: Links, best: Callable[[list[float]], float]) -> float:
    """Return the median over hosts of each one's best link, which one bad host does not spoil."""
    names = dict.fromkeys(name for link in links for name in link)
    return statistics.median(best([value for link, value in links.items() if name in link]) for name in names)


def _card_name(host: HostReport) -> str:
    return host.interface.name if host.interface is not None else "NAME"
