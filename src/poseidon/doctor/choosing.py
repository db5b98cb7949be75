"""At which of its addresses do the other hosts meet a host? Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poseidon.doctor.facts import HostFacts


def choose_address(facts: HostFacts, interface: str, listed: str, towards: Sequence[str]) -> str:
    """Return the address, empty if the named interface has none.

    In order: that of the interface the user names, here or in ``GLOO_SOCKET_IFNAME`` there; the one in the list of
    hosts; the one at which ssh got in; the one from which the host itself would call the others (``towards``).
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
    # Without a network of its own a host still talks to itself.
    return next(iter([*outside, *(one.address for one in facts.interfaces)]), "")
