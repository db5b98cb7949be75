"""``poseidon bench --to-loss``: its options, what is left to measure, and what the ranks' messages become."""

import argparse
import json
from dataclasses import replace

import pytest

from poseidon.cli import bench as command
from poseidon.cli import to_loss
from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.lab.bench_worker import MARK
from poseidon.lab.environment import WorkerPlace
from poseidon.lab.loss_bench import LossEvents, resume, write_losses
from poseidon.lab.loss_worker import LossCell, LossWorkerSettings, stall_s
from poseidon.lab.system_names import traits_of

QUICK = ("--tiny", "--steps", "20", "--every", "10", "--seeds", "2")


def parse(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return to_loss.make_settings(parser.parse_args(["--to-loss", *options]))


@pytest.fixture
def events():
    settings = parse("text", *QUICK, "--against", "ddp,lowrank,ssp", "--dilate", "1")
    saved = []
    made = LossEvents(settings, settings.blank(), lambda _: None, saved.append)
    made.saved = saved
    return made


def tell(events, event, **details):
    events.output.hear(WorkerPlace(0, 2), MARK + json.dumps({"event": event, **details}))


def test_a_lesson_brings_its_own_settings():
    settings = parse()
    assert (settings.lesson, settings.rate_bits, len(settings.seeds)) == ("text", 10**8, 3)
    assert settings.steps_of("ddp") == settings.steps_of("poseidon") == settings.steps
    assert settings.steps_of("local") == 2 * settings.steps
    assert settings.paced_ms is not None
    assert parse("text", "--paced", "none").paced_ms is None
    assert not settings.is_timed("lowrank")
    assert settings.is_timed("ssp")
    assert settings.is_timed("lowrank:warmup_steps=5")
    assert replace(settings, is_real=True).is_timed("ddp")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["text", "--against", "lowrank"], "add ddp to --against"),
        (["text", "--against", "ddp,nosuch"], "unknown system 'nosuch'"),
        (["text", "--models", "lenet"], "--models has no meaning with --to-loss"),
        (["text", "--batch", "4,gpt2=2"], "it is one number"),
        (["text", "--stalls", "0.2"], "PROBABILITY:STEPS"),
        (["text", "--stalls", "2:3"], "a probability is 0 to 1"),
        (["text", "--stalls", "0.2:3", "--paced", "none"], "give --paced"),
        (["text", "--steps", "5"], "more than the 5 steps"),
        (["text", "--dilate", "0.5"], "--dilate 0.5: at least 1"),
        (["text", "--dilate", "4", "--paced", "none"], "only paced compute"),
        (["text", "--stalls", "0.2:nan"], "a stall takes 0 steps' time or more"),
        (["text", "--more", "0.5"], "at least the steps of the others"),
        (["text", "--more", "inf"], "at least the steps of the others"),
        (["text", "--seeds", "0"], "at least 1"),
        (["text", "--target", "nan"], "a finite number"),
        (["text", "--tolerance", "nan"], "percent above ddp's final loss"),
        (["text", "--tolerance", "-5"], "percent above ddp's final loss"),
        (["text", "--machines", "2,4"], "2 to 250 machines"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(*options)


def test_its_options_are_refused_without_it(capsys):
    assert main(["bench", "--seeds", "2"]) == 1
    assert "--seeds needs --to-loss" in capsys.readouterr().err


def test_short_names_say_what_they_are():
    assert traits_of("ddp").is_exact
    assert traits_of("poseidon-distribute:update=server").is_exact
    assert not traits_of("ddp-powersgd").is_exact
    assert not traits_of("lowrank:rank=8").is_exact
    assert traits_of("local:sync_every=50").period == 50
    assert traits_of("ssp").is_drifting
    assert not traits_of("local").is_drifting


def test_cells_are_divided_by_how_they_are_measured():
    settings = parse("text", *QUICK, "--against", "ddp,lowrank,ssp")
    assert [cell.system for cell in settings.cells("tempos")] == ["linear", "ddp", "lowrank"]
    assert settings.cells("curves")[:2] == [LossCell("ddp", 0, 20, 20), LossCell("lowrank", 0, 40, 20)]
    assert {cell.system for cell in settings.cells("timed")} == {"ssp"}


def test_messages_become_runs_and_tempos_and_each_is_saved(events):
    events.purpose = "tempos"
    tell(events, "begin", system="ddp", seed=0)
    tell(events, "tempo", system="ddp", step_ms=50.0, sent_bytes=1e6, note="")
    assert [cell.system for cell in events.missing()] == ["linear", "lowrank"]
    events.purpose = "curves"
    tell(events, "run", system="ddp", seed=1, note="", marks=[[10, 3.0, 0.5, 7.0], [20, 2.5, 1.0, 14.0]])
    assert LossCell("ddp", 1, 20, 20) not in events.missing()
    assert events.targets() == ((1, pytest.approx(2.75 * 1.005)),)
    found = events.saved[-1]
    assert found.tempos["ddp"].step_ms == 50.0
    # A curve is not on the clock, however long it took to compute.
    assert [mark.seconds for mark in found.runs[0].marks] == [None, None]
    assert found.timed(found.runs[0]).marks[-1].seconds == 1.0
    events.purpose = "timed"
    tell(events, "run", system="ssp", seed=0, note="", marks=[[10, 3.0, 0.5, 7.0]])
    assert events.saved[-1].runs_of("ssp")[0].marks[0].seconds == 0.5


def test_dilated_times_are_divided_by_the_factor():
    settings = parse("text", *QUICK, "--against", "ddp,ssp", "--paced", "40:80", "--dilate", "4")
    assert settings.dilated_ms == (160.0, 320.0)
    assert settings.blank().paced_ms == 120.0
    assert replace(settings, stalls=(0.25, 4.0)).blank().paced_ms == 240.0
    saved = []
    events = LossEvents(settings, settings.blank(), lambda _: None, saved.append)
    events.purpose = "tempos"
    tell(events, "tempo", system="ddp", step_ms=1000.0, sent_bytes=1e6, note="")
    events.purpose = "timed"
    tell(events, "run", system="ssp", seed=0, note="", marks=[[10, 3.0, 8.0, 7.0]])
    assert saved[-1].tempos["ddp"].step_ms == 250.0
    assert saved[-1].runs[0].marks[0].seconds == 2.0


def test_a_cell_that_takes_the_job_down_is_blamed_and_the_others_go_on(events):
    events.purpose = "curves"
    cells = events.missing()
    tell(events, "begin", system="lowrank", seed=0)
    events.blame(cells, "machine1 was killed by SIGKILL")
    assert LossCell("lowrank", 0, 40, 20) not in events.missing()
    assert len(events.missing()) == len(cells) - 1
    events.blame(events.missing(), "no machine started")
    assert events.missing() == []


def test_what_is_measured_is_not_measured_again_but_failures_are(events, tmp_path):
    settings = parse("text", *QUICK, "--against", "ddp,lowrank,ssp", "--dilate", "1")
    events.purpose = "curves"
    tell(events, "run", system="ddp", seed=0, note="", marks=[[20, 3.0, 0.5, 7.0]])
    tell(events, "failure", system="lowrank", seed=0, failure="boom")
    path = tmp_path / "a.json"
    write_losses(path, settings, events.ordered())
    again = LossEvents(settings, resume(path, settings), lambda _: None, lambda _: None)
    again.purpose = "curves"
    assert LossCell("ddp", 0, 20, 20) not in again.missing()
    assert LossCell("lowrank", 0, 40, 20) in again.missing()
    with pytest.raises(ConfigError, match="steps 20 there, 30 here"):
        resume(path, replace(settings, steps=30))
    assert resume(path, replace(settings, seeds=(0, 1, 2), tolerance=0.1)).tolerance == 0.1


def test_a_comparison_of_fewer_systems_and_seeds_keeps_what_the_file_has(events, tmp_path):
    path = tmp_path / "a.json"
    settings = parse("text", *QUICK, "--against", "ddp,lowrank,ssp", "--dilate", "1")
    events.purpose = "curves"
    for seed in (1, 0):
        for system in ("lowrank", "ddp"):
            tell(events, "run", system=system, seed=seed, note="", marks=[[20, 3.0, 0.5, 7.0], [40, 2.0, 1.0, 14.0]])
    write_losses(path, settings, events.ordered())
    fewer = replace(settings, systems=("int8", "ddp"), seeds=(0,))
    again = LossEvents(fewer, resume(path, fewer), lambda _: None, lambda _: None)
    found = [(run.system, run.seed) for run in again.ordered().runs]
    assert found == [("ddp", 0), ("ddp", 1), ("lowrank", 0), ("lowrank", 1)]


def test_a_curve_that_ended_at_an_earlier_target_goes_on_to_a_lower_one(events, tmp_path):
    path = tmp_path / "a.json"
    settings = parse("text", *QUICK, "--against", "ddp,lowrank", "--dilate", "1", "--target", "2.8")
    events.purpose = "curves"
    tell(events, "run", system="lowrank", seed=0, note="", marks=[[10, 3.0, 0.5, 7.0], [20, 2.5, 1.0, 14.0]])
    write_losses(path, settings, events.ordered())
    for target, is_missing in ((2.9, False), (2.75, False), (2.7, True)):
        asked = replace(settings, target=target)
        again = LossEvents(asked, resume(path, asked), lambda _: None, lambda _: None)
        again.purpose = "curves"
        assert (LossCell("lowrank", 0, 40, 20) in again.missing()) is is_missing


def test_files_of_the_two_comparisons_are_told_apart(tmp_path, capsys):
    settings = parse("text", *QUICK)
    path = tmp_path / "a.json"
    write_losses(path, settings, settings.blank())
    assert main(["bench", "--plot", str(path)]) == 0
    shown = capsys.readouterr()
    assert "not known yet" in shown.out
    assert "no run has a curve to draw" in shown.err
    path.write_text("{}")
    assert main(["bench", "--to-loss", "text", "--output", str(path), *QUICK]) != 0


def test_stalls_are_the_same_for_every_system_and_seldom_enough():
    settings = LossWorkerSettings("timed", "text", (), 2, 10, paced_ms=(40.0, 60.0), stalls=(0.2, 3.0))
    stalls = [stall_s(settings, 0, step, 1) for step in range(500)]
    assert stalls == [stall_s(settings, 0, step, 1) for step in range(500)]
    assert sorted(set(stalls)) == [0.0, pytest.approx(0.3)]
    assert 60 < sum(stall > 0 for stall in stalls) < 140
    assert stall_s(replace(settings, stalls=None), 0, 0, 0) == 0.0


def test_a_picture_is_drawn_with_a_line_for_each_system(events, tmp_path):
    pytest.importorskip("matplotlib")
    events.purpose = "timed"
    for system in ("ddp", "ssp"):
        tell(events, "run", system=system, seed=0, note="", marks=[[10, 3.0, 0.5, 7.0], [20, 2.5, 1.0, 14.0]])
    path = tmp_path / "a.json"
    settings = parse("text", *QUICK, "--against", "ddp,ssp")
    write_losses(path, settings, events.ordered())
    assert main(["bench", "--plot", str(path)]) == 0
    assert path.with_suffix(".png").stat().st_size > 10_000
