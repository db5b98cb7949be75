"""``poseidon.distribute``: a model and its optimizer, with exchanges that run into the next forward."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.api import DistributedDataParallel
from poseidon.engine.optimizers import check_max_norm, check_optimizer
from poseidon.engine.relaxed import RelaxedUpdates
from poseidon.engine.served import ServedUpdates
from poseidon.engine.update import DeferredUpdates
from poseidon.errors import ConfigError, unknown_name
from poseidon.planning.cluster import Cluster
from poseidon.planning.staleness import Prospect
from poseidon.wire.settings import WireSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist
    from typing_extensions import Unpack


class WrapperOptions(TypedDict, total=False):
    """Options that :func:`distribute` passes to :class:`~poseidon.DistributedDataParallel`; see there."""

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
    timeout_s: float | None
    gather_factors: bool | None
    forward_sync_buffers: bool | None
    trials: bool
    lossy: str | Mapping[str, str] | None
    rank: int | None
    density: float | None
    block_size: int | None
    managed: bool
    """Under ssp and asp: send updates early where the wire is idle, the largest relative change first."""
    settings: WireSettings | None
    """Under ssp and asp: how the tables' wire works."""


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    consistency: str = "bsp",
    staleness: int | Literal["auto"] = 0,
    max_grad_norm: float | None = None,
    update: str = "worker",
    **options: Unpack[WrapperOptions],
) -> tuple[DistributedDataParallel, Optimizer]:
    """Train ``model`` on all workers; returns the wrapped model and the same optimizer object. Collective.

    With ``consistency="bsp"`` every step uses all workers' gradients, and ``optimizer.step()`` returns at once: each
    layer is updated at its next use, once its gradient has arrived, so the next forward hides the exchange too. Reading
    a parameter, its ``.grad``, a ``state_dict()`` or the optimizer's state waits for exactly what it reads and sees a
    finished step. The parameters are bit-identical to those of :class:`~poseidon.DistributedDataParallel` with the same
    options and plan. Arrays made earlier from a parameter (``p.detach().numpy()``) share its memory, and reading them
    does not wait.

    With ``"ssp"`` a worker may be ``staleness`` steps ahead of the slowest, with ``"asp"`` any number: workers do not
    wait for a straggler within that bound, a worker that dies is reported while the others continue, and replicas
    differ by the updates they have not seen yet. ``staleness="auto"`` is chosen from the spread of the workers' step
    times, after 20 steps and again every 100. ``engine/relaxed.py`` describes these steps. After the first step each
    worker keeps its own buffers (running statistics), and ``close()`` waits for the other workers, which may need the
    parameters stored here.

    With ``update="server"`` the workers that sum a gradient also take the optimizer's step, each for its share of the
    model, and send weights back. Optimizer state takes 1/N of its memory on each of N workers, and weights that the
    model only uses under bf16 autocast travel in fewer bits. Weights, ``.grad`` and the optimizer's state are exact
    whenever they are looked at, and bit-identical to those of ``routes={"*": "sharded"}``, with ``split`` for a tied
    embedding that the plan splits. ``docs/server.md`` says what it takes.

    With ``lossy`` gradients travel in fewer bytes and lose something: see :class:`~poseidon.DistributedDataParallel`
    and ``docs/lossy.md``. Only ``consistency="bsp"`` and ``update="worker"`` take it.

    ``max_grad_norm`` clips the norm of all gradients together (under ssp and asp: of the worker's own). The other
    options are those of :class:`~poseidon.DistributedDataParallel`; of these, ssp and asp accept ``timeout_s``,
    ``managed`` and ``settings``.
    """
    check_optimizer(optimizer)
    check_max_norm(max_grad_norm)
    if consistency not in ("bsp", "ssp", "asp"):
        raise unknown_name("consistency", consistency, ("bsp", "ssp", "asp"))
    is_staleness = staleness == "auto" or (isinstance(staleness, int) and staleness >= 0)
    if not is_staleness or (staleness and consistency != "ssp"):
        raise ConfigError(
            f"staleness={staleness!r} with consistency={consistency!r}: only ssp takes one, and it must be at least 0, "
            'or "auto"'
        )
    if update not in ("worker", "server"):
        raise unknown_name("update", update, ("worker", "server"))
    if options.get("lossy") is not None and (update == "server" or consistency != "bsp"):
        asked = f"consistency={consistency!r}" if consistency != "bsp" else 'update="server"'
        raise ConfigError(
            f"lossy={options['lossy']!r} with {asked}: only mean gradients can be lossy; drop one of them"
        )
    if update == "server":
        if consistency != "bsp":
            raise ConfigError(f'update="server" takes exact steps; consistency={consistency!r} does not, so drop one')
        if options.get("routes"):
            raise ConfigError(f'update="server" decides how gradients travel; routes={options["routes"]!r} cannot')
        served: Any = options
        return DistributedDataParallel(model, policy=ServedUpdates(optimizer, max_grad_norm), **served), optimizer
    if consistency == "bsp":
        # Saves a copy of each gradient: only the update reads it, straight from its bucket.
        exact: Any = {"gradient_as_bucket_view": True, **options}
        return DistributedDataParallel(model, policy=DeferredUpdates(optimizer, max_grad_norm), **exact), optimizer
    relaxed: Any = options
    policy = RelaxedUpdates(optimizer, consistency, staleness, max_grad_norm, **relaxed)
    return RelaxedDataParallel(model, policy), optimizer


class RelaxedDataParallel(DistributedDataParallel):
    """What :func:`distribute` returns for ssp and asp: use it as the model."""

    def __init__(self, module: nn.Module, policy: RelaxedUpdates) -> None:
        super().__init__(module, policy=policy)
        self._relaxed = policy

    @property
    def staleness_seen(self) -> Counter[int]:
        """Number of parameter rows read at each staleness, in clocks."""
        return self._relaxed.staleness_seen

    @property
    def staleness(self) -> int | None:
        """Steps that this worker may be ahead of the slowest at present; None without a bound."""
        return self._relaxed.staleness

    @property
    def staleness_prospects(self) -> list[Prospect]:
        """With ``staleness="auto"``: what each bound promised when one was last chosen, the chosen one first."""
        return self._relaxed.prospects

    @property
    def losses(self) -> dict[int, int]:
        """Workers that died, each with the last step this worker saw from it."""
        return self._relaxed.losses
