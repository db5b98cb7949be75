"""The engine's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from poseidon.planning.lossy import LossyChoice
from poseidon.routes.feedback import Feedback


@dataclass(frozen=True)
class Options:
    """How the engine works; the front ends pass the user's choices."""

    bucket_bytes: int | None = None
    """Maximum bytes per item; None: each route's default."""
    keep_views: bool = False
    """Leave ``.grad`` as a view into its bucket (torch's gradient_as_bucket_view)."""
    allow_unused: bool = False
    """Some parameters may get no gradient in some steps (torch's find_unused_parameters)."""
    static_graph: bool = False
    """Every backward is like the first, which shows which parameters get gradients and how often each accumulates."""
    gather_factors: bool | None = None
    """Factors travel by a collective (True) or by direct messages (False); None: by a collective with NCCL."""
    routes: Mapping[str, str] | None = None
    """Routes the user forces, by unit name or pattern."""
    lossy: LossyChoice | None = None
    """Layers for which the user allows loss; ahead of ``routes``."""
    feedback: Feedback | None = None
    """What these layers keep from step to step; the caller's, because it outlives an engine. None: begin anew."""
    check_interval: int = 0
    """Steps between two comparisons of a part of the parameters with the other workers'; 0: none (``replicas.py``)."""
    defers: bool = False
    """Gradients may land after backward ends, each when it is first needed (``update.py``)."""
    serves: bool = False
    """The owners of the parameter server's chunks take the optimizer's step (``served.py``)."""
    tries: bool = False
    """Plans may be tried in training, and the fastest kept; the front end can change plans between any two steps."""
