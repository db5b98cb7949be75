"""Load of every unit for a sample batch: one forward on the meta device, or on the real one where that fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from poseidon.planning.cluster import Cluster
from poseidon.planning.planner import Plan, make_plan
from poseidon.units import Load

if TYPE_CHECKING:
    from torch import Tensor, nn

    from poseidon.routes.base import LiveUnit


def plan(model: nn.Module, sample_inputs: Any, cluster: Cluster, routes: Mapping[str, str] | None = None) -> Plan:
    """Return the plan for training ``model`` on ``cluster`` with one worker's batch ``sample_inputs``.

    Inputs are a tensor, a tuple of positional arguments or a dict of keyword arguments. Runs one forward of the
    model in its present mode, without gradients.
    """
    from poseidon.engine.discover import find_units

    units = find_units(model)
    loads = sample_loads(model, units, sample_inputs)
    return make_plan([unit.spec for unit in units], loads, cluster, routes)


def sample_loads(model: nn.Module, units: list[LiveUnit], sample_inputs: Any) -> dict[str, Load]:
    """Return the load on each linear and embedding unit in one forward."""
    import torch

    loads: dict[str, Load] = {}

    def record(unit: LiveUnit, inputs: tuple[Tensor, ...]) -> None:
        if unit.spec.kind == "linear":
            rows = inputs[0].numel() // max(inputs[0].shape[-1], 1)
        else:
            table_rows, _ = unit.spec.matrix
            rows = min(inputs[0].numel(), table_rows) if inputs[0].is_meta else torch.unique(inputs[0]).numel()
        before = loads.get(unit.name, Load(0))
        loads[unit.name] = Load(before.rows + rows)

    handles = [
        unit.module.register_forward_pre_hook(lambda _, inputs, unit=unit: record(unit, inputs))
        for unit in units
        if unit.spec.kind != "dense" and unit.module is not None
    ]
    try:
        with torch.no_grad():
            if isinstance(sample_inputs, Mapping):
                model(**sample_inputs)
            elif isinstance(sample_inputs, tuple):
                model(*sample_inputs)
            else:
                model(sample_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return loads
