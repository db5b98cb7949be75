"""Which ports to try, and how to open them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from poseidon.errors import ConfigError

MOST_PORTS = 16
"""How many ports of a range to try: firewalls open whole ranges."""


def parse_ports(text: str) -> tuple[int, ...]:
    """Return the ports of ``29500``, ``29500-29520`` or several of these with commas; of many, an even sample."""
    ports: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"ports {text!r} are not understood; write 29500, 29500-29520 or both with a comma")
        low, high = int(first), int(last if dash else first)
        if not 0 < low <= high < 65536:
            raise ConfigError(
                f"ports {word.strip()!r} are not a range of ports; write the lower one first, from 1 to 65535"
            )
        ports.extend(range(low, high + 1))
    return spread(ports, MOST_PORTS)


def spread(values: Sequence[int], count: int) -> tuple[int, ...]:
    """Return at most ``count`` of the values, evenly spread, including the first and the last."""
    if len(values) <= count:
        return tuple(dict.fromkeys(values))
    return tuple(values[round(index * (len(values) - 1) / (count - 1))] for index in range(count))


def ports_to_try(rendezvous: Iterable[int], ephemeral: tuple[int, int]) -> tuple[int, ...]:
    """Return the ports of a host that others must reach: where workers meet, and some that the system assigns.

    gloo, NCCL and Poseidon's own channels use ports that the system assigns, so the whole range must be open.
    """
    low, high = ephemeral
    # Well inside the range, where a port is least likely to be taken.
    inside = (low + (high - low) // 7, low + (high - low) // 2, high - (high - low) // 7)
    return tuple(dict.fromkeys([*rendezvous, *inside]))


def opening_command(firewall: str, sources: Sequence[str]) -> str:
    """Return the command that opens a host's firewall for all traffic from ``sources``."""
    if firewall == "ufw":
        return " && ".join(f"sudo ufw allow from {source}" for source in sources)
    if firewall == "firewall-cmd":
        zone = " ".join(f"--add-source={source}" for source in sources)
        return f"sudo firewall-cmd --permanent --zone=trusted {zone} && sudo firewall-cmd --reload"
    if firewall == "nft":
        return f"sudo nft insert rule inet filter input ip saddr {{ {', '.join(sources)} }} accept"
    return f"sudo iptables -I INPUT -s {','.join(sources)} -j ACCEPT"
