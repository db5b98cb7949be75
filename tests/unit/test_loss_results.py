"""Time to a loss: when a target counts as reached, what the table says, and what survives a file."""

import pytest

from poseidon.lab.loss_results import (
    Comparison,
    LossRun,
    Mark,
    Tempo,
    comparison_from_json,
    comparison_to_json,
    format_comparison,
    merge_runs,
    outline,
    reach,
    smooth,
)


def run(system, losses, seed=0, every=10, seconds=None, **options):
    marks = [
        Mark(
            every * (place + 1),
            loss,
            None if seconds is None else seconds * (place + 1),
            None if seconds is None else 1e6,
        )
        for place, loss in enumerate(losses)
    ]
    return LossRun(system, seed, tuple(marks), **options)


def compare(*runs, tempos=None, **options):
    settings = {"tolerance": 0.005, "paced_ms": 100.0, **options}
    measured = {"linear": Tempo(101.0, 0.0), "ddp": Tempo(1000.0, 3e6), "lowrank": Tempo(100.0, 1e5)}
    return Comparison(
        "text", "a text", 5_000_000, 4, 10**8, 2, "paced", tempos=tempos or measured, runs=runs, **settings
    )


FALLING = (3.0, 2.0, 1.0, 1.0, 1.0)


def test_a_loss_is_the_mean_of_the_latest_evaluations():
    assert [mark.loss for mark in smooth(run("ddp", FALLING).marks)] == [3.0, 2.5, 2.0, pytest.approx(4 / 3), 1.0]


def test_one_lucky_evaluation_does_not_reach_the_target():
    marks = run("ddp", (3.0, 3.0, 1.0, 3.0, 1.4, 1.4, 1.4)).marks
    assert reach(marks, 1.5).step == 70
    assert reach(marks, 1.3) is None


def test_the_target_is_the_references_final_loss_of_the_same_seed():
    comparison = compare(run("ddp", FALLING), run("ddp", (4.0, 2.0, 2.0, 2.0), seed=1))
    assert comparison.target_of(0) == pytest.approx(1.005)
    assert comparison.target_of(1) == pytest.approx(2.01)
    assert comparison.target_of(2) is None
    assert compare(run("ddp", FALLING), target=1.7).target_of(0) == 1.7


def test_curves_by_step_become_seconds_by_the_systems_own_tempo():
    comparison = compare(run("ddp", FALLING), run("lowrank", (3.0, 2.0, *(1.0,) * 5)))
    ddp, lowrank = outline(comparison, "ddp"), outline(comparison, "lowrank")
    assert (ddp.steps, ddp.seconds, ddp.sent_bytes, ddp.speedup) == (50, 50.0, 150e6, 1.0)
    assert (lowrank.steps, lowrank.seconds, lowrank.sent_bytes) == (50, 5.0, 5e6)
    assert lowrank.speedup == pytest.approx(10.0)
    assert lowrank.total_s == 7.0
    assert {ddp.way, lowrank.way} == {"steps"}


def test_a_run_on_the_clock_keeps_its_own_seconds():
    row = outline(compare(run("ddp", FALLING), run("ssp", FALLING, seconds=4.0)), "ssp")
    assert (row.seconds, row.speedup, row.way) == (20.0, 2.5, "timed")


def test_the_table_says_where_a_target_is_not_reached_and_with_how_many_seeds():
    slow = (3.0, 2.9, 2.8)
    comparison = compare(
        run("ddp", FALLING), run("ddp", FALLING, seed=1), run("lowrank", slow), run("lowrank", FALLING, seed=1)
    )
    assert "reached with 1 of 2 seeds" in format_comparison(comparison)
    never = compare(run("ddp", FALLING), run("lowrank", slow))
    line = next(line for line in format_comparison(never).splitlines() if line.startswith("  lowrank"))
    assert "target not reached" in line
    assert line.split()[-2:] == ["-", "steps"]


def test_the_table_says_what_failed_and_that_a_busy_machine_did_not_keep_the_pace():
    comparison = compare(run("ddp", FALLING), LossRun("lowrank", 0, failure="rank 1: boom"))
    assert "failed: rank 1: boom" in format_comparison(comparison)
    assert "too busy" not in format_comparison(comparison)
    busy = {"linear": Tempo(140.0), "ddp": Tempo(1000.0)}
    assert "too busy or too slow" in format_comparison(compare(run("ddp", FALLING), tempos=busy))
    lost = compare(
        run("ddp", FALLING), run("lowrank", FALLING), tempos={"ddp": Tempo(1.0), "lowrank": Tempo(failure="no")}
    )
    assert outline(lost, "lowrank").failure == "no"


def test_results_survive_a_file():
    comparison = compare(run("ddp", FALLING, note="plan"), run("ssp", FALLING, seconds=4.0))
    data = comparison_to_json(comparison)
    assert comparison_from_json(data) == comparison
    assert data["table"][0]["speedup"] == 1.0


def test_a_run_repeated_takes_the_place_of_the_first():
    runs = merge_runs((run("ddp", (3.0,)), run("ddp", (3.0,), seed=1)), run("ddp", (2.0,)))
    assert [(one.seed, one.marks[0].loss) for one in runs] == [(1, 3.0), (0, 2.0)]
