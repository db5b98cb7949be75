"""What a watcher hears, and whether functions that are said to round their arguments do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.engine.watched import Touch, unwatch, watch

Use = Callable[[Tensor, Tensor], Tensor]

USES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Use]] = {
    "linear": ((4, 6), (5, 6), lambda x, w: F.linear(x, w, w[:, 0].detach())),
    "matmul": ((4, 6), (6, 5), lambda x, w: x @ w),
    "torch.matmul": ((4, 6), (6, 5), torch.matmul),
    "left": ((6, 5), (4, 6), lambda x, w: w @ x),
    "mm": ((4, 6), (6, 5), torch.mm),
    "method": ((4, 6), (6, 5), lambda x, w: x.mm(w)),
    "bmm": ((3, 4, 6), (3, 6, 5), torch.bmm),
    "addmm": ((4, 6), (6, 5), lambda x, w: torch.addmm(torch.ones(5), x, w)),
    "added": ((4, 6), (5,), lambda x, w: torch.addmm(w, x, torch.ones(6, 5))),
    "addbmm": ((3, 4, 6), (3, 6, 5), lambda x, w: torch.addbmm(torch.ones(4, 5), x, w)),
    "baddbmm": ((3, 4, 6), (3, 6, 5), lambda x, w: torch.baddbmm(torch.ones(3, 4, 5), x, w)),
    "conv1d": ((2, 3, 9), (4, 3, 3), F.conv1d),
    "conv2d": ((2, 3, 9, 9), (4, 3, 3, 3), F.conv2d),
    "conv3d": ((2, 3, 5, 5, 5), (4, 3, 3, 3, 3), F.conv3d),
    "conv_transpose1d": ((2, 3, 9), (3, 4, 3), F.conv_transpose1d),
    "conv_transpose2d": ((2, 3, 9, 9), (3, 4, 3, 3), F.conv_transpose2d),
    "conv_transpose3d": ((2, 3, 5, 5, 5), (3, 4, 3, 3, 3), F.conv_transpose3d),
    "attention": ((2, 1, 4, 8), (2, 1, 4, 8), lambda x, w: F.scaled_dot_product_attention(x, w, x)),
}


def _attend(x: Tensor, weight: Tensor, bias: Tensor, keys: Tensor | None = None) -> Tensor:
    other = x if keys is None else keys
    attended, _ = F.multi_head_attention_forward(
        *(x, other, other, 8, 2, weight, bias, None, None, False, 0.0, weight[:8].detach(), None),
        need_weights=False,
    )
    return attended


USES["packed"] = ((4, 1, 8), (24, 8), lambda x, w: _attend(x, w, torch.ones(24)))
USES["unpacked"] = ((4, 1, 8), (24, 8), lambda x, w: _attend(x, w, torch.ones(24), torch.ones(3, 1, 8)))


class Listener:
    def __init__(self) -> None:
        self.heard: list[Touch] = []

    def touch(self, _: nn.Parameter, touch: Touch) -> None:
        self.heard.append(touch)

    def open(self, parameter: nn.Parameter) -> None:
        self.heard.append(Touch.VALUES)
        unwatch(parameter)


def _watched(shape: tuple[int, ...]) -> tuple[nn.Parameter, Listener]:
    parameter, listener = nn.Parameter(torch.randn(shape)), Listener()
    watch([parameter], listener)
    return parameter, listener


@pytest.mark.parametrize("name", USES)
def test_a_function_that_rounds_gives_the_same_bits_for_rounded_weights(name: str) -> None:
    torch.manual_seed(1)
    x_shape, w_shape, use = USES[name]
    x, weight = torch.randn(x_shape), torch.randn(w_shape)
    results = []
    for values in (weight, weight.bfloat16().float()):
        given, parameter = x.clone().requires_grad_(), nn.Parameter(values.clone())
        with torch.autocast("cpu", torch.bfloat16):
            out = use(given, parameter)
        out.float().square().sum().backward()
        results.append((out, given.grad, parameter.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("name", sorted(set(USES) - {"linear", "packed", "unpacked"}))
def test_such_a_use_is_heard_as_one_under_autocast_only(name: str) -> None:
    x_shape, w_shape, use = USES[name]
    parameter, listener = _watched(w_shape)
    with torch.autocast("cpu", torch.bfloat16):
        use(torch.randn(x_shape), parameter)
    assert listener.heard == [Touch.ROUNDED]
    use(torch.randn(x_shape), parameter)
    with torch.autocast("cpu", torch.float16):
        use(torch.randn(x_shape), parameter)
    assert listener.heard[1:] == [Touch.VALUES] * 2


def test_attention_rounds_all_but_the_biases_that_it_appends() -> None:
    attention = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    listeners = {}
    for name, parameter in attention.named_parameters():
        listeners[name] = Listener()
        watch([parameter], listeners[name])
    x = torch.randn(4, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        attention(x, x, x)
    for name, listener in listeners.items():
        assert listener.heard == [Touch.VALUES if name in ("bias_k", "bias_v") else Touch.ROUNDED], name


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda p: p.shape, []),
        (lambda p: p.requires_grad, []),
        (lambda p: p * 2, [Touch.VALUES]),
        (lambda p: p.data, [Touch.VALUES]),
        (lambda p: p.detach(), [Touch.VALUES]),
        (lambda p: str(p), [Touch.VALUES]),
        (lambda p: torch._foreach_mul([p], 2.0), [Touch.VALUES]),
        (lambda p: p.grad, [Touch.GRADIENT]),
        (lambda p: setattr(p, "grad", None), [Touch.NEW_GRADIENT]),
        (lambda p: delattr(p, "grad"), [Touch.NEW_GRADIENT]),
        (lambda p: setattr(p, "data", torch.ones(3, 3)), [Touch.VALUES]),
        (lambda p: copy.deepcopy(p), [Touch.VALUES]),
    ],
)
def test_what_is_heard(use: Callable[[Any], Any], expected: list[Touch]) -> None:
    parameter, listener = _watched((3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        use(parameter)
    assert listener.heard[:1] == expected
    unwatch(parameter)
    assert type(parameter) is nn.Parameter
