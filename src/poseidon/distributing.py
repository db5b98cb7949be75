"""``poseidon.distribute``: a model and its optimizer, with exchanges that run into the next forward."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.api import DistributedDataParallel
from poseidon.engine.lasting import LastingUpdates
from poseidon.engine.local import LocalUpdates
from poseidon.engine.optimizers import check_max_norm, check_optimizer, check_owns
from poseidon.engine.outer import Outer
from poseidon.engine.outputs import tensors_in
from poseidon.engine.relaxed import RelaxedUpdates
from poseidon.engine.update import DeferredUpdates
from poseidon.errors import ConfigError, UnsupportedError, unknown_name
from poseidon.planning.cluster import Cluster
from poseidon.planning.local import LocalPlan, LocalSchedule, read_interval
from poseidon.planning.numbers import count_from
from poseidon.planning.staleness import Prospect
from poseidon.team.verify import check_same_bits
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
    outer: Outer
    """Under local: what steps the shared parameters; None or "average", "nesterov", or a function of them that makes a
    torch optimizer."""
    warmup_steps: int
    """Under local, and with lossy: exchange gradients exactly for so many steps first."""
    fragments: int
    """Under local: exchange the model in so many parts, one after the other."""
    overlap: int
    """Under local: steps that a worker takes while a fragment is under way."""
    mix: float
    """Under local: share of its own weights that a worker keeps when a fragment arrives ``overlap`` steps later."""
    compress: str | None
    """Under local: let changes travel as "bf16", "int8" or "int4", with error feedback; None: exactly."""


def distribute(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    consistency: str = "bsp",
    staleness: int | Literal["auto"] = 0,
    sync_every: int | str | None = None,
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

    With ``"local"`` each worker steps the optimizer on its own gradients, and after every ``sync_every`` steps (or
    seconds: ``"30s"``) the workers exchange parameters. By default these are averaged (local SGD); with
    ``outer="nesterov"`` an outer optimizer steps on the mean change (DiLoCo), and with ``fragments`` parts of the model
    travel one after the other while training goes on. Replicas differ between exchanges. ``docs/local-steps.md`` says
    when that pays and what it costs.

    With ``update="server"`` the workers that sum a gradient also take the optimizer's step, each for its share of the
    model, and send weights back. Optimizer state takes 1/N of its memory on each of N workers, and weights that the
    model only uses under bf16 autocast travel in fewer bits. Weights, ``.grad`` and the optimizer's state are exact
    whenever they are looked at, and bit-identical to those of ``routes={"*": "sharded"}``, with ``split`` for a tied
    embedding that the plan splits. ``docs/server.md`` says what it takes.

    With ``lossy`` gradients travel in fewer bytes and lose something: see :class:`~poseidon.DistributedDataParallel`
    and ``docs/lossy.md``. Only ``consistency="bsp"`` and ``update="worker"`` take it.

    ``max_grad_norm`` clips the norm of all gradients together (under ssp, asp and local: of the worker's own), after
    the optimizer's own pre-hooks. The other options are those of :class:`~poseidon.DistributedDataParallel`; of these,
    ssp and asp accept ``timeout_s``, ``managed`` and ``settings``.
    """
    check_optimizer(optimizer)
    check_owns(model, optimizer)
    check_max_norm(max_grad_norm)
    if consistency not in ("bsp", "ssp", "asp", "local"):
        raise unknown_name("consistency", consistency, ("bsp", "ssp", "asp", "local"))
    if consistency != "local":
        _refuse_local_options(consistency, sync_every, options)
    bound: int | Literal["auto"] | None = "auto" if staleness == "auto" else count_from(0, staleness)
    if bound is None or (bound and consistency != "ssp"):
        raise ConfigError(
            f"staleness={staleness!r} with consistency={consistency!r}: only ssp takes one, and it must be at least 0, "
            'or "auto"'
        )
    if update not in ("worker", "server"):
        raise unknown_name("update", update, ("worker", "server"))
    if options.get("lossy") is not None and (update == "server" or consistency != "bsp"):
        asked = f"consistency={consistency!r}" if consistency != "bsp" else 'update="server"'
        raise ConfigError(f"lossy={options['lossy']!r} with {asked}: only mean gradients can be lossy; drop one")
    if update == "server":
        if consistency != "bsp":
            raise ConfigError(f'update="server" takes exact steps; consistency={consistency!r} does not, so drop one')
        if options.get("routes"):
            raise ConfigError(f'update="server" decides how gradients travel; routes={options["routes"]!r} cannot')
        served: Any = options
        return DistributedDataParallel(model, policy=LastingUpdates(optimizer, max_grad_norm), **served), optimizer
    if consistency == "local":
        return _distribute_local(model, optimizer, sync_every, max_grad_norm, options), optimizer
    if consistency == "bsp":
        # Saves a copy of each gradient: only the update reads it, straight from its bucket.
        exact: Any = {"gradient_as_bucket_view": True, **options}
        return DistributedDataParallel(model, policy=DeferredUpdates(optimizer, max_grad_norm), **exact), optimizer
    relaxed: Any = options
    policy = RelaxedUpdates(optimizer, consistency, bound, max_grad_norm, **relaxed)
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

    def verify_replicas(self) -> None:
        """Refuse: replicas differ by the updates that they have not seen yet."""
        raise UnsupportedError(
            'verify_replicas() with consistency="ssp" or "asp": replicas differ by the updates that they have not seen '
            "yet, also after close(). With staleness=0 they are equal; shared_state_dict() has all workers' updates"
        )

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with all workers' updates of the steps that this worker has taken.

        Names are those of the model without its wrapper. Waits for workers that are behind.
        """
        state, found = self.module.state_dict(keep_vars=True), self._relaxed.shared()
        return {
            name: found.get(id(value), value.detach()) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        }

    def checkpoint_parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint saves besides the parameters: buffers are each worker's own, as optimizers are."""
        if self._relaxed.staleness is None:
            raise UnsupportedError(
                'consistency="asp" with poseidon.Checkpoint: workers do not wait for each other, so none knows what '
                "all have after a step, or could go on from it; use ssp"
            )
        return {}, {"buffers": _OwnBuffers(self.module)}


_LOCAL_OPTIONS = ("outer", "warmup_steps", "fragments", "overlap", "mix", "compress")


def _refuse_local_options(consistency: str, sync_every: object, options: Mapping[str, Any]) -> None:
    given = {"sync_every": sync_every, **{name: options.get(name) for name in _LOCAL_OPTIONS}}
    if options.get("lossy") is not None:
        del given["warmup_steps"]
    for name, value in given.items():
        if value is not None:
            takers = '"local" and lossy gradients take' if name == "warmup_steps" else '"local" takes'
            raise ConfigError(f"{name}={value!r} with consistency={consistency!r}: only {takers} it")


def _distribute_local(
    model: nn.Module,
    optimizer: Optimizer,
    sync_every: int | str | None,
    max_grad_norm: float | None,
    options: Any,
) -> LocalDataParallel:
    if sync_every is None:
        raise ConfigError('consistency="local" needs sync_every: a number of steps, such as 100, or a time: "30s"')
    for name in ("managed", "settings"):
        if options.get(name):
            raise ConfigError(f'{name}={options[name]!r} with consistency="local": only ssp and asp take it')
    every, every_s = read_interval(sync_every)
    mine = {name: options.pop(name) for name in _LOCAL_OPTIONS if name in options}
    fragments = mine.pop("fragments", 1)
    # As long as it can take without two fragments under way.
    parts = count_from(2, fragments)
    overlap = mine.pop("overlap", every // parts if parts is not None else 0)
    with_buffers = options.get("forward_sync_buffers") is not False and options.get("broadcast_buffers") is not False
    if not mine.get("warmup_steps") and options.get("routes"):
        raise ConfigError(
            f'routes={options["routes"]!r} with consistency="local": gradients travel only during warmup_steps'
        )
    policy = LocalUpdates(
        optimizer,
        LocalSchedule(every, every_s, fragments, overlap),
        mine.pop("outer", None),
        max_grad_norm=max_grad_norm,
        with_buffers=with_buffers,
        **mine,
    )
    return LocalDataParallel(model, policy, **options)


class LocalDataParallel(DistributedDataParallel):
    """What :func:`distribute` returns for local steps: use it as the model.

    ``state_dict()`` has this worker's own weights; :meth:`shared_state_dict` those that all workers agreed on last.
    """

    def __init__(self, module: nn.Module, policy: LocalUpdates, **options: Any) -> None:
        # Plans are for gradients, which travel in the warm-up only.
        super().__init__(module, policy=policy, **{**options, "trials": False})
        self.require_forward_param_sync = policy.is_warming_up

    def enter_epoch(self) -> None:
        """Exchange with the workers that there are now. Collective."""
        super().enter_epoch()
        self.require_forward_param_sync = self._local.is_warming_up

    @property
    def _local(self) -> LocalUpdates:
        assert isinstance(self._policy, LocalUpdates)
        return self._policy

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward exchanges gradients: in the warm-up, outside :meth:`no_sync`."""
        return self._wants_gradients and self._local.is_warming_up

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._wants_gradients = value

    @property
    def plan(self) -> LocalPlan | None:
        """What is exchanged, how often, and what that takes; None with one worker."""
        return None if self._engine is None else self._local.plan(self._engine.cluster)

    @property
    def is_choosing(self) -> bool:
        """Whether plans are tried in the first steps: they are not."""
        return False

    @property
    def outer(self) -> Optimizer | None:
        """The optimizer of the shared parameters, for schedulers of its learning rate; None where there is none."""
        return None if self._local.rounds is None else self._local.rounds.outer

    def synchronize(self) -> None:
        """Exchange now what is left of a round: before an evaluation, or at the end. Collective.

        Then all workers hold the same parameters, and a new round begins.
        """
        self._local.synchronize()

    def join(
        self,
        divide_by_initial_world_size: bool = True,  # noqa: ARG002 - each worker counts by the steps that it took
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """Let workers with fewer batches take part until all are done; wrap the training loop in it.

        Workers do not wait for each other in between, and all hold the same parameters in the end.
        """
        if self._engine is None or not enable:
            return contextlib.nullcontext()
        if throw_on_early_termination:
            raise UnsupportedError(
                "join(throw_on_early_termination=True): a worker hears of the others every round only"
            )
        if self._local.is_warming_up:
            raise UnsupportedError("join() with warmup_steps: give all workers batches for these steps, then call it")
        return self._joined()

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        yield
        self._local.drain()

    def verify_replicas(self) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers share the same parameters. Collective."""
        if self._team is not None and self._local.rounds is not None:
            check_same_bits(self._team, list(self._local.rounds.agreed().items()))

    def shared_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict with the parameters that all workers agreed on last.

        Names are those of the model without its wrapper.
        """
        state = self.module.state_dict(keep_vars=True)
        if self._local.rounds is None or self._local.is_warming_up:
            return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        agreed = self._local.rounds.agreed()
        named = {id(tensor): name for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers())}

        def shared(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = agreed.get(named.get(id(value), ""))
            return value.detach() if found is None else found.to(value.dtype)

        return {name: shared(value) for name, value in state.items()}

    def checkpoint_parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a checkpoint saves besides the shared parameters: for all workers alike, and for each its own."""
        if not self._local.schedule.every:
            raise UnsupportedError(
                f'sync_every="{self._local.schedule.every_s:g}s" with poseidon.Checkpoint: all workers must count the '
                "same steps; give sync_every as a number of steps, or save model.shared_state_dict() yourself"
            )
        own = {"weights": _OwnState(self), "buffers": _OwnBuffers(self.module, self._local.averaged)}
        return {"rounds": _RoundsState(self)}, own

    def _after_forward(self, outputs: Any) -> None:
        super()._after_forward(outputs)
        team = self._team
        if team is None or self._local.is_warming_up or not torch.is_grad_enabled() or team.watch.clock is None:
            return
        # The engine sees no backward of local steps; whoever watches the job does.
        watch, engine = team.watch, self._engine
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and engine is not None:
                tensor.register_hook(lambda _: watch.note(engine.step, "in backward"))
                return


class _RoundsState:
    """How far the rounds of a model are, and the state of its outer optimizer, for a checkpoint."""

    def __init__(self, model: LocalDataParallel) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        local = self._model._local
        return {"steps": local.steps, "rounds": None if local.rounds is None else local.rounds.shared_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        local = self._model._local
        local.steps = state["steps"]
        self._model.require_forward_param_sync = local.is_warming_up
        if local.rounds is not None and state["rounds"] is not None:
            local.load_rounds(local.rounds, state["rounds"])


class _OwnState:
    """A worker's own weights in the middle of a round, for a checkpoint."""

    def __init__(self, model: LocalDataParallel) -> None:
        self._model = model

    def state_dict(self) -> dict[str, Any]:
        rounds = self._model._local.rounds
        return {} if rounds is None else rounds.own_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rounds = self._model._local.rounds
        if rounds is not None and state:
            rounds.load_own_state(state)


class _OwnBuffers:
    """The buffers of a worker that no exchange makes alike, for a checkpoint, whose model has those of worker 0."""

    def __init__(self, module: nn.Module, exchanged: Collection[str] = ()) -> None:
        self._module = module
        self._exchanged = frozenset(exchanged)

    def state_dict(self) -> dict[str, Any]:
        return {path: owner._buffers[name] for path, owner, name in self._places()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for path, owner, name in self._places():
            buffer, found = owner._buffers[name], state.get(path)
            assert buffer is not None
            if found is None:
                continue
            if found.shape == buffer.shape:
                buffer.copy_(found)
            else:
                owner._buffers[name] = found.to(buffer)

    def _places(self) -> Iterator[tuple[str, nn.Module, str]]:
        for prefix, owner in self._module.named_modules():
            for name, buffer in owner._buffers.items():
                path = f"{prefix}.{name}" if prefix else name
                is_saved = buffer is not None and name not in owner._non_persistent_buffers_set
                if is_saved and path not in self._exchanged:
                    yield path, owner, name
