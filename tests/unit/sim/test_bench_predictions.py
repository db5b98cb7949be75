import json
from dataclasses import replace

import pytest

from poseidon.lab.bench import CellEvents, JobEvents
from poseidon.lab.bench_worker import MARK, WorkerSettings
from poseidon.lab.environment import WorkerPlace
from poseidon.lab.results import cells_from_json, cells_to_json, format_table
from poseidon.lab.spec import make_spec
from poseidon.sim.cells import Bench, predict_ms
from sim_settings import dense, profile, small

WORKER = WorkerSettings("lenet", ("linear", "ddp", "ddp-powersgd"), 8, 5, 2, 2, 1, "cpu")


def heard(*events):
    cells = []
    job = JobEvents([CellEvents(WORKER, make_spec(4, "1gbit"), lambda _: None)], cells.append)
    for event in (*events, {"event": "end"}):
        job.output.hear(WorkerPlace(0, 4), MARK + json.dumps(event))
    return cells[0]


def repetition(system, step_ms):
    return {"event": "repetition", "system": system, "note": "", "step_ms": step_ms, "sent_bytes": 1.0,
            "first_loss": 2.0, "last_loss": 1.0}  # fmt: skip


PROFILE = {"event": "profile", "profile": small().to_dict(), "flops": 1e11}


def test_predictions_stand_beside_measurements_and_survive_a_file():
    cell = heard(PROFILE, repetition("linear", 100), repetition("ddp", 400), repetition("ddp-powersgd", 150))
    predicted = {name: measured.predicted_ms for name, measured in cell.systems.items()}
    assert predicted["linear"] == pytest.approx(100)
    assert predicted["ddp"] > 400
    assert predicted["ddp-powersgd"] is None
    (again,) = cells_from_json(json.loads(json.dumps(cells_to_json([cell]))))
    assert again == cell
    assert again.profile == small()
    assert f"{predicted['ddp']:.1f}" in format_table(cell)


def test_without_a_profile_or_a_linear_time_nothing_is_predicted():
    for events in ([repetition("linear", 100)], [PROFILE, repetition("ddp", 400)]):
        assert all(measured.predicted_ms is None for measured in heard(*events).systems.values())


def test_files_from_before_predictions_can_be_read():
    (plain,) = cells_to_json([heard(repetition("linear", 100))])
    del plain["systems"]["linear"]["predicted_ms"]
    (cell,) = cells_from_json([plain])
    assert cell.systems["linear"].predicted_ms is None


def test_where_plans_are_tried_the_fastest_is_predicted():
    halves = profile(*(dense(f"conv{number}", 8 << 20) for number in range(4)))
    bench = Bench(halves, 0.1, 8, 10e9, True, 16, 1e13, compacts=True, precision="bf16")
    tried = replace(bench, tries=True)
    # Without trials the wrapper leaves gradients to NCCL.
    assert predict_ms(tried, "poseidon") < 0.8 * predict_ms(bench, "poseidon")
    assert predict_ms(tried, "poseidon-distribute") <= predict_ms(tried, "poseidon")
    assert predict_ms(tried, "ddp") == predict_ms(bench, "ddp")
