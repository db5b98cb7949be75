"""Builds an engine for any front end: checks that all workers compute alike and finds the links' speeds."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from poseidon.engine.engine import Engine
from poseidon.engine.options import Options
from poseidon.errors import UnsupportedError
from poseidon.planning.cluster import Cluster
from poseidon.routes import standard_routes
from poseidon.routes.base import LiveUnit
from poseidon.team.calibrate import arithmetic_digest, find_cluster
from poseidon.team.team import Team


@dataclass(frozen=True)
class ExchangeOptions:
    """How workers exchange gradients: the user's choices in a front end other than PyTorch."""

    routes: Mapping[str, str] | None = None
    """Forced routes, by unit name or pattern."""
    cluster: Cluster | str | Path | None = None
    """Speeds of links and devices, or a file of them, instead of a measurement."""
    timeout_s: float | None = None
    """How long to wait for another worker; None: ``POSEIDON_TIMEOUT``."""


def assemble_engine(
    units: Sequence[LiveUnit],
    team: Team,
    device: torch.device,
    options: Options,
    cluster: Cluster | str | Path | None = None,
) -> Engine:
    """Make the engine. Collective.

    Workers that round matrix products differently would rebuild different gradients from the same factors. In that case
    no layer travels as factors, regardless of ``options``, and a warning is issued.
    """
    if not _computes_alike(team, device):
        if options.lossy is not None and any(way == "lowrank" for _, way in options.lossy.patterns):
            raise UnsupportedError(
                'lossy="lowrank" needs workers that round matrix products alike, and these do not, as the warning '
                'above says; use "int8" there'
            )
        linear = [unit.name for unit in units if unit.spec.kind in ("linear", "tied")]
        known = standard_routes()
        whole = next(iter(standard_routes(encrypts=team.encrypts)))
        asked = (options.routes or {}).items()
        wanted = {pattern: route for pattern, route in asked if "factors" not in known[route].delivers}
        options = dataclasses.replace(options, routes={**dict.fromkeys(linear, whole), **wanted})
    # Inside one machine, full gradients have only one route, whatever the speeds.
    needs_speeds = len(team.topology.machines) > 1 or any(unit.spec.kind != "dense" for unit in units)
    return Engine(units, team, find_cluster(team, device, cluster, needs_speeds), options)


def _computes_alike(team: Team, device: torch.device) -> bool:
    digests = [row[0] for row in team.gather_ints([arithmetic_digest(device)], "the arithmetic check")]
    if len(set(digests)) == 1:
        return True
    odd = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    warnings.warn(
        f"rank {odd} ({team.watch.hosts[odd]}) and rank 0 ({team.watch.hosts[0]}) round matrix products differently "
        "(other CPU, GPU, library or thread count); no layer travels as factors, so that replicas stay identical",
        stacklevel=3,
    )
    return False
