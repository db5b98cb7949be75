"""Every order of events of small steps: what starts when, what is refused, and how a step ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from poseidon.engine.rollcall import RollCall, pack_flags, unpack_flags
from poseidon.engine.step import Action, Call, Compare, Completed, Phase, Start, Step, Tell
from poseidon.errors import MismatchError, UnsupportedError
from poseidon.planning.schedule import Schedule
from poseidon.routes import standard_routes
from toy_models import CONV, FC, HEAD, TABLE, schedule

PLAIN = schedule([CONV, FC, HEAD], ["allreduce", "allreduce", "allreduce"], bucket_bytes=1)
MIXED = schedule([CONV, FC, TABLE, HEAD], ["allreduce", "factors", "rows", "factors"], bucket_bytes=1, defers=True)
GATHERED = schedule(
    [CONV, FC, HEAD],
    ["allreduce", "factors", "factors"],
    bucket_bytes=1,
    routes=standard_routes(gathers_factors=True),
)


def make(plan: Schedule, number: int = 0, is_static: bool = False, kind: type[Step] = Step, **options: Any) -> Step:
    step = kind(plan, RollCall(number, False, 8), is_static, **options)
    assert step.begin() == [Call(step.call)]
    return step


def starts(actions: Sequence[Action]) -> list[int]:
    return [action.item for action in actions if isinstance(action, Start)]


def run(step: Step, order: Sequence[int]) -> list[int]:
    """Go through a whole step as ``backward.py`` does; return the items in the order in which they started."""
    plan, final, started = step.schedule, set(), []
    for parameter in order:
        final.add(parameter)
        for item in starts(step.gradient(parameter)):
            assert set(plan.items[item].parameters) <= final, "an item left before its last gradient"
            started.append(item)
            step.started(item)
        assert set(may_have_left(plan, final)) <= set(started), "an item that could leave stayed"
    assert step.close() == ([], [])
    flags = [[0] * len(plan.flagged)] * 2 if plan.flagged else ()
    step.hear([step.call] * 2, flags)
    for item in plan.landing_order:
        step.land(item)
    assert sorted(started) == list(range(len(plan.items))), "not every item left once"
    for queue in plan.queues.values():
        assert [item for item in started if item in queue] == list(queue), "a queue lost its order"
    assert step.phase is Phase.LANDED, "a landing was lost"
    return started


def may_have_left(plan: Schedule, final: set[int]) -> Iterator[int]:
    """Yield the items that are complete and not behind an incomplete one of their queue."""
    for item in plan.items:
        queue = next((queue for queue in plan.queues.values() if item.number in queue), (item.number,))
        ahead = queue[: queue.index(item.number) + 1]
        if all(set(plan.items[each].parameters) <= final for each in ahead):
            yield item.number


@pytest.mark.parametrize("plan", [PLAIN, MIXED, GATHERED], ids=["plain", "mixed", "gathered"])
def test_in_every_order_each_item_starts_once_when_complete_and_queues_keep_their_order(plan: Schedule) -> None:
    run_all_orders(plan)


def run_all_orders(plan: Schedule, kind: type[Step] = Step) -> None:
    for order in itertools.permutations(range(len(plan.model.parameters))):
        run(make(plan, kind=kind), order)


class BrokenOrder(Step):
    """Lets a queued item leave as soon as it is complete."""

    def _complete(self, item: int) -> list[Action]:
        return [Start(item)]


class LostLanding(Step):
    """Forgets one landing."""

    def land(self, item: int) -> None:
        if item != 1:
            super().land(item)


class DoubleLanding(Step):
    """Takes one landing for two."""

    def land(self, item: int) -> None:
        super().land(item)
        if item == 1:
            super().land(item)


class DoubleStart(Step):
    """Lets an item leave again with the next gradient."""

    def _settle(self, parameter: int) -> list[Action]:
        return super()._settle(parameter) + ([Start(0)] if self.under_way else [])


@pytest.mark.parametrize("kind", [BrokenOrder, LostLanding, DoubleLanding, DoubleStart])
def test_these_checks_notice_a_step_that_is_broken(kind: type[Step]) -> None:
    with pytest.raises(AssertionError, match=r"order|lost|twice"):
        run_all_orders(PLAIN, kind)


def test_flags_are_compared_once_as_soon_as_the_last_flagged_item_has_left() -> None:
    assert len(MIXED.flagged) == 3
    for order in itertools.permutations(MIXED.flagged):
        step = make(MIXED)
        told = [step.started(item, flags=item + 1) for item in order]
        assert told[:-1] == [[], []]
        assert told[-1] == [Compare(tuple(item + 1 for item in MIXED.flagged))]


def test_flags_that_are_known_late_delay_their_comparison() -> None:
    first, *others = MIXED.flagged
    step = make(MIXED)
    assert step.started(first, None) == []
    assert [step.started(item, flags=item + 1) for item in others] == [[], []]
    assert step.flag(first, first + 1) == [Compare(tuple(item + 1 for item in MIXED.flagged))]


def test_flags_travel_with_the_message_where_nobody_need_know_before() -> None:
    assert schedule([FC, HEAD], ["factors", "factors"]).flagged == ()
    assert len(GATHERED.flagged) == 2


def test_one_workers_flag_makes_everybody_land_everything_at_once() -> None:
    step = make(MIXED)
    for parameter in range(len(MIXED.model.parameters)):
        for item in starts(step.gradient(parameter)):
            step.started(item)
    step.close()
    verdict = step.hear([step.call, step.call], [[0, 0, 0], [0, 1, 0]])
    assert verdict.must_land
    assert verdict.flags[MIXED.flagged[1]] == (0, 1)


def settled() -> Step:
    """Return a step whose items are all under way and may land."""
    step = make(PLAIN)
    for parameter in range(len(PLAIN.model.parameters)):
        for item in starts(step.gradient(parameter)):
            step.started(item)
    step.close()
    step.hear([step.call])
    return step


def test_a_lost_landing_leaves_the_step_unfinished() -> None:
    step = settled()
    for item in PLAIN.landing_order[:-1]:
        step.land(item)
    assert step.phase is Phase.SETTLED
    assert step.under_way == {PLAIN.landing_order[-1]}
    step.land(PLAIN.landing_order[-1])
    assert step.phase is Phase.LANDED
    assert step.under_way == frozenset()


def test_a_double_landing_is_refused() -> None:
    step = settled()
    step.land(0)
    with pytest.raises(AssertionError, match="item 0 landed twice"):
        step.land(0)


def test_what_never_started_cannot_land_and_nothing_starts_twice() -> None:
    step = make(PLAIN)
    step.started(0)
    with pytest.raises(AssertionError, match="started twice"):
        step.started(0)
    step.close()
    step.hear([step.call])
    with pytest.raises(AssertionError, match="never started"):
        step.land(1)


def test_events_out_of_turn_are_refused() -> None:
    step = make(PLAIN)
    with pytest.raises(AssertionError, match="landed while the step is open"):
        step.land(0)
    with pytest.raises(AssertionError, match="while the step is open"):
        step.hear([step.call])
    step.close()
    for event in (lambda: step.gradient(0), step.close):
        with pytest.raises(AssertionError, match=r"while (the step|it) is closed"):
            event()


def test_what_no_gradient_came_for_is_named_and_leaves_at_the_end() -> None:
    step = make(PLAIN)
    last = len(PLAIN.model.parameters) - 1
    left = starts(step.gradient(last))
    actions, forgotten = step.close()
    assert forgotten == list(range(last))
    assert sorted(left + starts(actions)) == list(range(len(PLAIN.items)))


def test_unused_parameters_hold_nothing_up() -> None:
    step = Step(PLAIN, RollCall(0, False, 8))
    actions = step.begin(unused=range(len(PLAIN.model.parameters)))
    assert sorted(starts(actions)) == list(range(len(PLAIN.items)))
    assert step.close() == ([], [])


def test_a_gradient_that_is_final_twice_is_refused_with_what_to_do() -> None:
    step = make(PLAIN)
    step.gradient(0)
    with pytest.raises(UnsupportedError, match=r"with name conv.*finished twice.*use_reentrant=False"):
        step.gradient(0)


def test_a_static_graph_learns_in_its_first_step_and_counts_from_then_on() -> None:
    first = make(PLAIN, is_static=True)
    for parameter in (0, 1, 2, 2, 3, 4):
        assert first.gradient(parameter) == []
    actions, forgotten = first.close()
    assert sorted(starts(actions)) == list(range(len(PLAIN.items)))
    assert forgotten == []
    expected = [first.additions[parameter] for parameter in range(5)]
    assert expected == [1, 1, 2, 1, 1]
    second = make(PLAIN, 1, True, expected=expected)
    complete = [starts(second.gradient(parameter)) for parameter in (4, 3, 2, 2)]
    # Parameter 2 is the first half of the second item in backward's order; its first addition completes nothing.
    assert complete[2] == []
    assert complete[3] != []
    with pytest.raises(
        UnsupportedError, match=r"graph has changed.* fc.* got a gradient 3 time\(s\) in step 1, 2 in the first"
    ):
        second.gradient(2)


def test_a_static_graphs_unused_parameters_hold_nothing_up() -> None:
    step = Step(PLAIN, RollCall(1, False, 8), is_static=True, expected=[0, 0, 1, 1, 1])
    left = starts(step.begin())
    for parameter in (4, 3, 2):
        left += starts(step.gradient(parameter))
    assert sorted(left) == list(range(len(PLAIN.items)))
    assert step.close() == ([], [])


def test_a_static_graph_that_leaves_something_out_is_noticed() -> None:
    step = Step(PLAIN, RollCall(1, False, 8), is_static=True, expected=[0, 0, 2, 1, 1])
    step.begin()
    for parameter in (4, 2):
        step.gradient(parameter)
    _, short = step.close()
    assert short == [2, 3]


def test_workers_tell_which_parameters_they_used() -> None:
    step = make(PLAIN, tells_used=True, kept=[1])
    step.gradient(4)
    step.gradient(3, is_used=False)
    step.close()
    # 1 has a gradient from no_sync(), and autograd reached 3 without one.
    assert step.tell() == [Tell((False, True, False, False, True))]
    silent = make(PLAIN)
    silent.close()
    assert silent.tell() == []


@pytest.mark.parametrize("count", [0, 1, 61, 62, 63, 200])
def test_flags_arrive_as_they_were_sent(count: int) -> None:
    flags = tuple(number % 3 == 0 for number in range(count))
    assert unpack_flags(pack_flags(flags), count) == flags


def test_units_are_recorded_in_the_order_in_which_they_become_final() -> None:
    step = make(PLAIN)
    for parameter in (2, 0, 4, 3, 1):
        step.gradient(parameter)
    assert step.ready_order == [2, 1, 0]


def test_times_are_taken_only_if_wanted() -> None:
    silent, timed = make(PLAIN), make(PLAIN, takes_times=True)
    assert not any(isinstance(action, Completed) for p in range(5) for action in silent.gradient(p))
    told = [action.item for p in range(5) for action in timed.gradient(p) if isinstance(action, Completed)]
    assert sorted(told) == list(range(len(PLAIN.items)))


def test_workers_out_of_step_are_named() -> None:
    step = make(PLAIN, 3)
    step.close()
    with pytest.raises(MismatchError, match="rank 0 is in backward 3, rank 1 in backward 4"):
        step.hear([step.call, RollCall(4, False, 8)], rank=0)
    other = make(PLAIN, 3)
    other.close()
    with pytest.raises(MismatchError, match=r"rank 0 had none from no_sync\(\).*rank 1 had gradients from no_sync"):
        other.hear([other.call, RollCall(3, True, 8)], rank=0)


def test_a_worker_without_input_may_answer_otherwise() -> None:
    step = make(PLAIN, 3)
    step.close()
    verdict = step.hear([step.call, RollCall(3, True, 0, is_joined=True)])
    assert verdict.active == 1


def test_a_parameter_counts_as_used_if_any_worker_uses_it() -> None:
    step = make(PLAIN)
    step.close()
    used = [(True, False, False, True, True), (False, False, True, True, True)]
    verdict = step.hear([step.call] * 2, used=used)
    assert [verdict.is_used(parameter) for parameter in range(5)] == [True, False, True, True, True]
    assert all(make_verdict().is_used(parameter) for parameter in range(5))


def make_verdict():
    step = make(PLAIN)
    step.close()
    return step.hear([step.call])


def test_the_first_error_stays() -> None:
    step = make(PLAIN)
    first, second = RuntimeError("lost"), RuntimeError("later")
    step.fail(first)
    step.fail(second)
    assert step.phase is Phase.BROKEN
    assert step.error is first


@pytest.mark.parametrize("call", [RollCall(0, False, 0), RollCall(7, True, 12, True), RollCall(2, False, 3, taken=9)])
def test_a_roll_call_arrives_as_it_was_sent(call: RollCall) -> None:
    assert RollCall.from_words(call.words()) == call
