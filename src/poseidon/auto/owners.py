"""From trained parameters to the modules that own them, and to units for the engine."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from poseidon.engine.discover import find_units
from poseidon.following.patches import Patches
from poseidon.routes.base import LiveUnit
from poseidon.units import ParameterSpec, Unit


@dataclass(frozen=True)
class Holding:
    """Trained parameters and the outermost modules that own them."""

    roots: tuple[nn.Module, ...]
    units: tuple[LiveUnit, ...]
    loose: tuple[Tensor, ...]
    """Parameters that no module owns."""

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the trained parameters with names that are equal on all workers."""
        return [
            (spec.name, parameter)
            for unit in self.units
            for parameter, spec in zip(unit.parameters, unit.spec.parameters, strict=True)
        ]

    def describe(self) -> str:
        """Name the modules and count the parameters."""
        names = [root._get_name() for root in self.roots] + [f"{len(self.loose)} tensors"] * bool(self.loose)
        count = sum(parameter.numel() for _, parameter in self.named())
        return f"{', '.join(names)}, {count:,} parameters"


def holding_tensors(loose: Iterable[Tensor], roots: Iterable[nn.Module]) -> list[Tensor]:
    """Return everything that replicas share, including frozen parameters and buffers of the modules."""
    owned = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
    return list({id(tensor): tensor for tensor in [*owned, *loose]}.values())


class Census:
    """Tracks every living module."""

    def __init__(self) -> None:
        # By id: a script's modules may define their own equality.
        self._modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()

    def install(self, patches: Patches) -> None:
        """Register the existing modules and, from now on, those that are created, copied or unpickled."""
        for found in gc.get_objects():
            if issubclass(type(found), nn.Module):
                self._modules[id(found)] = found
        patches.wrap(nn.Module, "__init__", self._made)
        patches.wrap(nn.Module, "__setstate__", self._made)

    def living(self) -> list[nn.Module]:
        """Return the modules in use."""
        gc.collect()  # an unreachable module may already be freed on one worker and not yet on another
        return list(self._modules.values())

    def _made(self, original: Callable[..., None], module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        self._modules[id(module)] = module


def living_leaves() -> Iterator[Tensor]:
    """Give all tensors that anybody could train. Takes tens of milliseconds."""
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and found.is_leaf and found.requires_grad:
            yield found


class Elders:
    """Leaves that were there before a script got its next batches: it trains them, whatever their sizes."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()

    def look(self) -> None:
        """Note all that there are."""
        for leaf in living_leaves():
            self._known[leaf] = None

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._known


def find_roots(parameters: Sequence[Tensor], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the outermost of the modules that own any of the parameters, in the order of the parameters."""
    place = {id(parameter): i for i, parameter in enumerate(parameters)}
    owning: list[tuple[int, int, nn.Module]] = []
    for module in modules:
        places = [place[id(p)] for p in _parameters_of(module) if id(p) in place]
        if places:
            owning.append((min(places), -len(places), module))
    inner = {id(child) for _, _, module in owning for child in module.modules() if child is not module}
    roots = [entry for entry in owning if id(entry[2]) not in inner]
    return [module for _, _, module in sorted(roots, key=lambda entry: entry[:2])]


def _parameters_of(module: nn.Module) -> Iterable[Tensor]:
    # A module whose __init__ has not run (or never will) lacks torch's own fields.
    return module.parameters() if "_parameters" in module.__dict__ else ()


def find_holding(parameters: Sequence[Tensor], modules: Iterable[nn.Module]) -> Holding:
    """Divide parameters into units: a layer's parameters travel together, by the routes that the layer allows."""
    wanted = {id(parameter) for parameter in parameters}
    roots = find_roots(parameters, modules)
    units: list[LiveUnit] = []
    kept: list[nn.Module] = []
    labels = Counter(root._get_name() for root in roots)
    seen: Counter[str] = Counter()
    for root in roots:
        ignored = [name for name, p in root.named_parameters(remove_duplicate=False) if id(p) not in wanted]
        found = find_units(root, ignored)
        if not found:
            continue
        kept.append(root)
        label = root._get_name()
        seen[label] += 1
        prefix = f"{label}{seen[label]}" if labels[label] > 1 else label
        units += [_named(unit, prefix, len(units) + i) for i, unit in enumerate(found)]
        wanted -= {id(p) for unit in found for p in unit.parameters}
    loose = [parameter for parameter in parameters if id(parameter) in wanted]
    units += [_loose_unit(tensor, i, len(units) + i) for i, tensor in enumerate(loose)]
    return Holding(tuple(kept), tuple(units), tuple(loose))


def _named(unit: LiveUnit, prefix: str, index: int) -> LiveUnit:
    specs = tuple(replace(spec, name=f"{prefix}.{spec.name}") for spec in unit.spec.parameters)
    return replace(unit, index=index, spec=replace(unit.spec, name=f"{prefix}.{unit.name}", parameters=specs))


def _loose_unit(tensor: Tensor, number: int, index: int) -> LiveUnit:
    name = f"tensor{number}"
    spec = ParameterSpec(name, tuple(tensor.shape), tensor.element_size())
    return LiveUnit(index, Unit(name, "dense", (spec,)), None, (tensor,))  # type: ignore[arg-type]
