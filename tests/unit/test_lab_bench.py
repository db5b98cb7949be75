import argparse
import json
from dataclasses import replace

import pytest
import torch

from poseidon.cli import bench as command
from poseidon.cli.main import main
from poseidon.engine import stopwatch
from poseidon.errors import ConfigError
from poseidon.lab import bench, bench_worker, picture, results
from poseidon.lab.bench import CellEvents, JobEvents
from poseidon.lab.bench_worker import MARK, WorkerSettings
from poseidon.lab.environment import WorkerPlace
from poseidon.lab.job import JobResult
from poseidon.lab.results import Cell, Measured, Repetition
from poseidon.lab.spec import make_spec

WORKER = WorkerSettings("lenet", ("linear", "ddp", "poseidon"), 8, 5, 2, 2, 1, "cpu")


def repetition(ms=10.0, last=1.0, first=2.0, sent=100.0):
    return Repetition(ms, sent, first, last)


def cell(**systems):
    measured = {name: Measured((each,)) if isinstance(each, Repetition) else each for name, each in systems.items()}
    return Cell("lenet", 4, 10**9, 8, 1000, 4000, measured)


def parse(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.make_settings(parser.parse_args(options))


def test_median_and_spread_ignore_order():
    measured = Measured(tuple(repetition(ms, sent=ms) for ms in (30, 10, 11)))
    assert (measured.step_ms, measured.spread_ms, measured.sent_bytes) == (11, (10, 30), 11)


class Overlapping:
    """A system that waits in each step for what the last one sent, on its own clock: 10 ms, unless all have met."""

    def __init__(self):
        self.now_s = 0.0
        self.waits = False

    def meet(self, device):
        self.waits = False

    def step(self):
        self.now_s += 0.01 if self.waits else 0.003
        self.waits = True
        return torch.tensor(1.0)

    def note(self):
        return ""


def test_a_step_that_has_nothing_to_wait_for_is_not_timed(monkeypatch):
    trainer = Overlapping()
    monkeypatch.setattr(bench_worker, "settle", trainer.meet)
    monkeypatch.setattr(stopwatch, "_now", lambda _: trainer.now_s)
    block = bench_worker._time_steps(trainer, WORKER, torch.device("cpu"))
    assert block.laps_ms == (10.0,) * WORKER.steps
    assert block.step_ms == pytest.approx(10)


def test_wire_bound_of_resnet152_on_8_machines():
    assert results.wire_bound_ms(241_000_000, 8, 10**10) == pytest.approx(337.4, abs=0.1)
    assert results.wire_bound_ms(241_000_000, 8, 0) == 0


def test_speedup_is_measured_against_the_linear_bound():
    made = cell(linear=repetition(10), ddp=repetition(40), poseidon=Measured(failure="boom"))
    assert (made.speedup("linear"), made.speedup("ddp"), made.speedup("poseidon")) == (4, 1, None)
    assert cell(ddp=repetition()).speedup("ddp") is None


def test_a_fast_wrong_answer_is_seen():
    ddp = repetition(last=1.0)
    made = cell(linear=repetition(last=0.3), ddp=ddp, poseidon=repetition(ms=1, last=0.9))
    assert [made.verdict(name) for name in made.systems] == ["", "ok", "WRONG"]
    assert cell(ddp=ddp, poseidon=repetition(last=1.01)).verdict("poseidon") == "ok"
    assert cell(ddp=ddp, poseidon=repetition(first=1.8, last=1.0)).verdict("poseidon") == "WRONG"
    assert cell(**{"ddp": ddp, "ddp-powersgd": repetition(last=1.5)}).verdict("ddp-powersgd") == "lossy"
    assert cell(**{"ddp": ddp, "local:sync_every=9": repetition(last=1.5)}).verdict("local:sync_every=9") == "lossy"
    assert cell(ddp=ddp, poseidon=Measured(failure="boom")).verdict("poseidon") == "failed"


def test_one_bad_repetition_is_enough_to_be_wrong():
    drifting = Measured((repetition(last=1.0), repetition(last=1.5)))
    assert cell(ddp=drifting).verdict("ddp") == "WRONG"


def test_without_ddp_another_exact_system_is_the_reference():
    made = cell(**{"ddp-gloo": repetition(last=1.0), "poseidon": repetition(last=0.5)})
    assert made.verdict("poseidon") == "WRONG"
    assert cell(poseidon=repetition()).verdict("poseidon") == ""


def test_cells_survive_json():
    made = cell(linear=repetition(), ddp=Measured(failure="boom"), poseidon=Measured((repetition(),), note="2 x rows"))
    written = json.loads(json.dumps(results.cells_to_json([made])))
    assert results.cells_from_json(written) == [made]
    assert written[0]["systems"]["poseidon"]["speedup"] == 4


def test_table_has_a_line_per_system():
    table = results.format_table(cell(linear=repetition(10), ddp=repetition(20), poseidon=Measured(failure="boom")))
    lines = table.splitlines()
    assert len(lines) == 5
    assert "4 machines at 1gbit" in lines[0]
    assert lines[3].split()[:7] == ["ddp", "20.0", "20.0", "..", "20.0", "-", "2.00x"]
    assert lines[4].endswith("failed: boom")


def test_a_stall_changes_the_mean_but_not_the_median():
    stalled = replace(repetition(26), laps_ms=(10.0, 10.0, 10.0, 90.0, 10.0))
    measured = Measured((stalled, replace(repetition(10), laps_ms=(10.0, 11.0))))
    assert (measured.step_ms, measured.lap_ms) == (18, 10)
    written = json.loads(json.dumps(results.cells_to_json([cell(ddp=measured)])))
    assert results.cells_from_json(written)[0].systems["ddp"] == measured
    assert results.format_table(cell(ddp=measured)).splitlines()[2].split()[5] == "10.0"


def test_lines_of_the_picture_begin_at_one_machine():
    four = cell(linear=repetition(10), ddp=repetition(20))
    two = replace(four, machines=2)
    lines = picture.speedup_lines([four, two, replace(four, systems={"ddp": Measured(failure="boom")})])
    assert lines == {"linear": [(1, 1.0), (2, 2.0), (4, 4.0)], "ddp": [(1, 1.0), (2, 1.0), (4, 2.0)]}


def test_a_picture_is_drawn_from_a_file(tmp_path, capsys):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"cells": results.cells_to_json([cell(linear=repetition(), ddp=repetition(20))])}))
    assert main(["bench", "--plot", str(file)]) == 0
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "2.00x" in capsys.readouterr().out


def test_clusters_have_every_model_with_its_own_batch():
    settings = parse("--models", "lenet,gpt2", "--machines", "2,4", "--rate", "1gbit,10gbit", "--batch", "16,gpt2=2")
    cells = [
        (worker.model, worker.batch, spec.machines, spec.rates_bits[0])
        for spec, workers in settings.clusters()
        for worker in workers
    ]
    assert cells[:3] == [("lenet", 16, 2, 10**9), ("gpt2", 2, 2, 10**9), ("lenet", 16, 4, 10**9)]
    assert [batch for model, batch, _, _ in cells if model == "gpt2"] == [2] * 4


def test_the_linear_bound_is_always_measured_and_first():
    assert parse("--against", "ddp,poseidon").worker.systems == ("linear", "ddp", "poseidon")
    assert parse("--against", "ddp,linear,ddp").worker.systems == ("linear", "ddp")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--models", "lenet,nosuch"], "unknown network 'nosuch'"),
        (["--against", "nosuch"], "unknown system 'nosuch'; known: .*ddp,"),
        (["--against", "ddp-bf16"], "needs --device cuda"),
        (["--machines", "1"], "2 to 250 machines"),
        (["--machines", ","], "names nothing"),
        (["--batch", "0"], "--batch"),
        (["--batch", "nosuch=3"], "--batch"),
        (["--paced", "5"], "FORWARD_MS:BACKWARD_MS"),
        (["--paced=-5:5"], "must not be negative"),
        (["--paced", "nan:nan"], "must not be negative or endless"),
        (["--paced", "5:inf"], "must not be negative or endless"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--rate", "5"], "10gbit"),
        (["--against", "ddp-powersgd", "--warmup", "2"], "use at least 3"),
        (["--models", "lenet,dlrm", "--image-size", "64"], "dlrm reads no images"),
        (["--width", "-1"], "positive"),
    ],
)
def test_bad_options_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse(*options)


def test_cells_without_any_speedup_leave_the_picture_out(tmp_path, capsys):
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"cells": results.cells_to_json([cell(ddp=Measured(failure="boom"))])}))
    assert main(["bench", "--plot", str(file)]) == 0
    assert not (tmp_path / "r.png").exists()
    assert "no picture" in capsys.readouterr().err


@pytest.mark.parametrize("comparison", [["--models", "lenet"], ["--to-loss", "digits"]])
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--output", "folder"], "cannot write results folder: it is a folder, expected a file"),
        (["--output", "file/below.json"], "cannot write results file/below.json: "),
        (["--output", "both.png"], "--output both.png would be overwritten by the picture"),
        (["--output", "file", "--picture", "./file"], "--output file would be overwritten by the picture"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    comparison, options, complaint, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    assert main(["bench", *comparison, *options]) == 1
    assert complaint in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("comparison", [["--models", "lenet"], ["--to-loss", "digits"]])
def test_a_gpu_that_is_not_here_is_missed_before_anything_is_measured(comparison, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench", *comparison, "--device", "cuda"]) == 1
    assert "--device cuda: PyTorch finds no GPU on this machine" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("name", "reason"), [("p.txt", "Format 'txt' is not supported"), ("folder", "Is a directory")])
def test_a_picture_that_cannot_be_drawn_is_left_out(name, reason, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"cells": results.cells_to_json([cell(linear=repetition(), ddp=repetition(20))])}))
    assert main(["bench", "--plot", str(file), "--picture", str(tmp_path / name)]) == 0
    error = capsys.readouterr().err
    assert f"no picture: cannot write {tmp_path / name}: " in error
    assert reason in error


@pytest.mark.parametrize("content", ["{}", "[]", "3", "null", '"to_loss"'])
def test_a_file_that_holds_no_results_is_named(content, tmp_path, capsys):
    file = tmp_path / "x.json"
    file.write_text(content)
    assert main(["bench", "--plot", str(file)]) == 1
    assert f"{file} is not a file of benchmark results" in capsys.readouterr().err


def say_all(job, *events):
    for event in events:
        job.output.hear(WorkerPlace(0, 2), MARK + json.dumps(event))


def finished(system, ms=5.0):
    return {"event": "repetition", "system": system, "note": "", "step_ms": ms, "sent_bytes": 1.0} | {
        "first_loss": 2.0,
        "last_loss": 1.0,
    }


def test_a_listener_collects_what_ranks_say():
    said, made = [], []
    job = JobEvents([CellEvents(WORKER, make_spec(2), said.append)], made.append)
    job.output.hear(WorkerPlace(1, 2), "a warning")
    say_all(
        job,
        {"event": "model", "parameters": 10, "parameter_bytes": 40},
        {"event": "begin", "system": "ddp"},
        finished("ddp", 7.0),
        {"event": "failure", "system": "poseidon", "failure": "rank 1: boom"},
        {"event": "end"},
    )
    (only,) = made
    assert (only.parameters, only.machines, only.systems["ddp"].step_ms) == (10, 2, 7.0)
    assert only.systems["poseidon"].failure == "rank 1: boom"
    job.output.tell_failure("out of memory", said.append)
    assert said[-2:] == ["  the job failed: out of memory", "    machine1 | a warning"]
    assert any("ddp" in line and "1/2" in line for line in said)


def measure(monkeypatch, models, fate):
    """Measure models with ranks that do as ``fate`` says of a model's system; return the cells and what jobs had."""
    tried, made = [], []

    def run_workers(workers, job, spec, timeout_s):
        tried.append([(worker.model, *worker.systems) for worker in workers])
        for worker in workers:
            for system in worker.systems:
                end = fate(worker.model, system)
                if end == "unheard":
                    return JobResult(1, "machine0 (rank 0) ended with status 1", 1.0, (1, None))
                say_all(job, {"event": "begin", "system": system})
                if end == "hangs":
                    return JobResult(124, "time limit reached", 1.0, (None, None))
                say_all(job, finished(system))
            say_all(job, {"event": "end"})
        return JobResult(0, "", 1.0, (0, 0))

    monkeypatch.setattr(bench, "_run_workers", run_workers)
    workers = tuple(replace(WORKER, model=model) for model in models)
    bench._run_cluster(workers, make_spec(2), 1.0, lambda _: None, made.append)
    return made, tried


def test_all_models_are_measured_in_one_job(monkeypatch):
    made, tried = measure(monkeypatch, ("lenet", "alexnet"), lambda *_: "")
    assert tried == [[("lenet", *WORKER.systems), ("alexnet", *WORKER.systems)]]
    assert [cell.model for cell in made] == ["lenet", "alexnet"]
    assert all(list(cell.systems) == list(WORKER.systems) for cell in made)


def test_a_system_that_takes_the_job_down_is_left_out_of_another_try(monkeypatch):
    def fate(model, system):
        return "hangs" if (model, system) == ("alexnet", "ddp") else ""

    made, tried = measure(monkeypatch, ("lenet", "alexnet", "vgg19"), fate)
    rest = ("vgg19", "linear", "ddp", "poseidon")
    assert tried[1:] == [[("alexnet", "linear", "poseidon"), rest]]
    assert [cell.model for cell in made] == ["lenet", "alexnet", "vgg19"]
    assert {name: bool(each.repetitions) for name, each in made[1].systems.items()} == {
        "linear": True,
        "ddp": False,
        "poseidon": True,
    }
    assert made[1].systems["ddp"].failure == "time limit reached"
    assert not any(each.failure for cell in (made[0], made[2]) for each in cell.systems.values())


def test_a_model_whose_job_never_begins_fails_every_system_once(monkeypatch):
    made, tried = measure(monkeypatch, ("lenet", "alexnet"), lambda model, _: "unheard" if model == "lenet" else "")
    assert [[first for first, *_ in job] for job in tried] == [["lenet", "alexnet"], ["alexnet"]]
    assert {made[0].verdict(name) for name in WORKER.systems} == {"failed"}
    assert all(each.repetitions for each in made[1].systems.values())


def test_a_job_that_ends_well_too_soon_is_not_measured_forever(monkeypatch):
    made = []
    monkeypatch.setattr(bench, "_run_workers", lambda *_: JobResult(0, "", 1.0, (0, 0)))
    bench._run_cluster((WORKER,), make_spec(2), 1.0, lambda _: None, made.append)
    assert {made[0].systems[name].failure for name in WORKER.systems} == {"it ended before everything was measured"}


def test_what_a_job_measured_before_its_time_was_up_is_kept(monkeypatch):
    jobs = []

    def run_workers(workers, job, spec, timeout_s):
        jobs.append(workers[0].systems)
        for system in workers[0].systems:
            say_all(job, {"event": "begin", "system": system}, finished(system))
        if len(jobs) == 1:
            lose_ddp(job)
            return JobResult(124, "time limit reached", 1.0, (None, None))
        say_all(job, {"event": "end"})
        return JobResult(0, "", 1.0, (0, 0))

    made = []
    monkeypatch.setattr(bench, "_run_workers", run_workers)
    bench._run_cluster((WORKER,), make_spec(2), 1.0, lambda _: None, made.append)
    assert jobs == [WORKER.systems]
    assert {name: len(each.repetitions) for name, each in made[0].systems.items()} == {
        "linear": 2,
        "ddp": 1,
        "poseidon": 1,
    }
    assert not any(each.failure for each in made[0].systems.values())


@pytest.mark.parametrize("status", [1, 124])
def test_a_linear_bound_that_takes_every_job_down_is_measured_once(monkeypatch, status):
    jobs, made = [], []

    def run_workers(workers, job, spec, timeout_s):
        jobs.append(workers[0].systems)
        say_all(job, {"event": "begin", "system": workers[0].systems[0]})
        return JobResult(status, "gone", 1.0, (None, None))

    monkeypatch.setattr(bench, "_run_workers", run_workers)
    bench._run_cluster((WORKER,), make_spec(2), 1.0, lambda _: None, made.append)
    assert jobs == [("linear", "ddp", "poseidon"), ("ddp", "poseidon"), ("poseidon",)]
    assert {each.failure for each in made[0].systems.values()} == {"gone"}


def lose_ddp(job):
    """Measure the linear bound, and lose the job with the next system."""
    say_all(job, {"event": "begin", "system": "linear"}, finished("linear"), {"event": "begin", "system": "ddp"})


def test_a_linear_bound_that_comes_late_a_second_time_is_left_out(monkeypatch):
    jobs, made = [], []

    def run_workers(workers, job, spec, timeout_s):
        jobs.append(workers[0].systems)
        if len(jobs) == 1:
            lose_ddp(job)
            return JobResult(1, "gone", 1.0, (1, None))
        for system in workers[0].systems:
            say_all(job, {"event": "begin", "system": system})
            if system == "linear":
                return JobResult(124, "time limit reached", 1.0, (None, None))
            say_all(job, finished(system))
        say_all(job, {"event": "end"})
        return JobResult(0, "", 1.0, (0, 0))

    monkeypatch.setattr(bench, "_run_workers", run_workers)
    bench._run_cluster((WORKER,), make_spec(2), 1.0, lambda _: None, made.append)
    assert jobs == [WORKER.systems, ("linear", "poseidon"), ("poseidon",)]
    assert [name for name, each in made[0].systems.items() if each.repetitions] == ["linear", "poseidon"]


def test_a_second_job_that_never_begins_leaves_the_linear_bound_measured(monkeypatch):
    jobs, made = [], []

    def run_workers(workers, job, spec, timeout_s):
        jobs.append(workers[0].systems)
        if len(jobs) == 1:
            lose_ddp(job)
        return JobResult(1, "gone", 1.0, (1, None))

    monkeypatch.setattr(bench, "_run_workers", run_workers)
    bench._run_cluster((WORKER,), make_spec(2), 1.0, lambda _: None, made.append)
    assert len(jobs) == 2
    assert {name: each.failure for name, each in made[0].systems.items()} == {
        "linear": "",
        "ddp": "gone",
        "poseidon": "gone",
    }
