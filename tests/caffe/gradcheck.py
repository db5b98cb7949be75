"""Checks a layer's backward pass against finite differences of its forward pass.

The layer runs in double precision for the differences, and once more in single precision, the way nets run it, so
that fast paths taken for single precision alone are checked too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

import poseidon.caffe as caffe
from poseidon.caffe.blob import Blob
from poseidon.caffe.pycaffe import Net
from poseidon.caffe.schema import NetParameter
from poseidon.caffe.schema.files import parse_text

STEP = 1e-5
ENTRIES = 40


def check_gradients(
    layer: str,
    bottoms: Sequence[np.ndarray],
    *,
    tops: int = 1,
    wrt: Sequence[int] | None = None,
    params: Sequence[int] | None = None,
    score: Sequence[int] | None = None,
    in_place: bool = False,
    phase: int = caffe.TRAIN,
    seed: int = 0,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    single: float | None = 1e-3,
) -> None:
    """Compare gradients of the layer with finite differences at up to 40 random entries of each array.

    ``layer`` is the text of a LayerParameter without name, bottom and top, for instance
    ``'type: "Power" power_param { power: 2 }'``. The objective is a sum over the tops in ``score`` (default: all) with
    random weights. ``wrt`` and ``params`` number the bottoms and parameters whose gradients are checked (default:
    all); keep the values of those bottoms away from kinks by more than 1e-5. Parameters are set to random values
    around 0.5. The random seed is set before each pass, so random layers draw the same numbers every time.
    ``single`` bounds the error of the single-precision gradient relative to the largest entry; None skips that check,
    for layers that draw other random numbers in single precision.
    """
    rng = np.random.default_rng(seed)
    net = build_net(layer, *[b.shape for b in bottoms], tops=tops, in_place=in_place, phase=phase)
    subject = _Subject(net, tops, score, rng)
    values = [torch.from_numpy(np.asarray(b, np.float64)) for b in bottoms]
    weights = [torch.from_numpy(rng.uniform(0.1, 0.9, blob.shape)) for blob in subject.params]
    checked_bottoms = range(len(bottoms)) if wrt is None else wrt
    checked_params = range(len(weights)) if params is None else params
    double = subject.gradients(values, weights)
    rough = subject.gradients([v.float() for v in values], [w.float() for w in weights])
    chosen = [(f"bottom {i}", values[i], double[0][i], rough[0][i]) for i in checked_bottoms]
    chosen += [(f"parameter {i}", weights[i], double[1][i], rough[1][i]) for i in checked_params]
    for what, tensor, gradient, single_gradient in chosen:
        assert gradient.shape == tensor.shape, what
        if single is not None:
            error = (single_gradient.double() - gradient).abs().max()
            bound = single * max(1.0, float(gradient.abs().max()))
            assert error <= bound, f"{what}: single precision is off by {error}"
        _check_entries(what, tensor, gradient, lambda: subject.objective(values, weights), rng, (rtol, atol))


def _check_entries(
    what: str,
    tensor: torch.Tensor,
    gradient: torch.Tensor,
    objective: Callable[[], float],
    rng: np.random.Generator,
    limits: tuple[float, float],
) -> None:
    flat = tensor.view(-1)
    for i in rng.permutation(flat.numel())[:ENTRIES]:
        kept = float(flat[i])
        flat[i] = kept + STEP
        above = objective()
        flat[i] = kept - STEP
        below = objective()
        flat[i] = kept
        place = np.unravel_index(i, tensor.shape)
        np.testing.assert_allclose(
            float(gradient[place]), (above - below) / (2 * STEP), *limits, err_msg=f"{what} at {place}"
        )


class _Subject:
    """The layer under test inside its net, run on tensors of either precision."""

    def __init__(self, net: Net, tops: int, score: Sequence[int] | None, rng: np.random.Generator) -> None:
        self._net = net
        self._bottoms = [net.blobs[name] for name in net.inputs]
        self._tops: list[Blob] = net.tops_of(len(net.layers) - 1)
        assert len(self._tops) == tops
        scored = range(tops) if score is None else score
        self._weights = {i: torch.from_numpy(rng.uniform(-1, 1, self._tops[i].shape)) for i in scored}
        self.params: list[Blob] = list(net.layers[-1].blobs)

    def objective(self, values: list[torch.Tensor], weights: list[torch.Tensor]) -> float:
        with _precision(torch.float64):
            self._forward(values, weights)
            return sum(float((self._tops[i].data_tensor * w).sum()) for i, w in self._weights.items())

    def gradients(
        self, values: list[torch.Tensor], weights: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        with _precision(values[0].dtype):
            self._forward(values, weights)
            for i, top in enumerate(self._tops):
                if i in self._weights:
                    top.put_diff(self._weights[i].to(values[0].dtype))
                else:
                    top.clear_diff()
            for blob in self.params:
                blob.clear_diff()
            self._net.run_backward()
        return [_copy(blob) for blob in self._bottoms], [_copy(blob) for blob in self.params]

    def _forward(self, values: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        for blob, value in zip([*self._bottoms, *self.params], [*values, *weights], strict=True):
            blob.put_data(value.clone())
        for top in self._tops:
            top.put_diff(torch.zeros(top.shape, dtype=values[0].dtype))
        torch.default_generator.manual_seed(1)
        self._net.run_forward()


@contextmanager
def _precision(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _copy(blob: Blob) -> torch.Tensor:
    return blob.diff_tensor.clone()


def build_net(
    layer: str, *shapes: tuple[int, ...], tops: int = 1, in_place: bool = False, phase: int = caffe.TRAIN
) -> Net:
    """Return a net of Inputs ``bottom0``, ``bottom1`` ... and the layer ``subject``, which makes ``top0`` ..."""
    names = [f"bottom{i}" for i in range(len(shapes))]
    top_names = names[:tops] if in_place else [f"top{i}" for i in range(tops)]
    parts = ["force_backward: true"]
    for name, shape in zip(names, shapes, strict=True):
        dims = " ".join(f"dim: {size}" for size in shape)
        parts.append(f'layer {{ name: "{name}" type: "Input" top: "{name}" input_param {{ shape {{ {dims} }} }} }}')
    ends = " ".join([*(f'bottom: "{n}"' for n in names), *(f'top: "{n}"' for n in top_names)])
    parts.append(f'layer {{ name: "subject" {ends} {layer} }}')
    param = parse_text("\n".join(parts), NetParameter)
    param.state.phase = phase
    return Net.from_proto(param)
