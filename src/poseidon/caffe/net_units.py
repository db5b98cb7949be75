"""From a net to its units: what each layer exchanges with the other workers, and in which exact form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from poseidon.caffe.layers.base import Layer
from poseidon.caffe.layers.embed import Embed
from poseidon.caffe.layers.inner_product import InnerProduct
from poseidon.caffe.learnable import LearnableParam
from poseidon.caffe.net import Net
from poseidon.routes.base import FactorPair, LiveUnit
from poseidon.units import Kind, Load, ParameterSpec, Unit

Rows = tuple[torch.Tensor, torch.Tensor]
"""Numbers of rows of a table, and a gradient for each."""


@dataclass(eq=False)
class NetUnit:
    """A unit of the engine together with the layer and the blobs it stands for."""

    live: LiveUnit
    layer_index: int
    layer: Layer
    entries: tuple[LearnableParam, ...]
    """In the order of the unit's parameters."""
    rows: list[Rows] = field(default_factory=list)
    """Embed: what the passes of this iteration have looked up."""

    @property
    def kind(self) -> Kind:
        """In which form its gradient can travel."""
        return self.live.spec.kind

    def load(self, net: Net) -> Load:
        """Return what the last forward pass asks of a linear or embedding unit."""
        if self.kind == "linear":
            return Load(net.tops_of(self.layer_index)[0].count // self.layer.param.inner_product_param.num_output)
        return Load(torch.unique(net.bottoms_of(self.layer_index)[0].data_tensor).numel())

    def order_factors(self, top_diff: torch.Tensor, bottom_rows: torch.Tensor) -> FactorPair:
        """Return the factors of a pass as the engine takes them; a transposed weight swaps their roles."""
        is_transposed = self.layer.param.inner_product_param.transpose
        return (top_diff, bottom_rows) if is_transposed else (bottom_rows, top_diff)

    def take_rows(self) -> torch.Tensor | None:
        """Return the rows of all passes as one sparse gradient; None if there were none."""
        rows, self.rows = self.rows, []
        if not rows:
            return None
        numbers = torch.cat([numbers for numbers, _ in rows]).unsqueeze(0)
        values = torch.cat([values for _, values in rows])
        return torch.sparse_coo_tensor(numbers, values, self.live.weight.shape, check_invariants=False)


def find_net_units(net: Net) -> list[NetUnit]:
    """Return the units of all parameters that get gradients, in the order of the layers.

    A parameter that several layers share belongs to its owner and is dense: its gradient is a sum over different uses.
    """
    units: list[NetUnit] = []
    for index, layer in enumerate(net.layers):
        mine = [entry for entry in net.learnable if entry.layer_index == index and gets_gradient(net, entry)]
        for kind, entries in _split(layer, mine):
            units.append(_make_unit(len(units), index, layer, kind, entries, {unit.live.name for unit in units}))
    return units


def gets_gradient(net: Net, entry: LearnableParam) -> bool:
    """Whether any layer that uses a parameter computes a gradient for it."""
    return any(
        net.layers[layer].needs_backward and net.layers[layer].param_propagate_down[number]
        for layer, number in entry.users
    )


def _split(layer: Layer, entries: Sequence[LearnableParam]) -> Iterator[tuple[Kind, Sequence[LearnableParam]]]:
    """Yield a layer's parameters as they travel: a weight with its factors or rows, and what does not fit them."""
    if not entries:
        return
    is_own_weight = entries[0].param_index == 0 and all(len(entry.users) == 1 for entry in entries)
    if is_own_weight and type(layer) is InnerProduct:
        # The bias is the sum of the factor that the weight's rows belong to: of a transposed weight, the wrong one.
        together = 1 if layer.param.inner_product_param.transpose else 2
        yield "linear", entries[:together]
        entries = entries[together:]
    elif is_own_weight and type(layer) is Embed:
        yield "embedding", entries[:1]
        entries = entries[1:]
    if entries:
        yield "dense", entries


def _make_unit(
    number: int, layer_index: int, layer: Layer, kind: Kind, entries: Sequence[LearnableParam], taken: set[str]
) -> NetUnit:
    name = layer.name if layer.name not in taken else f"{layer.name}[{layer_index}.{entries[0].param_index}]"
    parameters = tuple(nn.Parameter(entry.blob.data_tensor) for entry in entries)
    specs = tuple(
        ParameterSpec(f"{layer.name}.{entry.param_index}", tuple(p.shape), p.element_size())
        for entry, p in zip(entries, parameters, strict=True)
    )
    live = LiveUnit(number, Unit(name, kind, specs), None, parameters)
    return NetUnit(live, layer_index, layer, tuple(entries))
