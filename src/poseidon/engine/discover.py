"""Splits a model into units: which module owns which parameters, and in which exact form their gradients can travel."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import nn
from torch.jit import ScriptModule
from torch.nn.parameter import UninitializedParameter

from poseidon.errors import UnsupportedError
from poseidon.routes.base import LiveUnit, can_be_served
from poseidon.units import Kind, ParameterSpec, Unit

ROOT = "(root)"


def frozen_parameters(model: nn.Module, ignored: Collection[str] = ()) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that take no part, with their names, because they require no gradient now."""
    return [(name, p) for name, p in model.named_parameters() if not p.requires_grad and name not in ignored]


def check_still_frozen(frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise if one of these requires a gradient by now: each worker would train it by itself."""
    odd = [name for name, parameter in frozen if parameter.requires_grad]
    if odd:
        more = f" and {len(odd) - 1} more" if odd[1:] else ""
        raise UnsupportedError(
            f"parameter {odd[0]}{more} requires a gradient now and did not when the model was wrapped, so its "
            "gradients are not exchanged. Wrap (or distribute) the model while it requires one, and freeze it "
            "afterwards, with find_unused_parameters=True; or call close() and wrap again after unfreezing"
        )


def check_same_parameters(model: nn.Module, known: Collection[int]) -> None:
    """Raise if the model has a trainable parameter whose id is not among these: nobody would exchange it."""
    odd = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in known
    ]
    if odd:
        more = f" and {len(odd) - 1} more" if odd[1:] else ""
        raise UnsupportedError(
            f"parameter {odd[0]}{more} is trained and was not when the model was distributed: it has been replaced by "
            "another object, or unfrozen, since. Change values in place (load_state_dict without assign, copy_), or "
            "call close() and distribute the model again"
        )


def find_units(model: nn.Module, ignored: Collection[str] = ()) -> list[LiveUnit]:
    """Return the model's units with at least one trainable parameter, in the order of ``model.modules()``.

    A parameter that several modules share belongs to the first of them. If these are an embedding and a linear layer
    without a bias, its unit is tied; otherwise dense: its gradient is a sum over different uses, which has no known
    short form. Dense, too, is every unit in a module that is scripted or compiled as one graph (``fullgraph=True``), in
    which no layer can hand over anything else. ``ignored`` names parameters to skip.
    """
    users: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(module)
    whole_graphs = {id(part) for module in model.modules() if _is_one_graph(module) for part in module.modules()}
    seen: set[int] = set()
    units: list[LiveUnit] = []
    for path, module in model.named_modules():
        mine = [(name, p) for name, p in _trainable(path, module, ignored) if id(p) not in seen]
        seen.update(id(p) for _, p in mine)
        if not mine:
            continue
        head: nn.Module | None = None
        kind: Kind = "dense"
        if id(module) not in whole_graphs:
            if all(len(users[id(p)]) == 1 for _, p in mine):
                kind = _kind(module, [p for _, p in mine])
            elif (pair := _tied(users[id(mine[0][1])])) is not None:
                kind, (module, head) = "tied", pair
        specs = tuple(ParameterSpec(name, tuple(p.shape), p.element_size()) for name, p in mine)
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and len(mine) > 1:
            raise UnsupportedError(
                f"{path or ROOT}: an embedding with sparse=True must have exactly one parameter; it has {len(mine)}. "
                "Use sparse=False: only touched rows travel anyway"
            )
        # A compiled module holds the real one: a unit's name does not depend on that.
        name = path.replace("_orig_mod.", "").removesuffix("_orig_mod").removesuffix(".")
        parameters = tuple(p for _, p in mine)
        is_served = all(map(can_be_served, parameters))
        spec = Unit(name or ROOT, "embedding" if is_sparse else kind, specs, is_sparse, is_served)
        units.append(LiveUnit(len(units), spec, module, parameters, head, is_conv1d(type(module))))
    return units


def only_dense(unit: LiveUnit, keeps_tied: bool = False) -> LiveUnit:
    """Return a unit whose gradient travels in full only; that of a tied table in any form, if ``keeps_tied``."""
    if unit.spec.kind == "tied" and keeps_tied:
        return unit
    if unit.spec.is_sparse:
        raise UnsupportedError(f'{unit.name}: sparse=True makes sparse gradients, which update="server" does not take')
    return replace(unit, spec=replace(unit.spec, kind="dense"), head=None)


def _trainable(path: str, module: nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for short, parameter in module.named_parameters(recurse=False):
        name = f"{path}.{short}" if path else short
        if isinstance(parameter, UninitializedParameter):
            raise UnsupportedError(
                "Modules with uninitialized parameters can't be used with `DistributedDataParallel`: parameter "
                f"{name} has no shape yet (a lazy module); run one batch through the model first"
            )
        if parameter.requires_grad and name not in ignored:
            yield name, parameter


def _kind(module: nn.Module, parameters: Sequence[torch.Tensor]) -> Kind:
    # A parametrised weight is computed when it is read, and a spectral norm then takes another step: look, do not read.
    weight = module._parameters.get("weight")
    if weight is None or not parameters or parameters[0] is not weight or not weight.is_floating_point():
        return "dense"
    # Exactly these classes: a subclass may use its weight in some other way.
    if (type(module) is nn.Linear or is_conv1d(type(module))) and _owns_only(module, "weight", "bias"):
        return "linear"
    if type(module) in (nn.Embedding, nn.EmbeddingBag) and _owns_only(module, "weight"):
        has_rows = not module.scale_grad_by_freq and getattr(module, "mode", "") != "max"
        return "embedding" if has_rows and _adds_rows(weight.dtype, weight.device.type) else "dense"
    return "dense"


@cache
def _adds_rows(dtype: torch.dtype, device: str) -> bool:
    """Return whether autograd can add up the rows of two look-ups; PyTorch cannot in float16 on a CPU."""
    if dtype is not torch.float16 or device != "cpu":
        return True
    number = torch.zeros(1, 1, dtype=torch.int64, device=device)
    rows = torch.sparse_coo_tensor(number, torch.zeros(1, 1, dtype=dtype, device=device), (1, 1))
    try:
        rows + rows
    except NotImplementedError:
        return False
    return True


def is_conv1d(kind: type) -> bool:
    """Return whether a class is transformers' Conv1D: a linear layer whose weight is inputs x outputs."""
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


def _tied(modules: list[nn.Module]) -> tuple[nn.Module, nn.Module] | None:
    """Return the table and the linear layer, if these modules are such a pair with a common weight."""
    tables = [module for module in modules if type(module) is nn.Embedding]
    heads = [module for module in modules if type(module) is nn.Linear]
    if len(modules) != 2 or len(tables) != 1 or len(heads) != 1:
        return None
    (table,), (head,) = tables, heads
    has_rows = not table.sparse and _kind(table, [table.weight]) == "embedding" and table.weight.is_contiguous()
    has_factors = _kind(head, [head.weight]) == "linear" and set(dict(head.named_parameters())) == {"weight"}
    return (table, head) if has_rows and has_factors else None


def _is_one_graph(module: nn.Module) -> bool:
    if isinstance(module, ScriptModule):
        return True
    if "_orig_mod" in module._modules:
        return bool(getattr(getattr(module, "dynamo_ctx", None), "fullgraph", False))
    # torch.compile(net.forward) does not say whether its graph may be broken.
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def _owns_only(module: nn.Module, *names: str) -> bool:
    return set(module._parameters) <= set(names)


def tensors_of(model: nn.Module, ignored: Collection[str] = (), with_buffers: bool = True) -> list[torch.Tensor]:
    """Return every parameter (frozen ones too) and every buffer that replicas must share, without duplicates."""
    named = [*model.named_parameters(), *(model.named_buffers() if with_buffers else ())]
    return [tensor.detach() for name, tensor in named if name not in ignored]
