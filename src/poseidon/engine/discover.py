"""Splits a model into units: which module owns which parameters, and in which exact form their gradients can travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from poseidon.errors import ConfigError, UnsupportedError
from poseidon.routes.base import LiveUnit
from poseidon.units import Kind, ParameterSpec, Unit

ROOT = "(root)"


def find_units(model: nn.Module, ignored: Collection[str] = ()) -> list[LiveUnit]:
    """Return the model's units with at least one trainable parameter, in the order of ``model.modules()``.

    A parameter that several modules share belongs to the first of them, and its unit is dense: its gradient is a sum
    over different uses, which has no known short form. So is every unit in a module compiled as one graph
    (``fullgraph=True``), in which no layer can hand over anything else. ``ignored`` names parameters to skip.
    """
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    whole_graphs = {id(part) for module in model.modules() if _is_one_graph(module) for part in module.modules()}
    seen: set[int] = set()
    units: list[LiveUnit] = []
    for path, module in model.named_modules():
        mine = [(name, p) for name, p in _trainable(path, module, ignored) if id(p) not in seen]
        seen.update(id(p) for _, p in mine)
        if not mine:
            continue
        is_plain = id(module) in whole_graphs or any(uses[id(p)] > 1 for _, p in mine)
        kind: Kind = "dense" if is_plain else _kind(module, [p for _, p in mine])
        specs = tuple(ParameterSpec(name, tuple(p.shape), p.element_size()) for name, p in mine)
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and len(mine) > 1:
            raise UnsupportedError(
                f"{path or ROOT}: an embedding with sparse=True must have exactly one parameter; it has {len(mine)}. "
                "Use sparse=False: only touched rows travel anyway"
            )
        # A compiled module holds the real one: a unit's name does not depend on that.
        name = path.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")
        spec = Unit(name or ROOT, "embedding" if is_sparse else kind, specs, is_sparse)
        units.append(LiveUnit(len(units), spec, module, tuple(p for _, p in mine)))
    return units


def _trainable(path: str, module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for short, parameter in module.named_parameters(recurse=False):
        name = f"{path}.{short}" if path else short
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"parameter {name} has no shape yet (a lazy module); run one batch through the model first"
            )
        if parameter.requires_grad and name not in ignored:
            yield name, parameter


def _kind(module: nn.Module, parameters: list[nn.Parameter]) -> Kind:
    weight = getattr(module, "weight", None)
    if weight is None or not parameters or parameters[0] is not weight or not weight.is_floating_point():
        return "dense"
    # Exactly these classes: a subclass may use its weight in some other way.
    if type(module) is nn.Linear and _owns_only(module, "weight", "bias"):
        return "linear"
    if type(module) in (nn.Embedding, nn.EmbeddingBag) and _owns_only(module, "weight"):
        has_rows = not module.scale_grad_by_freq and getattr(module, "mode", "") != "max"
        return "embedding" if has_rows else "dense"
    return "dense"


def _is_one_graph(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "dynamo_ctx", None), "fullgraph", False))


def _owns_only(module: nn.Module, *names: str) -> bool:
    return set(module._parameters) <= set(names)


def tensors_of(model: nn.Module, ignored: Collection[str] = (), with_buffers: bool = True) -> list[torch.Tensor]:
    """Return every parameter (frozen ones too) and every buffer that replicas must share, without duplicates."""
    named = [*model.named_parameters(), *(model.named_buffers() if with_buffers else ())]
    return [tensor.detach() for name, tensor in named if name not in ignored]
