"""Finds the host that is to blame for bad links. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def blame(bad: Sequence[tuple[str, str]], links: Sequence[tuple[str, str]]) -> tuple[set[str], set[str]]:
    """Return the hosts to blame for bad incoming links, and those to blame for bad outgoing ones.

    A host is to blame in one direction if all its links in that direction are bad, there are at least two, and a host
    at the other end of one has a good link, so that the problem is not general.
    """
    good = set(links) - set(bad)
    able_to_send = {source for source, _ in good}
    able_to_receive = {target for _, target in good}
    incoming, outgoing = set(), set()
    for name in {name for link in links for name in link}:
        senders = [source for source, target in links if target == name]
        receivers = [target for source, target in links if source == name]
        if len(senders) > 1 and name not in able_to_receive and able_to_send & set(senders):
            incoming.add(name)
        if len(receivers) > 1 and name not in able_to_send and able_to_receive & set(receivers):
            outgoing.add(name)
    return incoming, outgoing
