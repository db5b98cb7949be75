"""Connects the workers of a team by the wire; they exchange addresses over the team's mesh."""

from __future__ import annotations

import os
from collections.abc import Sequence

from poseidon.errors import ConfigError, WireError
from poseidon.planning.cluster import Link
from poseidon.team.team import Team
from poseidon.wire.address import default_place
from poseidon.wire.settings import WireSettings, suited_to
from poseidon.wire.tcp import TcpTransport


def connect_wire(
    team: Team,
    members: Sequence[int],
    settings: WireSettings | None = None,
    link: Link | None = None,
    route: str = "",
) -> TcpTransport:
    """Return this worker's transport among ``members`` (ranks in the team, itself included). Collective in the team.

    Ranks of the transport are positions in ``members``. Without ``settings``, they come from the environment, with
    defaults that suit ``link``. ``route``: what its bytes are counted as; empty: the caller counts them.
    """
    if settings is None:
        suited = {} if link is None else suited_to(link.bytes_per_s, peers=len(members) - 1)
        settings = WireSettings.from_environment(os.environ, **default_place(), **suited)
    if team.encrypts and not settings.encrypt:
        raise ConfigError(
            f"rank {team.rank} would open connections that are not encrypted in a job that encrypts "
            "(POSEIDON_WIRE_ENCRYPT); give WireSettings encrypt=True too"
        )
    transport = TcpTransport(members.index(team.rank), len(members), team.secret, settings)
    try:
        addresses = team.gather_json(transport.address)
        transport.connect([addresses[member] for member in members])
    except WireError as error:
        transport.close()
        peer = None if error.peer is None else members[error.peer]
        raise team.watch.lost("the wire's connections", peer, error) from error
    except BaseException:
        transport.close()
        raise
    transport.route = route
    team.meter(transport.sent_by_route, transport.waiting)
    return transport
