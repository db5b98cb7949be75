from __future__ import annotations

import math

import pytest

from poseidon.caffe.schema import SolverParameter
from poseidon.caffe.schema.files import parse_text
from poseidon.caffe.solver.policies import check_policy, learning_rate
from poseidon.errors import ConfigError


def rates(text, iterations):
    param = parse_text(f"base_lr: 2 {text}", SolverParameter)
    check_policy(param)
    found, step = [], 0
    for iteration in iterations:
        rate, step = learning_rate(param, iteration, step)
        found.append(rate)
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('lr_policy: "fixed"', [2, 2, 2, 2]),
        ('lr_policy: "step" gamma: 0.5 stepsize: 2', [2, 2, 1, 1]),
        ('lr_policy: "exp" gamma: 0.5', [2, 1, 0.5, 0.25]),
        ('lr_policy: "inv" gamma: 1 power: 2', [2, 2 / 4, 2 / 9, 2 / 16]),
        ('lr_policy: "multistep" gamma: 0.5 stepvalue: 1 stepvalue: 3', [2, 1, 1, 0.5]),
        ('lr_policy: "poly" power: 2 max_iter: 2', [2, 0.5, 0, 0]),
        (
            'lr_policy: "sigmoid" gamma: -1 stepsize: 1',
            [2 / (1 + math.exp(-1)), 1, 2 / (1 + math.e), 2 / (1 + math.e**2)],
        ),
    ],
    ids=lambda value: value.split('"')[1] if isinstance(value, str) else "",
)
def test_policy(text, expected):
    assert rates(text, range(4)) == pytest.approx(expected)


def test_a_sigmoid_far_from_its_step_does_not_overflow():
    assert rates('lr_policy: "sigmoid" gamma: 100 stepsize: 1000', [0]) == pytest.approx([0])


def test_multistep_takes_one_step_per_iteration_when_it_has_to_catch_up():
    assert rates('lr_policy: "multistep" gamma: 0.5 stepvalue: 5 stepvalue: 6', [10, 11, 12]) == [1, 0.5, 0.5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('lr_policy: "stepp"', "unknown lr_policy 'stepp'; did you mean 'step'.* known: exp, fixed"),
        ('lr_policy: "step"', "positive stepsize, not 0"),
        ('lr_policy: "poly"', "positive max_iter, not 0"),
    ],
)
def test_bad_policies_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        rates(text, [0])
