from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach as choose

from poseidon.engine.pending import land, make_pending, make_plain


def test_torch_steps_pending_parameters_together_as_it_does_others(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.optim.optimizer"]  # which torch.optim hides
    monkeypatch.setattr(module, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    plain = choose(list(parameters), differentiable=False)
    make_pending(parameters, lambda _: None)
    assert choose(list(parameters), differentiable=False) == plain == (False, True)


def test_a_touch_lands_once_and_other_touches_within_it_see_the_parameter_as_it_is() -> None:
    parameter = nn.Parameter(torch.ones(2))
    landed: list[float] = []
    is_landing = False

    def land_it(touched: nn.Parameter) -> None:
        nonlocal is_landing
        if is_landing:
            return
        is_landing = True
        assert not land(touched), "it has not landed yet"
        with torch.no_grad():
            landed.append(float(touched.sum()))  # as an optimizer reads it
            touched.add_(1)
        is_landing = False
        make_plain((touched,))

    make_pending([parameter], land_it)
    assert parameter.shape == (2,)
    assert not landed, "a shape is no reason to land"
    assert float(parameter.detach().sum()) == 4.0
    assert landed == [2.0]
    assert type(parameter) is nn.Parameter
    assert land(parameter)


class Fresh(torch.Tensor):
    """A class of tensors that can be copied with its attributes."""

    def new_empty(self, *sizes: Any, **named: Any) -> Any:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return torch.empty(*sizes, **named).as_subclass(Fresh)


class Stepping:
    """Lands a parameter as an optimizer of one's own does that copies what it steps; cannot be copied itself."""

    def __init__(self, copy_it: Callable[[Any], Any]) -> None:
        self.lock = threading.Lock()
        self.copy_it = copy_it
        self.copies: list[Any] = []

    def land_it(self, touched: nn.Parameter) -> None:
        if not self.lock.acquire(blocking=False):
            return
        with torch.no_grad():
            self.copies.append(self.copy_it(touched))
        self.lock.release()
        make_plain((touched,))


@pytest.mark.parametrize("values", [torch.ones(2), torch.ones(2).as_subclass(Fresh)], ids=["plain", "own class"])
@pytest.mark.parametrize(
    "copy_it",
    [copy.copy, copy.deepcopy, lambda touched: pickle.loads(pickle.dumps(touched))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_what_lands_a_parameter_may_copy_it(copy_it: Callable[[Any], Any], values: torch.Tensor) -> None:
    parameter = nn.Parameter(values)
    parameter.mark = [1, 2]  # type: ignore[attr-defined]
    parameter.grad = torch.ones(2)
    with torch.no_grad():
        plain = copy_it(parameter)
    owner = Stepping(copy_it)
    make_pending([parameter], owner.land_it)
    assert land(parameter)
    (made,) = owner.copies
    assert type(made) is type(plain)
    assert vars(made) == vars(plain)
    assert (made.data_ptr() == parameter.data_ptr()) is (plain.data_ptr() == parameter.data_ptr())
    assert torch.equal(made, parameter)
    assert (made.grad is None) is (plain.grad is None)


class Tagged(torch.Tensor):
    """A class that is handed on to whatever is computed from it, as torch's own rule is."""


def test_what_is_computed_while_it_lands_has_the_parameters_own_class() -> None:
    parameter = nn.Parameter(torch.ones(2).as_subclass(Tagged))
    plain = type(parameter)
    is_landing = False
    made: list[torch.Tensor] = []

    def land_it(touched: nn.Parameter) -> None:
        nonlocal is_landing
        if not is_landing:
            is_landing = True
            with torch.no_grad():
                made.append(torch.zeros_like(touched).add(1))  # as an optimizer makes its state
            make_plain((touched,))

    make_pending([parameter], land_it)
    assert float(parameter.detach().sum()) == 2.0
    assert type(parameter) is plain
    assert type(made[0]) is plain
    assert float(made[0].sum()) == 2.0


def _see(first: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """See an operation and hide it from others, as nested tensors do."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs or {})


class Known(torch.Tensor):
    """A class that is defined before anything is pending."""

    __torch_function__ = classmethod(_see)  # type: ignore[assignment]


class Marked:
    """A class that is no tensor and looks at classes derived from it, with an option."""

    mark = 0

    def __init_subclass__(cls, mark: int = 0, **named: Any) -> None:
        super().__init_subclass__(**named)
        cls.mark = mark


@pytest.mark.filterwarnings("ignore:Defining your `__torch_function__` as a plain method")
@pytest.mark.parametrize("parent", [torch.Tensor, Known])
@pytest.mark.parametrize("form", [classmethod, staticmethod, lambda function: function])
def test_classes_that_are_defined_while_an_update_is_pending_do_not_hide_a_touch(parent: type, form: Any) -> None:
    parameter = nn.Parameter(torch.zeros(2))

    def land_it(touched: nn.Parameter) -> None:
        make_plain((touched,))
        with torch.no_grad():
            touched.add_(1)

    make_pending([parameter], land_it)
    see = (lambda *given: _see(None, *given)) if form is staticmethod else _see
    kind: Any = type("Later", (parent, Marked), {"__torch_function__": form(see)}, mark=3)
    assert kind.mark == 3
    total = torch.zeros(2).as_subclass(kind) + parameter
    assert total.as_subclass(torch.Tensor).tolist() == [1.0, 1.0]  # type: ignore[arg-type]


class Doubled(torch.Tensor):
    """An optimizer's state, say, to whose sums its class adds something."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs or {})
            return 2 * found if func is torch.add else found


@pytest.mark.parametrize("own", [torch.Tensor, Tagged])
def test_what_is_computed_while_it_lands_is_seen_by_the_classes_of_all(own: Any) -> None:
    parameter: Any = nn.Parameter(torch.ones(2).as_subclass(own))
    state: Any = torch.zeros(2).as_subclass(Doubled)  # type: ignore[arg-type]
    sums: list[Any] = []

    def land_it(touched: nn.Parameter) -> None:
        if not sums:
            sums.append(None)
            with torch.no_grad():
                sums.extend((torch.add(state, touched), torch.add(touched, state)))
            make_plain((touched,))

    make_pending([parameter], land_it)
    parameter.detach()
    assert [each.tolist() for each in sums[1:]] == [[2.0, 2.0], [2.0, 2.0]]
