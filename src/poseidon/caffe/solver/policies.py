"""Learning-rate policies: the rate of each iteration. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from poseidon.caffe.schema import SolverParameter
from poseidon.errors import ConfigError, unknown_name

POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")


class Rate(NamedTuple):
    """The learning rate of an iteration and how many steps the policy has taken so far."""

    value: float
    step: int


def check_policy(param: SolverParameter) -> None:
    """Raise :class:`ConfigError` for a policy that is unknown or lacks a setting."""
    if param.lr_policy not in POLICIES:
        raise unknown_name("lr_policy", param.lr_policy, POLICIES)
    for policy, needed in (("step", "stepsize"), ("poly", "max_iter")):
        if param.lr_policy == policy and getattr(param, needed) <= 0:
            raise ConfigError(f"lr_policy {policy!r} needs a positive {needed}, not {getattr(param, needed)}")


def learning_rate(param: SolverParameter, iteration: int, step: int) -> Rate:
    """Return the rate of a checked ``lr_policy``; ``step`` is the previous iteration's."""
    if param.lr_policy == "step":
        step = iteration // param.stepsize
    elif param.lr_policy == "multistep" and step < len(param.stepvalue) and iteration >= param.stepvalue[step]:
        # At most one step per iteration, even when several values were passed: so does Caffe after a resume.
        step += 1
    return Rate(param.base_lr * _factor(param, iteration, step), step)


def _factor(param: SolverParameter, iteration: int, step: int) -> float:
    match param.lr_policy:
        case "step" | "multistep":
            return float(param.gamma**step)
        case "exp":
            return float(param.gamma**iteration)
        case "inv":
            return float((1 + param.gamma * iteration) ** -param.power)
        case "poly":
            # A script may step beyond max_iter: the rate stays zero.
            return float(max(0.0, 1 - iteration / param.max_iter) ** param.power)
        case "sigmoid":
            # exp overflows a double beyond 709, where the rate is zero to any precision.
            return 1 / (1 + math.exp(min(-param.gamma * (iteration - param.stepsize), 700.0)))
    return 1.0
