"""Connects the workers of a team by the wire; they exchange addresses over the team's control channel."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from poseidon.errors import WireError
from poseidon.job.settings import SECRET
from poseidon.planning.cluster import Link
from poseidon.team.team import Team
from poseidon.wire.address import default_place
from poseidon.wire.settings import WireSettings, suited_to
from poseidon.wire.tcp import TcpTransport


def connect_wire(
    team: Team, members: Sequence[int], settings: WireSettings | None = None, link: Link | None = None
) -> TcpTransport:
    """Return this worker's transport among ``members`` (ranks in the team, itself included). Collective in the team.

    Ranks of the transport are positions in ``members``. Without ``settings``, they come from the environment, with
    defaults that suit ``link``.
    """
    if settings is None:
        suited = {} if link is None else suited_to(link.bytes_per_s, peers=len(members) - 1)
        settings = WireSettings.from_environment(os.environ, **default_place(), **suited)
    secret = _agree_on_secret(team)
    transport = TcpTransport(members.index(team.rank), len(members), secret, settings)
    try:
        addresses = team.gather_json(transport.address)
        transport.connect([addresses[member] for member in members])
    except WireError as error:
        transport.close()
        raise team.watch.lost("the wire's connections", None, error) from error
    except BaseException:
        transport.close()
        raise
    return transport


def _agree_on_secret(team: Team) -> bytes:
    given = SECRET.read()
    if all(row[0] for row in team.gather_ints([int(bool(given))], "the job's secret")):
        return given.encode()
    drawn: list[str] = team.gather_json(secrets.token_hex(32) if team.rank == 0 else "")
    return drawn[0].encode()
