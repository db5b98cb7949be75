"""An optimizer whose steps a policy takes: the same object and state, with another class while the policy is active."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from poseidon.errors import ConfigError, UnsupportedError


def clear_gradients(parameters: Iterable[nn.Parameter], set_to_none: bool) -> None:
    """Drop gradients, or fill them with zeros."""
    for parameter in parameters:
        if set_to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            if parameter.grad.grad_fn is not None:
                parameter.grad = parameter.grad.detach()
            parameter.grad.requires_grad_(False).zero_()


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return an optimizer's parameters, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_max_norm(max_grad_norm: float | None) -> None:
    """Raise unless gradients can be clipped to this norm."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ConfigError(f"max_grad_norm is {max_grad_norm}; it must be positive")


def clip_before_steps(optimizer: Optimizer, module: nn.Module, max_grad_norm: float) -> Callable[[], None]:
    """Clip the norm of a module's gradients before each optimizer step; return a function that undoes this."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def before_step(_: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(value is not None for value in (*arguments[1:], named.get("closure"))):  # the first is the optimizer
            _refuse_closure()
        clip(optimizer, parameters, max_grad_norm)

    return optimizer.register_step_pre_hook(before_step).remove


def clip(optimizer: Any, parameters: Sequence[nn.Parameter], max_grad_norm: float) -> None:
    """Clip the norm of gradients; unscale the optimizer's first, if a GradScaler leaves that to its step.

    It does so with fused optimizers: the norm of gradients that are still scaled means nothing.
    """
    unscale(optimizer)
    nn.utils.clip_grad_norm_(parameters, max_grad_norm)


def unscale(optimizer: Any) -> None:
    """Divide an optimizer's gradients by the scale of a GradScaler that leaves that to the step."""
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        inverse = scale.double().reciprocal().float()
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
        optimizer.grad_scale = None


def unscale_as_steps_do(optimizer: Any, parameters: Container[nn.Parameter]) -> None:
    """Leave gradients of these as a fused step under a GradScaler does: divided by its scale, if none is infinite."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if scale is None:
        return
    if found_inf is not None:
        scale = scale.where(found_inf.to(scale.device) == 0, 1.0)
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            if parameter in parameters and parameter.grad is not None:
                parameter.grad.div_(scale.to(parameter.grad.device))


def check_optimizer(optimizer: Any) -> None:
    """Raise unless the optimizer's parameters can be updated one by one."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"distribute() needs a torch.optim.Optimizer; this is a {type(optimizer).__name__}")
    if isinstance(optimizer, Deferring):
        raise ConfigError("this optimizer already belongs to a distributed model; create one per model")
    own = optimizer.__dict__.get("step")
    if own is not None and _innermost(own) is not _innermost(type(optimizer).step):
        raise ConfigError(
            f"the step() of this {type(optimizer).__name__} was replaced by {getattr(own, '__qualname__', own)}, which "
            "would not be called; replace it after distribute()"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the model several times per step (a closure), so updates cannot "
            "wait for the next forward; use poseidon.DistributedDataParallel with it"
        )


def _innermost(function: Any) -> Any:
    """Return what wrappers, such as those of a scheduler or the compiler, call in the end."""
    function = inspect.unwrap(function)
    return inspect.unwrap(getattr(function, "__func__", function))


def check_owns(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise if the optimizer trains parameters that the model does not have: every worker would step them alone."""
    own = set(map(id, model.parameters()))
    odd = [p for p in parameters_of(optimizer) if p.requires_grad and id(p) not in own]
    if odd:
        raise ConfigError(
            f"the optimizer trains {len(odd)} parameter(s) that the model does not have (the first is of shape "
            f"{tuple(odd[0].shape)}): their gradients would stay on each worker. Put all that is trained into one "
            "module, or give the others an optimizer and a distributed model of their own"
        )


def check_known(parameters: Iterable[nn.Parameter], known: Collection[int]) -> None:
    """Raise if an optimizer gets parameters that were not among those, by id(), that are shared."""
    odd = [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in known]
    if odd:
        raise UnsupportedError(
            f"the group has {len(odd)} parameter(s) (the first is of shape {tuple(odd[0].shape)}) that the model did "
            "not have, or did not train, when it was distributed: their gradients would stay on each worker. Call "
            "close() and distribute model and optimizer again"
        )


_ELEMENTWISE = frozenset(
    getattr(optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise unless the optimizer treats every value of a parameter by itself, so that a chunk can be stepped alone."""
    plain = type(optimizer)
    if plain not in _ELEMENTWISE and not plain.__dict__.get("is_elementwise", False):
        known = ", ".join(sorted(each.__name__ for each in _ELEMENTWISE))
        raise UnsupportedError(
            f'update="server" steps parts of parameters, and {plain.__name__} may need whole ones; it works with '
            f"{known}, and with classes of your own that set is_elementwise = True because they treat every value by "
            "itself. Or leave update out"
        )


def is_torchs_own(plain: type[Optimizer]) -> bool:
    """Return whether a class is one of torch.optim that is known to treat every value by itself."""
    return plain in _ELEMENTWISE


def steps_one_by_one(plain: type[Optimizer]) -> bool:
    """Tell whether parameters may be stepped one after the other, in several calls.

    All classes of torch.optim that need no closure allow it. Others may count their steps, or look at all gradients.
    """
    return plain.__module__.startswith("torch.optim.") or plain.__dict__.get("is_elementwise", False)


_MEMBERS = ("params", "state", "param_groups", "_poseidon_policy", "step")


def freeze_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, or an optimizer's attributes, as they are now: schedulers write into tensors."""
    kept = {key: value for key, value in options.items() if key not in _MEMBERS}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()}


def check_unchanged(plain: type[Optimizer], before: Mapping[str, Any], now: Mapping[str, Any], why: str) -> None:
    """Raise if an optimizer has changed its own attributes in ``step()``, which is called several times in a step."""
    changed = [name for name, value in before.items() if name[0] != "_" and _differs(value, now.get(name))]
    if changed:
        raise UnsupportedError(
            f"{plain.__name__} changes its own attribute {changed[0]!r} in step(), which is called several times for "
            f"one step, since {why}: keep it in the state of each parameter, or leave is_elementwise and "
            'update="server" out'
        )


def _differs(before: Any, now: Any) -> bool:
    if now is before:
        return False
    if isinstance(before, Tensor) and isinstance(now, Tensor):  # the former is a copy
        return before.shape != now.shape or not bool((before == now).all())
    return not (isinstance(before, int | float | str) and type(now) is type(before) and now == before)


def make_stand_in(plain: type[Optimizer], attributes: Mapping[str, Any]) -> Optimizer:
    """Return an optimizer with these attributes, whose groups :func:`step_groups` sets."""
    stand_in: Optimizer = object.__new__(plain)
    stand_in.__dict__.update(attributes)
    return stand_in


def step_groups(
    optimizer: Optimizer,
    plain: type[Optimizer],
    options: Sequence[dict[str, Any]],
    members: Sequence[Sequence[nn.Parameter]],
) -> None:
    """Step an optimizer for some parameters, given by group, with the options of each group."""
    shadows = [{**option, "params": list(some)} for option, some in zip(options, members, strict=True) if some]
    if not shadows:
        return
    before = [dict(shadow) for shadow in shadows]
    real = optimizer.__dict__.get("param_groups")
    optimizer.param_groups = shadows
    try:
        plain_step(plain)(optimizer)
    finally:
        optimizer.__dict__["param_groups"] = real
    for shadow, old in zip(shadows, before, strict=True):
        for key in shadow:
            if shadow[key] is not old.get(key):
                raise UnsupportedError(
                    f"{plain.__name__} changes its own option {key!r} in step(), so its parameters cannot be updated "
                    "one by one; use poseidon.DistributedDataParallel with it"
                )


def plain_step(plain: type[Optimizer]) -> Any:
    """Return the class's step without PyTorch's profiling wrapper, which would call the user's step hooks each time."""
    return getattr(plain.step, "__wrapped__", plain.step)


class StepTaker(Protocol):
    """Takes an optimizer's steps in its place."""

    plain: type[Optimizer]
    """The optimizer's own class."""
    is_updating: bool
    """Whether the optimizer's state may be read as it is."""
    steps_later: bool
    """Whether a step reads the optimizer's attributes when ``step()`` has returned already."""

    def step(self) -> None:
        """Take a step, or record that it is due."""

    def zero_grad(self, set_to_none: bool = True) -> bool:
        """Clear gradients."""

    def note_cleared(self) -> None:
        """Note that the optimizer has cleared gradients itself."""

    def finish(self) -> None:
        """Finish the step under way."""

    def show_state(self) -> None:
        """Finish the step under way, and let the optimizer have its whole state."""

    def take_state(self) -> None:
        """Note that the optimizer's state was replaced."""

    def check_group(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if these cannot be stepped."""


class Deferring:
    """Mixed into an optimizer's class: same object, same state, but steps are deferred."""

    _poseidon_policy: StepTaker

    def zero_grad(self, *arguments: Any, **named: Any) -> None:
        """Like the optimizer's own, which is called if its class has one."""
        if self._poseidon_policy.plain.zero_grad is Optimizer.zero_grad:
            self._poseidon_policy.zero_grad(*arguments, **named)
            return
        self._poseidon_policy.finish()
        super().zero_grad(*arguments, **named)  # type: ignore[misc]
        self._poseidon_policy.note_cleared()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in _MEMBERS and self._poseidon_policy.steps_later:
            self._poseidon_policy.finish()
        super().__setattr__(name, value)

    @property
    def state(self) -> Any:
        """Like the optimizer's own, after finishing the step under way."""
        if not self._poseidon_policy.is_updating:
            self._poseidon_policy.show_state()
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value
        self._poseidon_policy.take_state()

    def state_dict(self) -> Any:
        """Like the optimizer's own, after finishing the step under way."""
        self._poseidon_policy.show_state()
        return super().state_dict()  # type: ignore[misc]

    def load_state_dict(self, state_dict: Any) -> None:
        """Like the optimizer's own, after finishing the step under way."""
        # Some classes read their state while they load one: it must not be put in place of what was loaded then.
        self._poseidon_policy.finish()
        self._poseidon_policy.show_state()
        super().load_state_dict(state_dict)  # type: ignore[misc]
        self._poseidon_policy.take_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like the optimizer's own, after finishing the step under way."""
        self._poseidon_policy.finish()
        super().add_param_group(param_group)  # type: ignore[misc]
        groups = self.__dict__["param_groups"]
        try:
            self._poseidon_policy.check_group(groups[-1]["params"])
        except UnsupportedError:
            groups.pop()
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is a plain optimizer: it has no model to wait for.
        self._poseidon_policy.show_state()
        state = {key: value for key, value in self.__dict__.items() if key not in ("_poseidon_policy", "step")}
        return object.__new__, (self._poseidon_policy.plain,), state


def _refuse_closure() -> NoReturn:
    raise UnsupportedError(
        "step(closure) evaluates the model inside the step; call backward() yourself and step() without a closure"
    )


def _deferred_step(self: Any, closure: Any = None) -> None:
    if closure is not None:
        _refuse_closure()
    self.__dict__["_opt_called"] = True  # checked by learning-rate schedulers
    self._poseidon_policy.step()


@cache
def _deferring_class(plain: type) -> type:
    # Wrapped by PyTorch's own wrapper, so that the user's step hooks run once per step().
    step: Any = Optimizer.profile_hook_step(_deferred_step)
    step.hooked = True
    step._wrapped_by_lr_sched = True
    return type(plain.__name__, (Deferring, plain), {"step": step})


def give_back(optimizer: Optimizer, plain: type[Optimizer]) -> None:
    """Restore an optimizer's own class."""
    optimizer.__dict__.pop("_poseidon_policy", None)
    optimizer.__class__ = plain


def defer(optimizer: Optimizer, policy: StepTaker) -> None:
    """Let ``policy`` take the optimizer's steps. Schedulers and references to it keep working."""
    optimizer.__dict__.pop("step", None)  # a scheduler's wrapper around the plain step
    optimizer._poseidon_policy = policy  # type: ignore[attr-defined]
    plain: type = type(optimizer)
    optimizer.__class__ = _deferring_class(plain)
