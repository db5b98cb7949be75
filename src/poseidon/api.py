"""The public surface: start reading here.

:class:`DistributedDataParallel` wraps a model. Behind it :class:`~poseidon.engine.hooks.AutogradFrontEnd` listens to
autograd, :class:`~poseidon.engine.engine.Engine` exchanges gradients, and a :class:`~poseidon.engine.policy.Policy`
decides when they take effect. ``docs/journey.md`` follows one gradient through all of it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from poseidon.attaching import BackwardTurns
from poseidon.checkpoints.shards import Sharded
from poseidon.engine.assemble import assemble_engine
from poseidon.engine.buffers import BufferSync
from poseidon.engine.compiled import has_compiled_parts
from poseidon.engine.discover import check_same_parameters, find_units, frozen_parameters, only_dense, tensors_of
from poseidon.engine.engine import Engine
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.options import Options
from poseidon.engine.policy import Policy, UpdateNow
from poseidon.engine.sampling import plan
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.forwarding import Forwarding
from poseidon.job import settings
from poseidon.job.elastic import this_job
from poseidon.job.limits import time_limit
from poseidon.job.world import World, init
from poseidon.joining import ShadowHook
from poseidon.planning.cluster import Cluster
from poseidon.planning.lossy import read_lossy
from poseidon.planning.packing import limit_collective
from poseidon.planning.planner import Plan, check_overrides
from poseidon.planning.route import Routes
from poseidon.routes import standard_routes
from poseidon.routes.base import LiveUnit
from poseidon.routes.feedback import Feedback
from poseidon.routes.lossy import lossy_routes
from poseidon.surface import group_of, refuse_torch_only, warn_of_broadcast_buffers
from poseidon.team.agree import check_same_model, describe
from poseidon.team.epochs import live_on, outlives
from poseidon.team.mirror import mirror_different
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits

__all__ = ["DistributedDataParallel", "World", "init", "plan"]


class DistributedDataParallel(Forwarding):
    """Drop-in for :class:`torch.nn.parallel.DistributedDataParallel` that picks the cheapest exact route per layer.

    When ``backward()`` returns, ``.grad`` of every parameter is the mean over all workers, identical on all of them.
    The leading arguments are torch's. Wrapping is collective: parameters and buffers are copied from rank 0, and a
    model that differs between workers raises an error that names the difference.

    In the first steps several whole plans may be tried and the fastest kept (``docs/performance.md``), unless
    ``trials`` is false.
    ``routes`` forces routes by unit name or pattern (``{"head.*": "allreduce"}``). ``cluster`` (a :class:`Cluster` or a
    JSON file) replaces the measurement of links and devices. ``timeout_s`` is how long to wait for another worker
    before raising :class:`~poseidon.errors.WorkerLostError`. ``gather_factors`` selects whether factors travel by an
    all-gather (the default with NCCL) or by direct messages through host memory. ``lossy`` allows loss: ``"bf16"``,
    ``"int8"`` (in blocks of ``block_size``), ``"topk"`` (the share ``density`` of all values) or ``"lowrank"``
    (matrices of this ``rank``), for all layers or by pattern, as in ``{"h.*": "int8", "*": "exact"}``; what a step
    loses the next one adds, and in the first ``warmup_steps`` of a job nothing is lost (``docs/lossy.md``). ``policy``
    is for :func:`poseidon.distribute`. With one worker, or without a process group, the model runs unchanged.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,  # noqa: ARG002 - torch's own class ignores it as well
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        routes: Mapping[str, str] | None = None,
        cluster: Cluster | str | Path | None = None,
        timeout_s: float | None = None,
        gather_factors: bool | None = None,
        forward_sync_buffers: bool | None = None,
        trials: bool = True,
        lossy: str | Mapping[str, str] | None = None,
        rank: int | None = None,
        density: float | None = None,
        block_size: int | None = None,
        warmup_steps: int | None = None,
        policy: Policy | None = None,
        **torch_only: Any,
    ) -> None:
        super().__init__()
        bucket_caps_mb = torch_only.pop("bucket_cap_mb_list", None) or ()
        process_group = group_of(torch_only.pop("device_mesh", None), process_group)
        refuse_torch_only(torch_only)
        if dim != 0:
            raise UnsupportedError(f"dim={dim}: one worker drives one device, so there is no dimension to split along")
        self.module = module
        if broadcast_buffers is not None:
            warn_of_broadcast_buffers(forward_sync_buffers is not None)
        follows_old = broadcast_buffers is not None and forward_sync_buffers is None
        self.forward_sync_buffers = bool(broadcast_buffers) if follows_old else forward_sync_buffers is not False
        self._has_common_buffers = self.forward_sync_buffers or not follows_old
        """Whether all workers start with rank 0's buffers."""
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_bytes_cap_list = [int(cap * 2**20) for cap in bucket_caps_mb]
        # Torch's list says how large each bucket may be; the plan decides that, up to the largest.
        asked_bytes = max(self.bucket_bytes_cap_list, default=None)
        self._bucket_bytes = asked_bytes if bucket_cap_mb is None else int(bucket_cap_mb * 2**20)
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        """Whether the next forward synchronizes buffers: not while gradients are being accumulated."""
        self.batched_grad_copy = bool(torch_only.get("batched_grad_copy"))
        self.device_ids = device_ids
        self.output_device = output_device
        self.dim = dim
        self.timeout_s = time_limit(timeout_s)
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        if routes is not None and not isinstance(routes, Mapping):
            raise ConfigError(
                f"routes is {routes!r}; give a dict of unit names or patterns to routes, such as {{'*': 'allreduce'}}"
            )
        self._routes = dict(routes or {})
        self._lossy = read_lossy(lossy, rank, density, block_size, warmup_steps)
        self._feedback = None if self._lossy is None else Feedback()
        self._cluster = cluster
        self._gather_factors = gather_factors
        self._trials = trials
        self._measured: Cluster | None = None
        """Links and devices as they were measured among earlier workers."""
        self._policy = policy or UpdateNow()
        self._engine: Engine | None = None
        self._front_end: AutogradFrontEnd | None = None
        self._team: Team | None = None
        self._buffer_sync: BufferSync | None = None
        """None where each worker keeps its own buffers."""
        self._release: weakref.finalize[Any, Any] | None = None
        self.device = self._find_device()
        if this_job() is not None:
            self._check_lasting(process_group)
            live_on(self)
        self.process_group = process_group
        if process_group is None and dist.is_initialized():
            self.process_group = dist.group.WORLD
        try:
            self._connect(process_group, init_sync)
        except Exception as error:
            if not outlives(error):
                raise
            self._connect(process_group, init_sync, is_alone=True)
        if static_graph and find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, with static_graph the first "
                "backward shows which parameters are unused; leave find_unused_parameters out",
                stacklevel=2,
            )

    # The interface of torch's class.

    @property
    def bucket_bytes_cap(self) -> int:
        """Maximum bytes per collective."""
        return limit_collective(self._bucket_bytes, self._policy.defers)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside this context; the next backward outside averages the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; those that a due update needs are cleared after it."""
        if not self._policy.zero_grad(set_to_none, list(self.module.parameters())):
            super().zero_grad(set_to_none)

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Let workers with fewer batches take part until all are done; wrap the training loop in it."""
        self._connect_copy()
        if self._engine is None:
            return contextlib.nullcontext()
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Part of torch's generic join protocol."""
        self._connect_copy()
        if self._engine is None:  # one worker has nobody to wait for
            return JoinHook()
        self._engine.divide_by_active = not kwargs.get("divide_by_initial_world_size", True)
        self._joins = True
        return ShadowHook(self)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether buckets have their final order, which the first backward shows."""
        return self.plan is not None

    def _logged(self) -> dict[str, Any]:
        found: dict[str, Any] = {"comm_hook": self._hook_name} if self._hook_name else {}
        if self._engine is not None:
            found["iteration"] = self._engine.step
            if self._engine.last_error:
                found |= {"has_error": 1, "error": self._engine.last_error}
        return found

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self._engine is not None:
            self._engine.set_static()
        self.static_graph = True

    def _check_reducer_finalized(self) -> None:
        if self._engine is not None and self._engine.in_backward:
            raise UnsupportedError(
                f"Expected to have finished reduction in the prior iteration: backward {self._engine.step} has begun "
                "and not ended; was it interrupted by an error?"
            )

    def _remove_autograd_hooks(self) -> None:
        if self._front_end is not None:
            self._front_end.close()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load as any module does, and have the workers compare what they loaded."""
        loaded = super().load_state_dict(*args, **kwargs)
        if self._engine is not None:
            self._engine.ask_for_comparison()
        return loaded

    # Poseidon's own additions.

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the end of the first backward, and with one worker."""
        return None if self._engine is None else self._engine.plan

    @property
    def is_choosing(self) -> bool:
        """Whether plans are still being tried in the first steps; benchmarks should wait until this is false."""
        return self._engine is not None and self._engine.is_choosing

    @property
    def cluster(self) -> Cluster | None:
        """Machines, links and device rates behind the plan; None with one worker."""
        return None if self._engine is None else self._engine.cluster

    def finish_step(self) -> None:
        """Wait until the step under way is finished: every update done, nothing on the wire."""
        self._policy.finish()

    def verify_replicas(self) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers hold the same bits. Collective."""
        self._connect_copy()
        if self._team is not None:
            named = [(name, p) for name, p in self.module.named_parameters() if name not in self._ignored]
            check_same_bits(self._team, named)

    def close(self) -> None:
        """Finish the step under way, stop exchanging, and restore model and optimizer.

        Also runs when the wrapper is garbage-collected.
        """
        self._is_loose = False
        if self._release is not None:
            self._release()
            self._engine = self._front_end = self._team = self._buffer_sync = None

    @property
    def stepped_optimizer(self) -> Any:
        """The optimizer whose steps ``distribute`` takes, if any."""
        return getattr(self._policy, "optimizer", None)

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients are here that a backward without an exchange has left since the last one with it."""
        return self._engine is not None and bool(self._engine.local)

    @property
    def sharded(self) -> Sharded | None:
        """What knows the state that one worker alone has; None: every worker has everything."""
        return self._policy.sharded

    def leave_epoch(self, error: BaseException) -> None:
        """Stop exchanging with workers of which some are lost; what they did not finish is dropped."""
        team, engine = self._team, self._engine
        try:
            if engine is not None:
                self._measured = engine.cluster
                engine.fail(error)
            self.close()
        finally:
            if team is not None:
                team.drop(error)
            # What an interrupted backward has left.
            super().zero_grad()

    def enter_epoch(self) -> None:
        """Exchange with the workers that there are now. Collective."""
        self._policy = self._policy.renewed()
        self.process_group = dist.group.WORLD if dist.is_initialized() else None
        self._trials = False
        self._connect(None, init_sync=False)
        self.require_forward_param_sync = True  # on all alike, also on one that has had no forward yet
        self._turns.steps_in_backward = self._steps_in_backward or []
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, hook_state in hooks:
            self.register_comm_hook(hook_state, hook)

    # Inside.

    def _check_lasting(self, process_group: dist.ProcessGroup | None) -> None:
        problem = ""
        if not self._policy.is_lasting:
            problem = (
                'consistency="ssp" and "asp" keep state in tables, which is lost with its worker, and so is what local '
                "steps with an overlap, or by time, have under way"
            )
        elif process_group is not None and process_group is not dist.group.WORLD:
            problem = "a process_group of its own cannot be made again without a lost worker"
        elif dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
            problem = "NCCL's operations cannot be interrupted; let poseidon.init() make the process group without it"
        if problem:
            raise UnsupportedError(f"in an elastic job (--nodes, --nproc MIN:MAX): {problem}; leave it out")

    def _find_device(self) -> torch.device:
        parameters = self._module_parameters
        if not any(p.requires_grad for p in parameters):
            raise UnsupportedError(
                "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
                f"gradient; use {type(self.module).__name__} without it"
            )
        devices = sorted({str(p.device) for p in parameters})
        if self.device_ids:
            if len(self.device_ids) > 1 or len(devices) > 1:
                raise ConfigError(
                    "device_ids can only be None or contain a single element: it is "
                    f"{self.device_ids}, with parameters on {', '.join(devices)}; start one worker per device"
                )
            if parameters[0].device.type == "cpu":
                raise ConfigError(
                    f"device_ids={self.device_ids} but the parameters are on the CPU; leave device_ids out"
                )
        return parameters[0].device

    def _connect(self, process_group: dist.ProcessGroup | None, init_sync: bool, is_alone: bool = False) -> None:
        units = find_units(self.module, self._ignored)
        self._frozen = frozen_parameters(self.module, self._ignored)
        if self._policy.serves:
            # Where a layer is compiled, it cannot hand its gradient over.
            keeps_tied = not has_compiled_parts(self.module)
            units = [only_dense(unit, keeps_tied) for unit in units]
        specs = [unit.spec for unit in units]
        check_overrides(specs, self._routes, standard_routes())
        if self._lossy is not None:
            self._lossy.forced(specs, Routes(lossy_routes(self._lossy)))
        if self._policy.uses_engine and not is_alone and self._has_company(process_group):
            team = Team(process_group, self.timeout_s)
            try:
                self._start_exchange(team, units, init_sync)
            except BaseException:
                self._team = self._engine = self._buffer_sync = None
                team.close()
                raise
        try:
            self._policy.connect(self.module, self._engine)
        except BaseException as error:
            if self._engine is not None:
                self._engine.fail(error)
                self._engine.close()
                self._team = self._engine = self._buffer_sync = None
            raise
        turns = self._turns = BackwardTurns(self._policy, self._buffer_sync)
        if self._engine is not None:
            self._front_end = AutogradFrontEnd(
                self._engine,
                turns,
                # Not a method: the front end must not keep the wrapper alive.
                partial(check_same_parameters, self.module, {id(each) for each in self.module.parameters()}),
            )
        # Threads and hooks must not outlive the wrapper, however it is destroyed.
        self._release = weakref.finalize(self, _release, self._front_end, turns)
        self._release.atexit = False

    def _has_company(self, process_group: dist.ProcessGroup | None) -> bool:
        if dist.is_initialized():
            return dist.get_world_size(process_group) > 1
        world = World.from_environment()
        if world.size > 1:
            raise ConfigError(
                f"this is worker {world.rank} of {world.size}, but there is no process group; call poseidon.init()"
            )
        return False

    def _start_exchange(self, team: Team, units: list[LiveUnit], init_sync: bool) -> None:
        self._team = team
        # Buffers that are each worker's own may have any shape.
        buffers = self.module.named_buffers() if self._has_common_buffers else ()
        everything = (*self.module.named_parameters(), *buffers)
        check_same_model(team, describe([(name, tensor) for name, tensor in everything if name not in self._ignored]))
        if init_sync:
            tensors = tensors_of(self.module, self._ignored, with_buffers=self._has_common_buffers)
            mirror_different(team, tensors, 0, "the initial parameters")
        options = Options(
            bucket_bytes=self._bucket_bytes,
            keep_views=self.gradient_as_bucket_view,
            allow_unused=self.find_unused_parameters,
            static_graph=self.static_graph,
            gather_factors=self._gather_factors,
            routes=self._routes,
            lossy=self._lossy,
            feedback=self._feedback,
            check_interval=settings.CHECK_REPLICAS.read() if self._policy.holds_replicas else 0,
            defers=self._policy.defers,
            serves=self._policy.serves,
            tries=self._trials and not self._policy.serves,
        )
        cluster: Cluster | str | Path | None = self._cluster
        if self._measured is not None and cluster is None:
            machines = team.topology.machines
            cluster = replace(
                self._measured, machines=len(machines), workers_per_machine=max(len(ranks) for ranks in machines)
            )
        self._engine = assemble_engine(units, team, self.device, options, cluster)
        if self.forward_sync_buffers:
            self._buffer_sync = BufferSync(self.module, team, self._ignored)


def _release(front_end: AutogradFrontEnd | None, turns: BackwardTurns) -> None:
    if front_end is not None:
        front_end.close()
    turns.close()


# A class by its own right that answers isinstance as torch's does: distributed checkpoints then name parameters without
# the wrapper, and pipelines accumulate before they exchange.
nn.parallel.DistributedDataParallel.register(DistributedDataParallel)
