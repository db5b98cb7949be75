"""The server's step: weights come back once ``step()`` has been called, in fewer bits, and the interpreter is busy."""

from dataclasses import replace

import pytest

from poseidon.planning.profile import UnitProfile
from poseidon.routes.bits import change_bits, gradient_bits, is_rounded, rounded_share
from poseidon.sim.cells import Bench, predict_ms
from poseidon.sim.media import ADD_S, COMPACT_S, MEDIA, RESTORE_S
from poseidon.sim.steps import simulate
from poseidon.sums.compact import EMPTY_BITS, compacted_bits
from poseidon.units import Load, ParameterSpec, Unit
from sim_settings import dense, profile, setting


def unit(name, kind, *shapes):
    return Unit(name, kind, tuple(ParameterSpec(f"{name}.{at}", shape, 4) for at, shape in enumerate(shapes)))


CONV, NORM = unit("conv", "dense", (64, 64, 3, 3), (64,)), unit("norm", "dense", (64,), (64,))
TABLE, TIED = unit("table", "embedding", (1000, 64)), unit("tied", "tied", (1000, 64))


def test_autocast_rounds_what_products_read():
    assert [is_rounded(one, "bf16") for one in (CONV, NORM, TABLE, TIED)] == [True, False, False, True]
    assert not any(is_rounded(one, "float32") for one in (CONV, NORM, TABLE, TIED))
    assert rounded_share([CONV, TABLE], "bf16") == pytest.approx(CONV.numel / (CONV.numel + TABLE.numel))
    assert change_bits([CONV], "bf16") < compacted_bits("bf16", 1)[0] < change_bits([NORM], "bf16")


def test_a_table_has_values_only_where_a_step_touched_it():
    full, _ = compacted_bits("float32", 8)
    part, total = gradient_bits([TABLE], {"table": Load(100)}, "float32", 8)
    assert part == pytest.approx(0.1 * full + 0.9 * EMPTY_BITS)
    assert total == pytest.approx((1 - 0.9**8) * full + 0.9**8 * EMPTY_BITS)
    assert gradient_bits([TABLE], {}, "float32", 8) == compacted_bits("float32", 8)


def test_a_tied_table_has_float32_rows_among_those_of_its_head():
    halves = compacted_bits("bf16", 8)
    mixed = gradient_bits([TIED], {"tied": Load(512, 2, touched=100)}, "bf16", 8)
    assert mixed[0] == pytest.approx(0.1 * compacted_bits("float32", 8)[0] + 0.9 * halves[0])
    assert mixed[1] - halves[1] > mixed[0] - halves[0]  # all workers' rows
    assert gradient_bits([CONV], {}, "bf16", 8) == halves


def two_layers():
    """A large unit that is ready early in backward, and a small one that computes for long after it."""
    return profile(dense("small", 1_000, backward_s=1.0), dense("large", 1_000_000, backward_s=0.1))


def legs_of(outcome, name):
    return sorted((span.start_s, span.end_s) for span in outcome.spans if span.place == "out" and name in span.name)


def test_weights_leave_after_the_step_and_sums_when_they_are_there():
    given = setting(two_layers(), gbit=1, system="served", chunk_bytes=1 << 20)  # one round
    served = simulate(given, keep_spans=True)
    summed = simulate(replace(given, system=setting(system="dwbp-ps").system), keep_spans=True)
    backward_ends_s = two_layers().forward_s + two_layers().backward_s
    assert legs_of(served, "large")[0][1] < backward_ends_s  # the part, during backward
    assert legs_of(served, "large")[1][0] >= backward_ends_s
    assert legs_of(summed, "large")[1][1] < backward_ends_s


def test_the_next_forward_waits_for_weights_one_unit_at_a_time():
    given = setting(two_layers(), gbit=1, system="served")
    # Two thirds of the large unit's weights, 24 ms on the wire, travel while the small one computes.
    hidden_s = two_layers().units[0].forward_s
    exposed_s = 3 / 4 * 4e6 / 1.25e8 - hidden_s
    compute_s = two_layers().forward_s + two_layers().backward_s
    assert simulate(given).step_s == pytest.approx(compute_s + exposed_s, rel=0.01)


def test_owners_take_a_part_of_the_step_each():
    plain = profile(dense("one", 1_000), update_s=0.4)
    times = [simulate(setting(plain, gbit=1000, system=name)).step_s for name in ("distribute", "served")]
    assert times[0] - times[1] == pytest.approx(0.3, rel=0.01)


def test_a_forward_that_waited_takes_as_long_as_it_takes_to_issue():
    many = profile(*(dense(f"unit{number}", 1_000, 0.001, 0.002) for number in range(20)))
    times = {
        (system, issue_s): simulate(setting(many, gbit=1000, system=system, issue_s=issue_s)).step_s
        for system in ("poseidon", "distribute")
        for issue_s in (0.0, 0.0005, 0.003)
    }
    assert times["distribute", 0.0005] == pytest.approx(times["distribute", 0.0])
    assert times["distribute", 0.003] - times["distribute", 0.0] == pytest.approx(20 * 0.002, rel=0.03)
    assert times["poseidon", 0.003] == times["poseidon", 0.0]  # its host is ahead of the device


def test_messages_take_turns_in_the_interpreter():
    costly = replace(MEDIA["ideal"], handling_s=1e-3, device_handling_s=5e-3)
    units = profile(*(dense(f"unit{number}", 3 << 20, 1e-4, 1e-4) for number in range(4)))
    plain, slow, device = (
        simulate(setting(units, gbit=1000, system="served", messages=messages, compacts=compacts)).step_s
        for messages, compacts in ((MEDIA["ideal"], False), (costly, False), (costly, True))
    )
    # At least four buckets, of three messages to owners and three back, each handled at both ends.
    assert slow - plain > 4 * 3 * 2 * 2 * 0.9e-3
    assert device - plain > 4 * (slow - plain)


def test_compacting_delays_a_device_that_computes_for_all_who_share_it():
    # Ready long before the end of backward, so parts are compacted, and sums come back, while the device computes.
    given = setting(
        profile(dense("last", 1_000, backward_s=1.0), dense("early", 8 << 20, backward_s=0.1)),
        gbit=1000, system="dwbp-ps", compacts=True, chunk_bytes=1 << 22,
    )  # fmt: skip
    alone, shared = (simulate(replace(given, sharing=sharing)).step_s for sharing in (0.0, 8.0))
    assert shared - alone == pytest.approx(8 * (8 << 20) * (COMPACT_S + ADD_S + RESTORE_S), rel=0.01)


def test_rows_of_a_bag_travel_once_where_the_link_is_slow():
    made = UnitProfile(TABLE, Load(400, bags=100), 0.01, 0.02)
    plain = replace(made, load=Load(400))
    sent = {
        (gbit, one is made): simulate(setting(profile(one), gbit=gbit)).sent_bytes
        for gbit in (1, 10)
        for one in (made, plain)
    }
    assert sent[1, False] == sent[10, False] == sent[10, True] == 3 * 400 * (64 * 4 + 8)
    assert sent[1, True] == 3 * (100 * 64 * 4 + 400 * 12)


def test_the_benchmarks_system_is_predicted():
    bench = Bench(profile(dense("one", 4 << 20)), 0.1, 8, 10e9, True, 16, 1e13, compacts=True, precision="bf16")
    served = predict_ms(bench, "poseidon-distribute:update=server")
    assert served is not None
    assert served < predict_ms(bench, "poseidon-distribute")
    assert predict_ms(bench, "poseidon-distribute:staleness=1") is None


def test_rounded_weights_travel_apart():
    both = profile(*(UnitProfile(one, None, 0.01, 0.02) for one in (CONV, NORM, replace(CONV, name="conv2"))))
    given = setting(both, system="served", precision="bf16")
    names = {span.name for span in simulate(given, keep_spans=True).spans if span.place == "out"}
    assert len(names) == 2
