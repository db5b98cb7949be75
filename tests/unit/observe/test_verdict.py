"""The verdict on made-up records: every cause, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from poseidon.observe.causes import Cause, JobVerdict
from poseidon.observe.links import LinkUse
from poseidon.observe.records import Record
from poseidon.observe.steps import BETWEEN, FORWARD
from poseidon.observe.verdict import judge
from poseidon.observe.windows import Window, Windows

SPAN_S, STEPS = 0.5, 5
USUAL_S = 0.1


def record(forward: float, backward: float, between: float, **more: object) -> Record:
    """A record of a worker whose parts of a step are given in seconds; the rest of it is waiting."""
    wait_s = SPAN_S - STEPS * (forward + backward + between)
    assert wait_s > -1e-9
    made = Record(
        span_s=SPAN_S,
        step=100,
        steps=STEPS,
        samples=STEPS * 32,
        forward_s=STEPS * forward,
        backward_s=STEPS * backward,
        between_s=STEPS * between,
        wait_s=max(0.0, wait_s),
        waits_s={"fc6": 0.8 * wait_s, "the others to start backward": 0.2 * wait_s},
        doing=BETWEEN,
        doing_s=0.01,
        places={"optimizer": 4, "input": 1},
    )
    return replace(made, **more)  # type: ignore[arg-type]


def windows(records: Sequence[Record], silent_s: Sequence[float] | None = None) -> list[Window]:
    return [
        Window(
            rank, f"node{rank}", [replace(one, ip=f"10.0.0.{rank}")] * 6, silent_s[rank] if silent_s else 0.1, USUAL_S
        )
        for rank, one in enumerate(records)
    ]


def judged(*records: Record, silent_s: Sequence[float] | None = None) -> JobVerdict:
    return judge(windows(records, silent_s))


EVEN = record(0.03, 0.06, 0.005)
FASTER = record(0.018, 0.04, 0.005)
WAITS = record(0.01, 0.02, 0.005)
"""Waits for the wire for most of a step."""


def linked(base: Record, rank: int, rates: Sequence[float], resent: float = 0.0) -> Record:
    """Give a worker links to all others: each carries what the slower of both ends can."""
    links = {
        f"10.0.0.{peer}": LinkUse(
            5_000_000, 5_000_000, 8 * 5e6 / min(rates[rank], rates[peer]), int(5_000_000 * resent), 0.001, 0
        )
        for peer in range(len(rates))
        if peer != rank
    }
    return replace(base, links=links)


def test_nothing_is_judged_before_the_first_step() -> None:
    assert judge(Windows(["a", "b"]).look(1.0)).cause is Cause.STARTING


def test_all_compute_and_nobody_waits() -> None:
    verdict = judged(EVEN, EVEN, EVEN)
    assert verdict.cause is Cause.COMPUTATION
    assert verdict.is_sure
    assert "a faster network would gain at most 5%" in str(verdict)
    assert "nothing to gain" in str(judged(record(0.035, 0.06, 0.004), record(0.035, 0.06, 0.004)))


@pytest.mark.parametrize("slow", [0, 2])
def test_a_machine_slower_in_backward_is_named_with_its_factor(slow: int) -> None:
    records = [FASTER] * 4
    records[slow] = record(0.018, 0.072, 0.005)
    verdict = judged(*records)
    assert (verdict.cause, verdict.host, verdict.rank, verdict.is_sure) == (Cause.SLOW, f"node{slow}", slow, True)
    assert f"node{slow}, 1.8x slower in backward" in str(verdict)
    assert verdict.waited_s == pytest.approx(6 * STEPS * 0.032, rel=0.01)


def test_a_machine_slower_in_both_passes() -> None:
    verdict = judged(FASTER, FASTER, record(0.027, 0.06, 0.005))
    assert verdict.host == "node2"
    assert "1.5x slower in forward and backward" in str(verdict)


def test_a_little_slower_is_said_with_doubt_and_less_is_not_said() -> None:
    usual = record(0.03, 0.055, 0.004)
    doubted = judged(usual, usual, record(0.03, 0.0625, 0.004))
    assert (doubted.cause, doubted.host, doubted.is_sure) == (Cause.SLOW, "node2", False)
    assert str(doubted).startswith("probably ")
    assert judged(usual, usual, record(0.03, 0.058, 0.004)).cause is Cause.COMPUTATION


def test_a_worker_that_is_slowest_only_now_and_then_is_not_blamed_for_sure() -> None:
    even, slow = record(0.03, 0.04, 0.004), record(0.03, 0.065, 0.0)
    seen = windows([even, even, even])
    seen[1] = replace(seen[1], records=[replace(one, ip="10.0.0.1") for one in (even, slow, even, slow, even, even)])
    verdict = judge(seen)
    assert not verdict.is_sure or verdict.rank is None


def test_busy_processors_are_told_from_a_slow_machine() -> None:
    verdict = judged(FASTER, FASTER, record(0.018, 0.072, 0.005, delay_s=0.15))
    assert (verdict.cause, verdict.host) == (Cause.BUSY, "node2")
    assert "waits for a processor" in str(verdict)


def test_a_processor_that_is_needed_only_now_and_then_and_then_is_busy() -> None:
    # It waits for one in 12 % of its own time, which is most of what it takes longer.
    usual = record(0.02, 0.055, 0.005)
    verdict = judged(usual, usual, record(0.02, 0.073, 0.005, delay_s=STEPS * 0.0115))
    assert (verdict.cause, verdict.host) == (Cause.BUSY, "node2")
    assert "1.3x slower in backward: its training thread waits for a processor 12% of the time" in str(verdict)


def test_a_slow_machine_that_also_waits_for_a_processor_is_slow() -> None:
    # Three times slower, and a quarter of it waiting: a quieter machine would still be slow.
    usual = record(0.01, 0.02, 0.002)
    verdict = judged(usual, usual, record(0.03, 0.06, 0.004, delay_s=STEPS * 0.024))
    assert (verdict.cause, verdict.host) == (Cause.SLOW, "node2")


def test_processors_that_are_busy_everywhere_are_no_machine_s_fault() -> None:
    busy = replace(EVEN, delay_s=0.2)
    verdict = judged(busy, busy, busy)
    assert (verdict.cause, verdict.host) == (Cause.BUSY, "")


def test_slow_input_on_one_machine() -> None:
    slow = record(0.018, 0.04, 0.035, places={"input": 9, "optimizer": 1})
    verdict = judged(FASTER, slow, FASTER)
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.INPUT, "node1", True)


def test_own_loading_code_is_named_by_its_line() -> None:
    slow = record(0.018, 0.04, 0.035, places={"train.py:31 in load": 9})
    assert "mostly in train.py:31 in load" in str(judged(FASTER, slow, FASTER))


def test_a_slow_optimizer_is_not_taken_for_input() -> None:
    slow = record(0.018, 0.04, 0.035, places={"optimizer": 9})
    verdict = judged(FASTER, slow, FASTER)
    assert (verdict.cause, verdict.host) == (Cause.SLOW, "node1")
    assert "optimizer" in str(verdict)


def test_input_that_is_slow_on_all_machines() -> None:
    slow = record(0.02, 0.03, 0.048, places={"input": 9, "optimizer": 1})
    verdict = judged(slow, slow)
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.INPUT, "", True)


def test_a_device_that_computes_on_its_own_is_not_taken_for_input() -> None:
    # The host waits for the loss's value between steps, while the device computes.
    host = record(0.01, 0.02, 0.065, places={"train.py:40 in main": 9}, is_async=True)
    assert judged(host, host).cause is Cause.COMPUTATION


def test_the_wire_with_links_that_are_alike() -> None:
    rates = [940e6] * 4
    verdict = judge(windows([linked(WAITS, rank, rates) for rank in range(4)]), line_rate=1e9)
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.WIRE, "", True)
    assert "fc6 waits 52 ms a step" in str(verdict)
    assert "940 Mbit/s of 1000" in str(verdict)


@pytest.mark.parametrize("slow", [0, 3])
def test_a_slow_link_is_named_though_it_shows_on_both_of_its_ends(slow: int) -> None:
    rates = [940e6] * 4
    rates[slow] = 312e6
    verdict = judge(windows([linked(WAITS, rank, rates) for rank in range(4)]))
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LINK, f"node{slow}", True)
    assert f"fc6 waits 52 ms a step on node{slow}'s link (312 of the 940 Mbit/s of the others)" in str(verdict)


def test_a_link_that_is_slow_for_a_part_of_the_time_is_named_with_doubt() -> None:
    slow, even = [940e6, 940e6, 940e6, 150e6], [940e6, 940e6, 700e6, 940e6]
    for count, is_sure in ((6, True), (3, False)):
        seen = windows([linked(WAITS, rank, slow) for rank in range(4)])
        later = windows([linked(WAITS, rank, even) for rank in range(4)])
        mixed = [
            replace(one, records=[*one.records[:count], *two.records[count:]])
            for one, two in zip(seen, later, strict=True)
        ]
        verdict = judge(mixed)
        assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LINK, "node3", is_sure)


def test_a_lossy_link_is_named() -> None:
    rates = [940e6] * 4
    records = [linked(WAITS, rank, rates, resent=0.05 if rank == 2 else 0.0) for rank in range(4)]
    verdict = judge(windows(records))
    assert (verdict.cause, verdict.host) == (Cause.LOSS, "node2")
    assert "5.0% of its bytes again" in str(verdict)


@pytest.mark.parametrize(("wait", "resent", "cause", "is_sure"), [
    (0.09, 0.03, Cause.LOSS, False),
    (0.09, 0.015, Cause.COMPUTATION, False),
    (0.09, 0.005, Cause.COMPUTATION, True),
    (0.03, 0.03, Cause.COMPUTATION, True),  # nobody waits for it
])  # fmt: skip
def test_a_lossy_link_that_costs_little_is_named_with_doubt(
    wait: float, resent: float, cause: Cause, is_sure: bool
) -> None:
    base = record(0.03, 0.1 - 0.03 - 0.1 * wait, 0.0)
    records = [linked(base, rank, [940e6] * 4, resent=resent if rank == 2 else 0.0) for rank in range(4)]
    verdict = judge(windows(records))
    assert verdict.cause is cause
    assert verdict.host == ("node2" if cause is Cause.LOSS else "")
    assert verdict.is_sure == is_sure


def test_loss_is_named_rather_than_a_link_that_is_only_a_little_slow() -> None:
    rates = [940e6, 940e6, 940e6, 500e6]
    verdict = judge(windows([linked(WAITS, rank, rates, 0.05 if rank == 2 else 0.0) for rank in range(4)]))
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LOSS, "node2", False)
    # A slow port drops what its queue cannot hold, and its neighbours send it again: they are not to blame.
    rates[3] = 100e6
    verdict = judge(windows([linked(WAITS, rank, rates, 0.05 if rank == 2 else 0.0) for rank in range(4)]))
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LINK, "node3", True)


def test_what_is_sent_again_to_one_machine_alone_may_be_lost_on_that_ones_link() -> None:
    rates = [940e6, 940e6, 940e6, 700e6]
    records = [linked(WAITS, rank, rates) for rank in range(4)]
    links = dict(records[0].links)
    links["10.0.0.3"] = replace(links["10.0.0.3"], resent_bytes=600_000)
    for spread, is_sure in ((0, False), (200_000, True)):
        links["10.0.0.1"] = replace(links["10.0.0.1"], resent_bytes=spread)
        verdict = judge(windows([replace(records[0], links=dict(links)), *records[1:]]))
        assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LOSS, "node0", is_sure)


def test_of_two_lossy_machines_the_slower_is_not_named_for_sure() -> None:
    rates = [940e6, 940e6, 940e6, 150e6]
    for other, is_sure in ((0.02, True), (0.07, False)):
        resent = [other, 0.0, 0.0, 0.035]
        verdict = judge(windows([linked(WAITS, rank, rates, resent[rank]) for rank in range(4)]))
        assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LOSS, "node3", is_sure)


def test_of_two_machines_no_end_of_their_link_is_blamed() -> None:
    verdict = judge(windows([linked(WAITS, rank, [300e6, 940e6]) for rank in range(2)]))
    assert (verdict.cause, verdict.host) == (Cause.WIRE, "")


def test_waits_inside_one_machine_are_not_called_the_wire() -> None:
    seen = [replace(one, host="here") for one in windows([WAITS] * 2)]
    assert "the exchange inside here" in str(judge(seen))


def test_a_straggler_is_found_although_the_wire_is_slow_too() -> None:
    rates = [940e6] * 4
    fast, slow = record(0.01, 0.02, 0.005), record(0.01, 0.06, 0.005)
    records = [linked(slow if rank == 1 else fast, rank, rates) for rank in range(4)]
    assert judge(windows(records)).host == "node1"


def test_a_worker_that_stands_while_others_wait() -> None:
    waits = replace(FASTER, waits_for="fc6", doing_s=4.0, steps=0)
    stands = replace(FASTER, doing=FORWARD, doing_s=4.0, steps=0, where="model.py:12 in forward")
    verdict = judged(waits, stands, waits)
    assert (verdict.cause, verdict.rank, verdict.is_sure) == (Cause.HUNG, 1, True)
    assert "has not moved for 4 s: it is in forward of step 100, model.py:12 in forward; 2 wait for it" in str(verdict)


def test_long_steps_are_no_hang() -> None:
    computes, waits = replace(FASTER, doing=FORWARD, doing_s=4.0), replace(FASTER, waits_for="fc6", doing_s=4.0)
    assert judged(computes, computes).cause is not Cause.HUNG
    usual = [replace(window, usual_s=1.0) for window in windows([computes, waits])]
    assert judge(usual).cause is not Cause.HUNG


def test_a_worker_that_says_nothing() -> None:
    verdict = judged(FASTER, FASTER, FASTER, silent_s=[0.1, 0.2, 3.5])
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.SILENT, "node2", True)


def test_a_worker_whom_the_others_hear_is_not_called_silent() -> None:
    rates = [70e6, 940e6, 940e6, 940e6]
    records = [linked(WAITS, rank, rates) for rank in range(4)]
    verdict = judge(windows(records, silent_s=[0.1, 2.5, 0.1, 0.1]))
    assert (verdict.cause, verdict.host, verdict.is_sure) == (Cause.LINK, "node0", False)
    # What workers that are silent themselves have received is long ago.
    for silent_s in ([0.1, 2.5, 2.6, 2.4], [0.1, 2.5, 0.1, 0.1]):
        deaf = [
            replace(record, links={}) if not silent else record
            for record, silent in zip(records, [one > 1 for one in silent_s], strict=True)
        ]
        verdict = judge(windows(deaf, silent_s))
        assert (verdict.cause, verdict.is_sure) == (Cause.SILENT, True)


def test_a_launcher_that_was_stopped_itself_blames_nobody() -> None:
    assert judged(EVEN, EVEN, silent_s=[9.0, 9.0]).cause is not Cause.SILENT


def test_stalls_of_a_whole_process() -> None:
    verdict = judged(FASTER, FASTER, replace(FASTER, stalled_s=0.2, faults=100))
    assert (verdict.cause, verdict.host) == (Cause.STALLS, "node2")
    assert "it swaps" in str(verdict)


def test_too_few_steps_are_not_judged() -> None:
    one = replace(EVEN, steps=0)
    seen = [replace(window, records=[*window.records[:1]]) for window in windows([EVEN, one])]
    assert judge(seen).cause is Cause.UNCLEAR
