"""The simulation of a whole job: seeds with all faults, and the defects that it must find."""

from __future__ import annotations

import pytest

from nightly import amount
from storm.faults import KINDS
from storm.members import run_members
from storm.relapses import RELAPSES
from storm.seeds import run_seed

SEEDS = 200
PARTS = 8
MEMBER_SEEDS = amount(60, 3000)
# A seed that shows each defect when it is put back.
FOUND_BY: dict[str, int] = {
    "a damaged payload is counted, and nobody is told": 12,
    "the mesh has no checksums": 6,
    "one accept that fails ends the door": 7,
    "nothing limits the silence of a connection": 16,
    "a broken connection is blamed on the slowest worker": 0,
    "the launcher names the first to complain": 0,
    "a table in lockstep goes on without a worker that was lost before": 31,
    "nobody tells a worker that it was given up": 12,
    "who gives up tells it only after its connections have ended": 111,
}


@pytest.mark.parametrize("part", range(PARTS))
def test_every_job_ends_with_the_right_bits_or_names_the_fault(part: int) -> None:
    wrong = [str(outcome) for seed in range(part, SEEDS, PARTS) if (outcome := run_seed(seed)).wrong]
    assert not wrong, "\n".join([*wrong, "again, with all that happened: python tests/storm/seeds.py --seed N --trace"])


def test_workers_die_and_come_again_and_no_step_is_lost_or_taken_back() -> None:
    outcomes = [run_members(seed) for seed in range(MEMBER_SEEDS)]
    wrong = [str(outcome) for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)
    # Otherwise they would show little.
    assert sum(outcome.deaths for outcome in outcomes) > MEMBER_SEEDS
    assert sum(outcome.epochs > 2 for outcome in outcomes) > MEMBER_SEEDS // 10
    assert sum(outcome.has_lost_shards for outcome in outcomes) < MEMBER_SEEDS // 5


def test_a_seed_runs_the_same_way_again_and_another_one_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = run_seed(7), run_seed(8)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # of the real machine
    again = run_seed(7)
    assert (first.digest, first.moves, first.seconds) == (again.digest, again.moves, again.seconds)
    assert first.digest != other.digest


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing"])
def test_every_kind_of_fault_strikes(kind: str) -> None:
    outcomes = (run_seed(seed, [kind]) for seed in (0, 16, 25))
    assert any(outcome.faults[0].struck_at is not None for outcome in outcomes)


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_defect_that_comes_back_is_found(name: str) -> None:
    kind, bring_back = RELAPSES[name]
    seed = FOUND_BY[name]
    assert not run_seed(seed, [kind]).wrong
    with bring_back():
        assert run_seed(seed, [kind]).wrong


def test_each_defect_has_its_seed() -> None:
    assert set(FOUND_BY) == set(RELAPSES)
