import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.sim.relaxed import simulate_relaxed
from poseidon.sim.steps import simulate
from sim_settings import setting, small


def relaxed(bound, **changes):
    changes = {"machines": 6, "gbit": 20, "system": "dwbp-ps", "steps": 40, **changes}
    return simulate_relaxed(setting(**changes), bound)


def test_staleness_lets_random_delays_even_out():
    steps = [relaxed(bound, straggle=0.4).step_s for bound in (0, 1, 3, None)]
    assert steps[0] > steps[1] > steps[2] >= steps[3]
    assert steps[3] == pytest.approx(small().step_s, rel=0.1)


def test_staleness_does_not_help_against_one_machine_that_is_always_slow():
    slowdowns = (1.0,) * 5 + (2.0,)
    bounded, free = (relaxed(bound, slowdowns=slowdowns, steps=80) for bound in (2, None))
    assert bounded.step_s == pytest.approx(2 * small().step_s, rel=0.12)
    # Five go at their own pace, one at half of it.
    assert free.step_s == pytest.approx(6 / 5.5 * small().step_s, rel=0.05)
    assert max(free.waits) < 0.05 < max(bounded.waits)


def test_in_lockstep_both_simulators_agree():
    made = setting(machines=4, gbit=2, system="ps", steps=60)
    # The one with clocks updates while updates travel, and knows no chunks.
    assert simulate_relaxed(made, 0).step_s == pytest.approx(simulate(made).step_s, rel=0.05)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(2, 5), st.integers(0, 3))
def test_more_staleness_is_never_slower(seed, machines, bound):
    tight, loose = (relaxed(s, machines=machines, seed=seed, straggle=0.3, steps=10) for s in (bound, bound + 1))
    assert loose.step_s <= tight.step_s * (1 + 1e-9)
    assert relaxed(bound, machines=machines, seed=seed, straggle=0.3, steps=10).step_s == tight.step_s


def test_a_system_without_servers_has_no_staleness():
    with pytest.raises(ConfigError, match="ddp works in lockstep"):
        simulate_relaxed(setting(system="ddp"), 2)
