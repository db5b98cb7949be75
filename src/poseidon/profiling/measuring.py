"""Profiles of real models: measured on a device, or estimated from counted operations. Needs torch.

Measured: hooks take a timestamp when forward reaches each unit and when each gradient is final, from the clock on the
CPU and from events on CUDA. Estimated: one forward on torch's meta device, which computes nothing, counts every
operation; an operation takes its arithmetic at the device's matrix rate or its traffic at the memory's, whichever is
longer.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poseidon.engine.sampling import sample_filled, sample_loads
from poseidon.errors import ConfigError
from poseidon.planning.profile import Profile, UnitProfile

if TYPE_CHECKING:
    import torch
    from torch import nn

    from poseidon.routes.base import LiveUnit

BACKWARD_RATIO = 2.0
"""Backward computes two products (for inputs and for weights) where forward computes one."""
UPDATE_PASSES = 5
"""SGD with momentum reads weight, gradient and momentum and writes two of them."""
MEMORY_PER_FLOP = 0.08
"""Bytes per second of memory traffic for each flop/s of the matrix rate, where only the latter is known: an H200 in
TF32 has about 0.01, a Titan X 0.055, a server's core 0.1-0.2."""


def _alone() -> None:
    """Meet nobody: the device is this process's own."""


def profile_model(
    model: nn.Module,
    inputs: Any,
    *,
    name: str,
    batch: int,
    loss: Callable[[Any], torch.Tensor] | None = None,
    update: Callable[[], object] | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    meet: Callable[[], object] = _alone,
    repetitions: int = 3,
) -> Profile:
    """Measure forward and backward of every unit on the model's device, in ``repetitions`` passes after a warm-up.

    ``loss`` turns the outputs into a scalar (default: their mean). ``update`` is the optimizer's step, called and timed
    after each backward; without it the traffic of plain SGD is timed and the weights do not change. ``around`` makes
    the context of each forward and its loss, such as autocast. (Around several steps autocast would keep the first
    step's copies of the weights: their gradients, older in the graph than all else, would be ready only at the end.)
    ``meet`` waits for this device and for others that profile on it, before each step and before each update: a short
    update beside another's long backward would be timed as a long one.
    Running statistics (BatchNorm) change as in any training forward. Gradients are dropped.
    """
    from poseidon.engine.discover import find_units

    units = find_units(model)
    with around():
        loads = sample_loads(model, units, inputs)
    watch = _Watch(model, units, inputs, loss or _mean, update, around, meet)
    with watch:
        loads = sample_filled(units, loads, watch.run)
        runs = [watch.run() for _ in range(repetitions)]
    middle = sorted(runs, key=lambda run: run.total_s)[len(runs) // 2]
    return _assemble(name, str(watch.device), batch, units, loads, middle, runs, watch.memory_bytes())


@dataclass(frozen=True)
class _Run:
    """Times of one step, from its start."""

    first_use_s: dict[int, float]
    forward_s: float
    ready_s: dict[int, float]
    backward_s: float
    update_s: float
    issue_s: float
    """Host time of the forward and the loss, if a device computes them."""

    @property
    def total_s(self) -> float:
        return self.backward_s + self.update_s


class _Watch:
    """Sets marks while a model trains one step at a time."""

    def __init__(
        self,
        model: nn.Module,
        units: list[LiveUnit],
        inputs: Any,
        loss: Any,
        update: Callable[[], object] | None,
        around: Callable[[], AbstractContextManager[Any]],
        meet: Callable[[], object],
    ) -> None:
        self.device: torch.device = next(model.parameters()).device
        self._model, self._units, self._inputs, self._loss, self._update = model, units, inputs, loss, update
        self._around, self._meet = around, meet
        self._used: dict[int, Any] = {}
        self._ready: dict[int, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _Watch:
        for unit in self._units:
            if unit.module is not None:
                hook = unit.module.register_forward_pre_hook(lambda *_, i=unit.index: self._note_use(i))
                self._stack.callback(hook.remove)
            for parameter in unit.parameters:
                handle = parameter.register_post_accumulate_grad_hook(lambda _, i=unit.index: self._note_ready(i))
                self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._model.zero_grad(set_to_none=True)

    def run(self) -> _Run:
        self._used, self._ready = {}, {}
        self._model.zero_grad(set_to_none=True)
        self._settle()
        self._meet()
        start = self._mark()
        began_s = time.perf_counter()
        with self._around():
            value = self._loss(_call(self._model, self._inputs))
        issue_s = time.perf_counter() - began_s if self.device.type == "cuda" else 0.0
        forward = self._mark()
        value.backward()
        backward = self._mark()
        self._meet()
        rested = self._mark()
        if self._update is not None:
            self._update()
        end = self._mark()
        self._settle()
        return _Run(
            {i: self._between(start, mark) for i, mark in self._used.items()},
            self._between(start, forward),
            {i: self._between(start, mark) for i, mark in self._ready.items()},
            self._between(start, backward),
            self._between(rested, end) if self._update is not None else self._plain_update_s(),
            issue_s,
        )

    def memory_bytes(self) -> int:
        import torch

        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0

    def _plain_update_s(self) -> float:
        """Time the least any optimizer does: read weights and gradients, write weights; the values do not change."""
        import torch

        pairs = [(p, p.grad) for unit in self._units for p in unit.parameters if p.grad is not None]
        self._settle()
        start = self._mark()
        with torch.no_grad():
            dense = [(p, g) for p, g in pairs if not g.is_sparse]
            torch._foreach_add_([p for p, _ in dense], [g for _, g in dense], alpha=0.0)
        end = self._mark()
        self._settle()
        return self._between(start, end)

    def _note_use(self, index: int) -> None:
        if index not in self._used:
            self._used[index] = self._mark()

    def _note_ready(self, index: int) -> None:
        self._ready[index] = self._mark()

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3

    def _settle(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


def _assemble(
    name: str, device: str, batch: int, units: list[LiveUnit], loads: Any, run: _Run, runs: list[_Run], memory: int
) -> Profile:
    """Turn marks into spans: a unit's span lasts from its mark to the next one's."""
    count = len(units)
    forward_order = sorted(range(count), key=lambda i: (run.first_use_s.get(i, run.forward_s), i))
    ready_order = sorted(range(count), key=lambda i: (run.ready_s.get(i, run.backward_s), -i))
    forward = [0.0] * count
    begins = [run.first_use_s.get(i, run.forward_s) for i in forward_order]
    # Time before the first unit (e.g. moving a batch) counts as the first unit's.
    for place, i in enumerate(forward_order):
        begin = 0.0 if place == 0 else begins[place]
        end = begins[place + 1] if place + 1 < count else run.forward_s
        forward[i] = max(0.0, end - begin)
    backward = [0.0] * count
    before = run.forward_s
    for place, i in enumerate(ready_order):
        at = run.backward_s if place == count - 1 else run.ready_s.get(i, run.backward_s)
        backward[i] = max(0.0, at - before)
        before = max(before, at)
    return Profile(
        model=name,
        device=device,
        batch=batch,
        units=tuple(
            UnitProfile(unit.spec, loads.get(unit.name), forward[unit.index], backward[unit.index]) for unit in units
        ),
        forward_order=tuple(forward_order),
        ready_order=tuple(ready_order),
        update_s=statistics.median(one.update_s for one in runs),
        memory_bytes=memory,
        issue_s=min(one.issue_s for one in runs) / count,
    )


def estimate_profile(
    model: nn.Module,
    inputs: Any,
    *,
    name: str,
    batch: int,
    flops: float,
    memory_bytes_per_s: float | None = None,
) -> Profile:
    """Estimate a profile from the operations of one forward and a device's rates; best with a model on "meta"."""
    from poseidon.engine.discover import find_units

    if not flops > 0:
        raise ConfigError(f"the device's matrix rate is {flops} flop/s; it must be positive")
    memory_rate = flops * MEMORY_PER_FLOP if memory_bytes_per_s is None else memory_bytes_per_s
    units = find_units(model)
    loads = sample_loads(model, units, inputs)
    seconds, order = _count_operations(model, units, inputs, flops, memory_rate)
    return Profile(
        model=name,
        device=f"{flops / 1e9:.4g} GFLOP/s",
        batch=batch,
        units=tuple(
            UnitProfile(unit.spec, loads.get(unit.name), seconds[unit.index], BACKWARD_RATIO * seconds[unit.index])
            for unit in units
        ),
        forward_order=tuple(order),
        ready_order=tuple(reversed(order)),
        update_s=UPDATE_PASSES * sum(unit.spec.size_bytes for unit in units) / memory_rate,
        source="estimated",
    )


def _count_operations(
    model: nn.Module, units: list[LiveUnit], inputs: Any, flops: float, memory_rate: float
) -> tuple[Mapping[int, float], list[int]]:
    """Return the seconds of each unit's forward and the order in which units are first used."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    seconds: defaultdict[int, float] = defaultdict(float)
    order: list[int] = []

    class Meter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            count = flop_registry.get(func._overloadpacket)
            work = count(*args, **(kwargs or {}), out_val=result) if count else 0
            if work or not func.is_view:
                traffic = sum(t.numel() * t.element_size() for t in _tensors((args, result)))
                seconds[order[-1] if order else -1] += max(work / flops, traffic / memory_rate)
            return result

    def note(index: int) -> None:
        if index not in order:
            order.append(index)

    hooks = [
        unit.module.register_forward_pre_hook(lambda *_, i=unit.index: note(i))
        for unit in units
        if unit.module is not None
    ]
    try:
        with torch.no_grad(), Meter():  # type: ignore[no-untyped-call]
            _call(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    order.extend(i for i in range(len(units)) if i not in order)
    seconds[order[0]] += seconds.pop(-1, 0.0)
    return seconds, order


def on_meta(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    """Return a copy of model and inputs without contents, for counting."""
    import copy

    import torch

    with torch.device("meta"):
        empty = copy.deepcopy(model).to("meta")
    return empty, _moved(inputs, "meta")


def moved_to(model: nn.Module, inputs: Any, device: str) -> tuple[nn.Module, Any]:
    """Return model and inputs on a device."""
    return model.to(device), _moved(inputs, device)


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    return value.to(device)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def _mean(outputs: Any) -> torch.Tensor:
    """Return a scalar that depends on every output, for models whose loss is unknown."""
    total = sum(t.float().mean() for t in _tensors(outputs) if t.requires_grad)
    if isinstance(total, int):
        raise ConfigError("no output of the model requires a gradient; return the model in training mode")
    return total


def _tensors(value: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
