"""What all policies share that take an optimizer's steps in its place: ``update.py`` and ``served.py``."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from array import array
from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import nn
from torch.optim import Optimizer

from poseidon.engine.compiled import CompiledParts
from poseidon.engine.engine import Engine
from poseidon.engine.optimizers import (
    check_known,
    check_max_norm,
    check_optimizer,
    clip_before_steps,
    defer,
    give_back,
    parameters_of,
)
from poseidon.engine.policy import Policy
from poseidon.engine.step import Phase
from poseidon.errors import UnsupportedError, WorkerLostError
from poseidon.job.closing import Stage, at_exit

_WAYS = {"foreach", "fused", "capturable", "differentiable"}
"""Options that choose how the same step is computed."""


class _Guard(contextlib.AbstractContextManager[None]):
    """Breaks the step if a worker is lost. One object for all uses: it has no state of its own."""

    def __init__(self, policy: TakenSteps) -> None:
        self._policy = policy

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, WorkerLostError):
            self._policy.engine.fail(error)


class TakenSteps(Policy):
    """Takes the steps of one optimizer; with one worker, only clips the norm."""

    defers = True
    takes_steps = True
    syncs_buffers_early = True
    is_copyable = False
    steps_later = False

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None = None) -> None:
        check_optimizer(optimizer)
        check_max_norm(max_grad_norm)
        self.optimizer = optimizer
        self.plain = type(optimizer)
        self.is_updating = False
        self._max_grad_norm = max_grad_norm
        self._engine: Engine | None = None
        self._compiled = CompiledParts()
        self._undo: list[Callable[[], None]] = [self._compiled.close]
        self._guard = _Guard(self)
        self._streams: list[torch.cuda.Stream] = []
        """Of each CUDA device: on which backward ended, or ``step()`` was called since, in whose order everything
        lands. Whoever touches a parameter on another one waits for it, but others do not wait for him."""
        self._exchanges_before = 0
        """How many exchanges there were at the last step."""
        self._options = sorted(set(getattr(optimizer, "defaults", ())) - _WAYS)
        """Names of the options that the optimizer's class knows, and that matter."""

    def connect(self, module: nn.Module, engine: Engine | None) -> None:
        """Take over the optimizer's steps."""
        self._engine = engine
        if engine is None:
            if self._max_grad_norm is not None:
                self._undo.append(clip_before_steps(self.optimizer, module, self._max_grad_norm))
            return
        defer(self.optimizer, self)
        self._compiled.take_asking(module)
        devices = {parameter.device: None for parameter in engine.parameters if parameter.is_cuda}
        self._streams = [torch.cuda.current_stream(device) for device in devices]
        # A script may exit with a step under way, which the others cannot finish without this worker.
        self._undo.append(at_exit(Stage.STEPS, self._leave_unless_broken))

    @property
    def engine(self) -> Engine:
        """The engine whose gradients this policy waits for."""
        assert self._engine is not None
        return self._engine

    def guard(self) -> contextlib.AbstractContextManager[None]:
        """Guard a part of backward: if a worker is lost in it, ``.grad`` is not the mean, and no step may use it."""
        return self._guard

    def close(self) -> None:
        """Give model and optimizer back, and close the engine."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._engine is None:
            return
        try:
            if self._is_intact:
                self._give_everything_back()
        finally:
            self._release_parameters()
            give_back(self.optimizer, self.plain)
            self.engine.close()
            self._engine = None

    def _note_streams(self) -> None:
        for number, stream in enumerate(self._streams):
            self._streams[number] = torch.cuda.current_stream(stream.device)

    def _note_step(self, engine: Engine, phase: Phase) -> None:
        """Let the others compare this step with theirs; raise if no exchange since the last one saw its gradients."""
        exchanges = engine.step + (phase is Phase.CLOSED)  # which counts when all have heard of it
        before, self._exchanges_before = self._exchanges_before, exchanges
        # Not what users add to a group, nor what is on a device; in single precision, since machines may differ in the
        # last bit of a cosine.
        values = array("f")
        for group in self.optimizer.param_groups:
            for name in self._options:
                value = group.get(name)
                values.append(value if isinstance(value, int | float) else 0)
        engine.taken = crc32(values, crc32(b"%d %d" % (engine.taken, exchanges)))
        is_bypassed = exchanges <= before and engine.is_bypassed and self._has_gradients(engine)
        if is_bypassed or (exchanges <= before and engine.local):
            raise UnsupportedError(
                f"rank {engine.team.rank}: step() would use this worker's own gradients: no backward since the last "
                "step came from outputs of the distributed model. Call the model that distribute() returned, not the "
                "one that it was given, and let the last backward before a step be outside of no_sync(); gradients "
                "from torch.autograd.grad() that are put into .grad are not exchanged at all: use backward(), or "
                "poseidon.DistributedDataParallel and average them yourself"
            )

    def _has_gradients(self, engine: Engine) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            return any(parameter.grad is not None for parameter in engine.parameters)

    def check_group(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if somebody adds parameters to the optimizer whose gradients nobody exchanges."""
        check_known(parameters, set(map(id, self.engine.parameters)))

    def note_cleared(self) -> None:
        """Note that the optimizer has cleared gradients itself."""
        if self._engine is not None and self._engine.local:
            self._engine.forget_local(parameters_of(self.optimizer))

    @abstractmethod
    def step(self) -> None:
        """Take a step, or record that it is due."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True, parameters: Sequence[nn.Parameter] | None = None) -> bool:
        """Clear gradients, the optimizer's or these, once the update that needs them is done."""

    @abstractmethod
    def show_state(self) -> None:
        """Put the optimizer's state in place, for somebody who reads it."""

    @abstractmethod
    def take_state(self) -> None:
        """Note that the state was replaced."""

    @abstractmethod
    def _leave(self) -> None:
        """Finish what the others need this worker for."""

    @abstractmethod
    def _give_everything_back(self) -> None:
        """Put in place whatever is not."""

    @abstractmethod
    def _release_parameters(self) -> None:
        """Restore the parameters' own class."""

    def _leave_unless_broken(self) -> None:
        if self._engine is not None and self._is_intact:
            self._leave()

    @property
    def _is_intact(self) -> bool:
        """Whether all can still finish a step: in an interrupted backward each needs the other."""
        return self.engine.failure is None and not self.engine.in_backward

    def _land_at_once(self) -> None:
        """End a backward with all means in ``.grad``."""
        try:
            self.engine.end_backward()
        except BaseException as error:
            # Whatever it was, ``.grad`` is not the mean, and no step may use it.
            self.engine.fail(error)
            raise

    def _check_failure(self) -> None:
        if self._engine is not None and self._engine.failure is not None:
            raise UnsupportedError(
                f"rank {self.engine.team.rank}: an update was interrupted by an error, so the replicas may differ; "
                "restart from a checkpoint"
            ) from self.engine.failure
