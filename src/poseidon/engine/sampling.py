"""Measures the load on every unit in one forward of a sample batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from poseidon.planning.cluster import Cluster
from poseidon.planning.lossy import read_lossy
from poseidon.planning.planner import Plan, make_plan
from poseidon.planning.route import Routes
from poseidon.routes import standard_routes
from poseidon.routes.lossy import lossy_routes
from poseidon.units import Load

if TYPE_CHECKING:
    from torch import Tensor, nn

    from poseidon.routes.base import LiveUnit


def plan(
    model: nn.Module,
    sample_inputs: Any,
    cluster: Cluster,
    routes: Mapping[str, str] | None = None,
    *,
    lossy: str | Mapping[str, str] | None = None,
    rank: int | None = None,
    density: float | None = None,
    block_size: int | None = None,
) -> Plan:
    """Return the plan for training ``model`` on ``cluster`` with one worker's batch ``sample_inputs``.

    Inputs are a tensor, a tuple of positional arguments or a dict of keyword arguments. Runs one forward of the model
    in evaluation mode, without gradients. For training under autocast, call it under autocast: factors are then counted
    in the short type. ``routes``, ``lossy`` and its options are those of
    :class:`~poseidon.DistributedDataParallel`.
    """
    from poseidon.engine.discover import find_units

    choice = read_lossy(lossy, rank, density, block_size)
    units = find_units(model)
    specs = [unit.spec for unit in units]
    known = Routes([*standard_routes().values(), *lossy_routes(choice)])
    forced = {} if choice is None else choice.forced(specs, known)
    loads = sample_loads(model, units, sample_inputs)
    return make_plan(specs, loads, cluster, known, {**forced, **(routes or {})})


def sample_filled(units: Sequence[LiveUnit], loads: Mapping[str, Load], train: Callable[[], object]) -> dict[str, Load]:
    """Return the loads with the share of factors that are not zero, as ``train``, a forward and backward, shows it."""
    import torch

    from poseidon.routes.room import count_filled

    filled: dict[str, Tensor] = {}
    sizes: Counter[str] = Counter()

    def count(unit: LiveUnit, factor: Tensor) -> None:
        # Not the tensors themselves: all together they may not fit into the device's memory.
        filled[unit.name] = count_filled(factor) + filled.get(unit.name, 0)
        sizes[unit.name] += factor.numel()

    def record(unit: LiveUnit, x: Tensor, out: Any) -> None:
        if isinstance(out, torch.Tensor) and out.requires_grad:
            count(unit, x)
            out.register_hook(lambda g: count(unit, g))

    handles = [
        unit.module.register_forward_hook(
            lambda _, inputs, named, out, unit=unit: record(unit, inputs[0] if inputs else named["input"], out),
            with_kwargs=True,
        )
        for unit in units
        if unit.spec.kind == "linear" and unit.module is not None
    ]
    try:
        train()
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: replace(load, filled=int(filled[name]) / max(sizes[name], 1)) if name in filled else load
        for name, load in loads.items()
    }


def sample_loads(model: nn.Module, units: list[LiveUnit], sample_inputs: Any) -> dict[str, Load]:
    """Return the load on each linear and embedding unit in one forward."""
    import torch

    from poseidon.engine.layers import linear_dtype

    loads: dict[str, Load] = {}

    def record(unit: LiveUnit, module: nn.Module, x: Tensor) -> None:
        if unit.spec.kind == "linear" or module is unit.head:
            load = Load(x.numel() // max(x.shape[-1], 1), linear_dtype(x, unit.weight).itemsize)
        else:
            table_rows, _ = unit.spec.matrix
            count = min(x.numel(), table_rows) if x.is_meta else torch.unique(x).numel()
            # One row of the input is a bag.
            bags = len(x) if isinstance(module, torch.nn.EmbeddingBag) and x.dim() == 2 else 0
            load = Load(0, 0, count) if unit.spec.kind == "tied" else Load(count, bags=bags)
        loads[unit.name] = loads[unit.name].plus(load) if unit.name in loads else load

    handles = [
        module.register_forward_pre_hook(
            lambda module, inputs, named, unit=unit: record(unit, module, inputs[0] if inputs else named["input"]),
            with_kwargs=True,
        )
        for unit in units
        if unit.spec.kind != "dense"
        for module in (unit.module, unit.head)
        if module is not None
    ]
    was_training = model.training
    model.eval()  # sampling must not update BatchNorm's statistics
    try:
        with torch.no_grad():
            if isinstance(sample_inputs, Mapping):
                model(**sample_inputs)
            elif isinstance(sample_inputs, tuple):
                model(*sample_inputs)
            else:
                model(sample_inputs)
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    return loads
