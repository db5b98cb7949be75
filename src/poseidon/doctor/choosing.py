"""Chooses the address at which the other hosts reach a host. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poseidon.doctor.facts import HostFacts


def choose_address(facts: HostFacts, interface: str, listed: str, towards: Sequence[str]) -> str:
    """Return the address, empty if the named interface has none.

    In order of preference: that of the interface named by the user, here or in ``GLOO_SOCKET_IFNAME`` there; the one in
    the list of hosts; the one that ssh reached; the source address of the host's route to the others (``towards``).
    """
    named = interface or facts.environment.get("GLOO_SOCKET_IFNAME", "")
    if named:
        own = (one.address for one in facts.interfaces if one.name == named)
        return next(own, "" if interface else _first(facts, ()))
    return _first(facts, (listed, facts.ssh_server, *towards))


def _first(facts: HostFacts, wanted: Iterable[str]) -> str:
    outside = [one.address for one in facts.interfaces if not one.is_loopback]
    for address in wanted:
        if address in outside:
            return address
    # Without a network a host can still talk to itself.
    return next(iter([*outside, *(one.address for one in facts.interfaces)]), "")
