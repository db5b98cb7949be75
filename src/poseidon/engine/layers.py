"""Step 1 of the journey for layers whose gradients travel in a short form: they hand that over in their own backward.

After: ``backward.py``, by way of the engine. While its factors travel, a linear layer has a class whose forward leads
to a backward that hands over the factors and skips the weight gradient; an embedding whose rows travel gets sparse
gradients. If a linear layer has the weight of an embedding, its backward may hand over the weight's gradient apart, so
that it leaves before the embedding's is known. ``hooks.py`` gives layers these classes and takes them back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.engine.compiled import uncompiled
from poseidon.engine.discover import is_conv1d
from poseidon.engine.pending import land
from poseidon.engine.watched import use_in_linear
from poseidon.routes.base import LiveUnit
from poseidon.routes.room import count_filled, is_plain
from poseidon.units import Load

if TYPE_CHECKING:
    from poseidon.engine.hooks import AutogradFrontEnd

_LIVE: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[AutogradFrontEnd], int]] = weakref.WeakKeyDictionary()
"""Layers that are units of an engine. Copies of a layer are not registered, so they are plain layers."""

_WIDE_BYTES = 4
"""Of a value in a type whose rows PyTorch adds up however they lie."""


def _find(module: nn.Module) -> tuple[AutogradFrontEnd, LiveUnit] | None:
    front_end_ref, index = _LIVE.get(module, (None, 0))
    front_end = None if front_end_ref is None else front_end_ref()
    return None if front_end is None else (front_end, front_end.engine.units[index])


class HeadCall:
    """One forward of a tied unit's head; it lives as long as the graph in which its backward is."""


def specialise(unit: LiveUnit, front_end: AutogradFrontEnd) -> None:
    """Let the layers of a unit hand over what is shorter than their gradients, where the engine wants it."""
    for module in (unit.module, unit.head):
        special = None if module is None or unit.spec.is_sparse else _special_class(type(module))
        if module is not None and special is not None:
            _LIVE[module] = (weakref.ref(front_end), unit.index)
            module.__class__ = special


def restore(unit: LiveUnit) -> None:
    """Give the layers of a unit their own class back."""
    for module in (unit.module, unit.head):
        if module is not None and type(module) in _PLAIN:
            _LIVE.pop(module, None)
            module.__class__ = _PLAIN[type(module)]


class _PlainOutside:
    """Makes a layer copy, pickle and print as the plain class it stands for."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As nn.Module does: what was compiled, or replaced, belongs to this object.
        state = {name: value for name, value in self.__dict__.items() if name != "_compiled_call_impl"}
        return object.__new__, (_PLAIN[type(self)],), state

    def _get_name(self) -> str:
        return _PLAIN[type(self)].__name__


class FactorLinear(_PlainOutside, nn.Linear):
    """A linear layer whose backward can hand over factors instead of computing the weight's gradient."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's own name
        """Apply the layer."""
        return _apply(self, input, super().forward)


class _FactorConv1D(_PlainOutside):
    """Mixed into transformers' Conv1D, which need not be installed: does for it what FactorLinear does."""

    @uncompiled
    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return _apply(self, x, super().forward)  # type: ignore[misc]


def _has_hooks(module: nn.Module) -> bool:
    """Whether the user has hooks on a parameter's gradient, which must then exist in full."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in module.parameters(recurse=False))


def _is_traced(tensor: Any) -> bool:
    """Whether a layer is recorded, by ``torch.fx`` or ``torch.jit.trace``: for others, who shall find it plain."""
    return not isinstance(tensor, Tensor) or torch._C._get_tracing_state() is not None


class RowsEmbedding(_PlainOutside, nn.Embedding):
    """An embedding whose gradient can come as touched rows."""

    @uncompiled
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Embedding's own name
        """Look the rows up."""
        with _rows_wanted(self, input) as rows:
            return rows.keep_addable(rows.watch(super().forward(input)))


class RowsEmbeddingBag(_PlainOutside, nn.EmbeddingBag):
    """An embedding bag whose gradient can come as touched rows."""

    @uncompiled
    def forward(
        self,
        input: Tensor,  # noqa: A002 - nn.EmbeddingBag's own name
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look the rows up and combine them."""
        with _rows_wanted(self, input) as rows:
            return rows.watch(super().forward(input, offsets, per_sample_weights))


_SPECIAL: dict[type, type] = {
    nn.Linear: FactorLinear,
    nn.Embedding: RowsEmbedding,
    nn.EmbeddingBag: RowsEmbeddingBag,
}
_PLAIN: dict[type, type] = {special: plain for plain, special in _SPECIAL.items()}


def _special_class(plain: type) -> type | None:
    """Return the class that stands for another while its layers' gradients may travel in a short form."""
    if plain not in _SPECIAL and is_conv1d(plain):
        special = _SPECIAL[plain] = type("FactorConv1D", (_FactorConv1D, plain), {})
        _PLAIN[special] = plain
    return _SPECIAL.get(plain)


class _rows_wanted:  # noqa: N801 - reads as a statement in `with`
    """Makes a module's ``sparse`` true during one forward if the engine wants rows; counts rows while it observes."""

    def __init__(self, module: nn.Embedding | nn.EmbeddingBag, indices: Tensor) -> None:
        self._module = module
        self._indices = indices
        is_run = torch.is_grad_enabled() and not _is_traced(indices)
        found = _find(module) if is_run and is_plain(indices) and not _has_hooks(module) else None
        self._found = found if found is not None and _is_own(module, found[1]) else None
        self._is_on = self._found is not None and self._found[0].engine.makes_rows(self._found[1])

    def __enter__(self) -> _rows_wanted:
        self._module.sparse = self._is_on
        return self

    def __exit__(self, *_: object) -> None:
        self._module.sparse = False

    def keep_addable(self, out: Tensor) -> Tensor:
        """Let the rows that come be contiguous: on a CPU, PyTorch adds up no others in bfloat16.

        They would not be where one sum takes up all rows that were looked up, whose gradients are then one.
        """
        is_short = out.element_size() < _WIDE_BYTES and not out.is_cuda
        if self._is_on and is_short and out.grad_fn is not None:
            out.grad_fn.register_prehook(_make_contiguous)
        return out

    def watch(self, out: Tensor) -> Tensor:
        """Count the rows, if the engine observes."""
        if self._found is not None and self._found[0].engine.is_observing:
            count = torch.unique(self._indices).numel()
            is_tied = self._found[1].spec.kind == "tied"
            _observe(out, self._found, Load(0, 0, count) if is_tied else Load(count))
        return out


def _make_contiguous(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if one is None else one.contiguous() for one in gradients)


def _observe(out: Tensor, found: tuple[AutogradFrontEnd, LiveUnit], load: Load, x: Tensor | None = None) -> None:
    """Record the load of one forward of a layer when its backward runs, if that exchanges gradients.

    Not in forward: a checkpoint runs it twice, and under no_sync() no exchange follows. ``x``: a linear layer's input.
    """
    front_end, unit = found
    # Not the input itself, which a checkpoint, for example, does not keep.
    filled, size = (None, 0) if x is None else (count_filled(x), x.numel())

    def observe(_: Any, gradients: tuple[Tensor | None, ...]) -> None:
        if front_end.exchanges and front_end.will_accumulate(unit.weight):
            front_end.begin()
        if front_end.engine.is_observing and front_end.engine.in_backward:
            front_end.engine.observe(unit, load if filled is None else _with_filled(load, filled, size, gradients))

    if out.grad_fn is not None:
        # After the node, and so after the hooks on the model's outputs, of which this may be one.
        out.grad_fn.register_hook(observe)


def _with_filled(load: Load, filled: Tensor, size: int, gradients: Iterable[Tensor | None]) -> Load:
    """Return a load with the share of values that are not zero, given their count in X, X's size, and G."""
    present = [g for g in gradients if g is not None]
    count = int(filled) + sum(int(count_filled(g)) for g in present)
    return replace(load, filled=count / max(size + sum(g.numel() for g in present), 1))


def _apply(module: Any, x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a linear layer: with a backward that hands over factors, if the engine wants them."""
    weight, bias = module.weight, module.bias
    is_run = torch.is_grad_enabled() and not _is_traced(weight)
    found = _find(module) if is_run and weight.requires_grad and not _has_hooks(module) else None
    if found is None or not _is_own(module, found[1]) or not is_plain(x):
        return plain(x)
    # What the engine wants depends on the last step. And the function below saves the weight without touching it.
    land(weight, bias)
    front_end, unit = found
    dtype = linear_dtype(x, weight)
    makes_head = front_end.engine.makes_head(unit)
    if makes_head or front_end.engine.makes_factors(unit):
        function: Any = _FactorLinearFunction
        if torch.is_autocast_enabled(x.device.type):
            # As autocast does it; done here so that the factors travel in the short type too.
            x = x.to(dtype)
        call = front_end.expect_head(unit) if makes_head else None
        use_in_linear(weight)
        out: Tensor = function.apply(x, weight, bias, dtype, front_end, unit, call)
        return out
    out = plain(x)
    if front_end.engine.is_observing:
        _observe(out, found, Load(x.numel() // max(x.shape[-1], 1), dtype.itemsize), x)
    return out


def _is_own(module: nn.Module, unit: LiveUnit) -> bool:
    """Whether a layer uses its unit's own parameters now.

    Not what a parametrization, pruning or ``torch.func.functional_call`` computes from them: its gradient is not
    theirs. Nor may torch.func look into a backward that hands over anything.
    """
    is_transformed: bool = torch._C._are_functorch_transforms_active()
    used = (getattr(module, name, None) for name in ("weight", "bias"))
    return not is_transformed and all(one is None or any(one is own for own in unit.parameters) for one in used)


def linear_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes here: autocast's, or its own."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return weight.dtype


class _FactorLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        front_end: AutogradFrontEnd,
        unit: LiveUnit,
        call: HeadCall | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.front_end, ctx.unit, ctx.call = front_end, unit, call
        with torch.autocast(x.device.type, enabled=False), torch._C.DisableTorchFunctionSubclass():
            if unit.is_transposed:
                assert bias is not None
                rows = torch.addmm(bias.to(dtype), x.reshape(-1, x.shape[-1]), weight.to(dtype))
                return rows.view(*x.shape[:-1], rows.shape[-1])
            return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        is_last_head = ctx.call is not None and ctx.front_end.is_last_head(ctx.unit, ctx.call)
        if g is None:  # this output has no part in what is differentiated
            return (None,) * 7
        x, weight = ctx.saved_tensors
        front_end, unit = ctx.front_end, ctx.unit
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with torch._C.DisableTorchFunctionSubclass():
            grad_x = g @ (weight.t() if unit.is_transposed else weight).to(g.dtype) if needs_x else None
        rows_x, rows_g = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
        first, second = (rows_g, rows_x) if unit.is_transposed else (rows_x, rows_g)
        engine = front_end.engine
        if needs_weight and front_end.will_accumulate(unit.weight):
            if front_end.exchanges:
                front_end.begin()
            # Under create_graph the caller differentiates again, which factors do not support.
            if engine.collects(unit) and not torch.is_grad_enabled():
                engine.give(unit, first.detach(), second.detach())
                return (grad_x, *[None] * 6)
            if engine.collects_head(unit) and not torch.is_grad_enabled():
                gradient = (second.t() @ first).to(weight.dtype)
                engine.give_head(unit, gradient, is_last_head)
                return (grad_x, *[None] * 6)
        grad_weight = (second.t() @ first).to(weight.dtype) if needs_weight else None
        grad_bias = rows_g.sum(0).to(weight.dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None
