import copy

import pytest
import torch
from torch import nn

from poseidon.errors import ConfigError
from poseidon.lab import pace, paced


class FakeTime:
    """A clock that moves only when told to."""

    def __init__(self):
        self.worked_s = 0.0
        self.slept = []

    def thread_time(self):
        return self.worked_s

    def sleep(self, seconds):
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(pace, "time", fake)
    return fake


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)
    )


def test_every_layer_waits_for_its_share_forward_and_backward(clock):
    model = paced(network(), 30, 60)
    output = model(torch.ones(1, 1, 4, 4))
    assert clock.slept == pytest.approx([0.01] * 3)
    output.sum().backward()
    assert clock.slept[3:] == pytest.approx([0.02] * 3)


def test_shares_divide_the_time(clock):
    model = paced(network(), 40, 0, shares={"0": 3, "5": 1})
    model(torch.ones(1, 1, 4, 4))
    assert clock.slept == pytest.approx([0.03, 0.01])


def test_real_work_counts_and_surplus_is_taken_off_the_next_wait(clock):
    waits = pace._Clock()
    clock.worked_s = 5.0
    waits.restart()
    clock.worked_s += 0.004
    waits.spend(0.010)
    clock.worked_s += 0.015
    waits.spend(0.010)
    waits.spend(0.010)
    assert clock.slept == pytest.approx([0.006, 0.005])


def test_a_gradient_appears_only_after_its_layers_backward_time(clock):
    events = []
    model = network()
    clock.sleep = lambda _: events.append("wait")
    paced(model, 0, 30)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    model(torch.ones(1, 1, 4, 4)).sum().backward()
    assert events[0] == "wait"
    assert [event for event in events if event == "wait" or event.endswith("weight")] == [
        "wait",
        "5.weight",
        "wait",
        "3.weight",
        "wait",
        "0.weight",
    ]


def test_pacing_changes_no_result():
    model = network()
    twin = paced(copy.deepcopy(model), 0.1, 0.1)
    inputs = torch.randn(2, 1, 4, 4)
    for each in (model, twin):
        each(inputs).square().sum().backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, its.grad)


def test_what_cannot_be_paced_is_refused():
    with pytest.raises(ConfigError, match="no layers to pace"):
        paced(nn.ReLU(), 1, 1)
    with pytest.raises(ConfigError, match="0 ms or more"):
        paced(network(), -1, 1)
    with pytest.raises(ConfigError, match="known: 0, 3, 5"):
        paced(network(), 1, 1, shares={"1": 1})
    with pytest.raises(ConfigError, match="add up to 0"):
        paced(network(), 1, 1, shares={"0": 0})
