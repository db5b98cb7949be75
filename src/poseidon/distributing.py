"""``poseidon.distribute``: a model and its optimizer, with exchanges that run into the next forward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.api import DistributedDataParallel
from poseidon.engine.optimizers import check_max_norm, check_optimizer
from poseidon.engine.relaxed import RelaxedUpdates
from poseidon.engine.update import DeferredUpdates
from poseidon.errors import ConfigError, unknown_name
from poseidon.planning.cluster import Cluster
from poseidon.wire.settings import WireSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from typing_extensions import Unpack


class WrapperOptions(TypedDict, total=False):
    """What :func:`distribute` passes on to :class:`~poseidon.DistributedDataParallel`, which explains it."""

    device_ids: list[int | torch.device] | None
    output_device: int | torch.device | None
    broadcast_buffers: bool | None
    init_sync: bool
    process_group: dist.ProcessGroup | None
    bucket_cap_mb: float | None
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    routes: Mapping[str, str] | None
    cluster: Cluster | str | Path | None
    timeout_s: float
    gather_factors: bool | None
    forward_sync_buffers: bool | None
    managed: bool
    """Under ssp and asp: send updates early where the wire is idle, the largest relative change first."""
    settings: WireSettings | None
    """Under ssp and asp: how the tables' wire works."""


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    consistency: str = "bsp",
    staleness: int = 0,
    max_grad_norm: float | None = None,
    **options: Unpack[WrapperOptions],
) -> tuple[DistributedDataParallel, Optimizer]:
    """Train ``model`` on all workers; returns the wrapped model and the same optimizer object. Collective.

    With ``consistency="bsp"`` every step uses everybody's gradients, and ``optimizer.step()`` returns at once: each
    layer is updated when its gradient has arrived and its next use comes, so the exchange hides behind the next
    forward too. Reading a parameter, its ``.grad``, a ``state_dict()`` or the optimizer's state waits for just what it
    reads and sees a finished step. The parameters are bit for bit those of
    :class:`~poseidon.DistributedDataParallel` with the same options. Arrays made from a parameter earlier
    (``p.detach().numpy()``) share its memory and are not waited for.

    With ``"ssp"`` a worker may be ``staleness`` steps ahead of the slowest, with ``"asp"`` any number: nobody waits
    for a straggler, a worker that dies is reported and the others go on, and replicas differ by the updates they have
    not seen yet. ``engine/relaxed.py`` says how steps are taken then. Buffers (running statistics) are each worker's
    own after the first step, and ``close()`` waits for the other workers, which may need the parameters held here.

    ``max_grad_norm`` clips the norm of all gradients together (under ssp and asp: of the worker's own). The other
    options are those of :class:`~poseidon.DistributedDataParallel`; ssp and asp take ``timeout_s``, ``managed`` and
    ``settings`` of them.
    """
    check_optimizer(optimizer)
    check_max_norm(max_grad_norm)
    if consistency not in ("bsp", "ssp", "asp"):
        raise unknown_name("consistency", consistency, ("bsp", "ssp", "asp"))
    if staleness < 0 or (staleness and consistency != "ssp"):
        raise ConfigError(
            f"staleness={staleness} with consistency={consistency!r}: only ssp has one, and it is not negative"
        )
    if consistency == "bsp":
        # One copy of each gradient fewer: nobody but the update reads it from its bucket.
        exact: Any = {"gradient_as_bucket_view": True, **options}
        return DistributedDataParallel(model, policy=DeferredUpdates(optimizer, max_grad_norm), **exact), optimizer
    relaxed: Any = options
    policy = RelaxedUpdates(optimizer, consistency, staleness, max_grad_norm, **relaxed)
    return RelaxedDataParallel(model, policy), optimizer


class RelaxedDataParallel(DistributedDataParallel):
    """What :func:`distribute` returns for bounded staleness and none: use it as the model."""

    def __init__(self, module: nn.Module, policy: RelaxedUpdates) -> None:
        super().__init__(module, policy=policy)
        self._relaxed = policy

    @property
    def staleness_seen(self) -> Counter[int]:
        """How many rows of parameters were read at which staleness, in clocks."""
        return self._relaxed.staleness_seen

    @property
    def losses(self) -> dict[int, int]:
        """Workers that died, each with its last step known here."""
        return self._relaxed.losses
