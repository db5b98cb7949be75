import json
from dataclasses import replace

import pytest

from poseidon.cli.main import main
from poseidon.errors import ConfigError
from poseidon.planning.profile import Profile
from poseidon.sim import paper
from poseidon.sim.advice import explain, format_explanation
from poseidon.sim.cells import Bench, predict_ms
from poseidon.sim.steps import simulate
from sim_settings import dense, linear, profile, setting, small


def changes(explanation):
    return {change.what: change.gain for change in explanation.changes}


def test_a_slow_wire_is_named_and_faster_links_help():
    explanation = explain(setting(gbit=1.0, system="ddp"))
    assert explanation.limit == "wire"
    gains = changes(explanation)
    assert gains["2.5 Gbit/s links"] > 1.5
    assert any("lossy" in what and gain > 1.3 for what, gain in gains.items())
    assert list(gains.values()) == sorted(gains.values(), reverse=True)


def test_promised_gains_are_what_a_simulation_of_the_change_gives():
    made = setting(gbit=1.0, system="ddp")
    gain = changes(explain(made))["2.5 Gbit/s links"]
    before, after = simulate(made), simulate(made.with_rate(2.5e9))
    assert gain == pytest.approx(before.step_s / after.step_s)


def test_other_limits_are_told_apart():
    assert explain(setting(gbit=100.0)).limit == "compute"
    assert explain(setting(gbit=100.0, latency_s=0.02, system="ddp")).limit == "latency"
    slow = explain(setting(gbit=100.0, slowdowns=(1, 1, 1, 3.0)))
    assert slow.limit == "slow machine"
    assert "waits for the slowest machine" in slow.reason


def test_the_words_say_time_speedup_limit_and_effects():
    text = format_explanation(explain(setting(gbit=1.0, system="ddp")))
    outcome = simulate(setting(gbit=1.0, system="ddp"))
    assert f"{outcome.step_s * 1e3:.4g} ms per step on 4 workers" in text
    assert f"speedup {outcome.speedup:.2f}" in text
    assert "limit: wire" in text
    assert "times today's" in text
    assert "limit" not in format_explanation(explain(setting(machines=1)))


def cell(system, **changes):
    given = profile(*(dense(f"c{i}", 1_000_000) for i in range(6)), linear("fc", 4096, 4096))
    made = {"profile": given, "linear_s": 0.5, "machines": 4, "rate_bits": 1e9, "is_gpu": False, "cores": 8,
            "flops": 1e11, **changes}  # fmt: skip
    return predict_ms(Bench(**made), system)


def test_a_cells_prediction_rests_on_its_linear_measurement():
    assert cell("linear") == pytest.approx(500)
    assert cell("ddp") > cell("poseidon") > 500
    assert cell("ddp", linear_s=1.0) > cell("ddp")
    assert cell("ddp", is_gpu=True) < cell("ddp", cores=1)
    assert cell("ddp-powersgd") is None
    assert cell("ddp", rate_bits=0) is None


@pytest.fixture(scope="module")
def titans():
    import torch

    from poseidon import zoo
    from poseidon.profiling.measuring import estimate_profile

    profiles = {}
    for name in ("vgg19-22k", "inception-v3", "resnet152"):
        with torch.device("meta"):
            network = zoo.build(name)
        inputs = tuple(part.to("meta") for part in network.batch(paper.BATCH)[0])
        profiles[name] = estimate_profile(
            network.model, inputs, name=name, batch=paper.BATCH, flops=paper.TITAN_X_FLOPS
        )
    return profiles


@pytest.mark.parametrize("system", list(paper.PUBLISHED))
def test_the_papers_table_is_met_within_a_tenth(titans, system):
    for machines, published in zip(paper.NODES, paper.PUBLISHED[system], strict=True):
        assert paper.predict(titans["vgg19-22k"], system, machines).speedup == pytest.approx(published, rel=0.10)


def test_what_the_paper_says_elsewhere_follows(titans):
    for name, machines, link, published in paper.PUBLISHED_ELSEWHERE:
        made = paper.predict(titans[name], "poseidon-2017", machines, link)
        assert made.speedup == pytest.approx(published, rel=0.05)
    assert paper.predict(titans["resnet152"], "poseidon-2017", 32).speedup > 30


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "small.json"
    small().save(path)
    return str(path)


def test_plan_and_simulate_work_from_a_profile_alone(saved, tmp_path, capsys):
    assert main(["plan", saved, "--machines", "8", "--rate", "10gbit", "--json", str(tmp_path / "plan.json")]) == 0
    text = capsys.readouterr().out
    assert "factors" in text
    assert "predicted: " in text
    assert "limit: " in text
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["prediction"]["step_ms"] > 0
    assert len(written["entries"]) == 6


def test_simulate_writes_figures_a_picture_and_a_timeline(saved, tmp_path, capsys):
    names = {name: str(tmp_path / name) for name in ("f.json", "f.png", "f.trace", "t.png")}
    options = ["--machines", "1,2,8", "--rate", "1gbit,10gbit", "--batch", "16,32", "--systems", "ring,poseidon,adam"]
    outputs = ["--json", names["f.json"], "--picture", names["f.png"], "--trace", names["f.trace"]]
    outputs += ["--timeline", names["t.png"]]
    assert main(["simulate", saved, *options, *outputs]) == 0
    assert "Gbit/s" in capsys.readouterr().out
    data = json.loads((tmp_path / "f.json").read_text())
    assert len(data["points"]) == 3 * 2 * 2 * 3
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("f.png", "t.png"))
    events = json.loads((tmp_path / "f.trace").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    backward = [event for event in spans if event["pid"] == 2 and event["cat"] == "backward"]
    sent = [event for event in spans if event["pid"] == 2 and event["tid"] == 2]
    overlap = any(s["ts"] < b["ts"] + b["dur"] and b["ts"] < s["ts"] + s["dur"] for s in sent for b in backward)
    assert overlap


def test_simulate_with_stragglers_and_staleness(saved, capsys):
    common = [saved, "--machines", "4", "--rate", "10gbit", "--systems", "dwbp-ps", "--straggle", "0.3", "--steps", "8"]
    figures = []
    for extra in ([], ["--consistency", "ssp", "--staleness", "2"], ["--slow", "2"]):
        assert main(["simulate", *common, *extra]) == 0
        figures.append(float(capsys.readouterr().out.splitlines()[-1].split()[5]))
    lockstep, stale, slow = figures
    assert stale < lockstep < slow


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machines", "0"], "--machines '0'"),
        (["--rate=-1gbit"], "rate '-1gbit'"),
        (["--rate", "0gbit"], "must be positive"),
        (["--batch", "x"], "--batch 'x'"),
        (["--systems", "magic"], "unknown system 'magic'"),
        (["--transport", "rdma"], "unknown --transport 'rdma'"),
        (["--consistency", "eventual"], "unknown consistency 'eventual'"),
        (["--machines", ","], "names nothing"),
        (["--latency-us", "-5"], "must not be negative"),
    ],
)
def test_bad_options_get_one_line(saved, capsys, options, message):
    assert main(["simulate", saved, *options]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_profile_of_another_model_is_refused(saved, capsys):
    assert main(["plan", "lenet", "--profile", saved, "--device-gflops", "10"]) == 1
    assert "the profile of made has a unit 'conv0' that the model lacks" in capsys.readouterr().err


def test_a_file_that_is_no_profile_is_refused(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text("{}")
    assert main(["simulate", str(path)]) == 1
    assert "is not a profile" in capsys.readouterr().err
    broken = small().to_dict()
    broken["units"][0]["forward_s"] = -1.0
    with pytest.raises(ConfigError, match="forward_s of conv0 is -1"):
        Profile.from_dict(broken)
    with pytest.raises(ConfigError, match="does not have the expected form"):
        Profile.from_dict({"units": 3})
    with pytest.raises(ConfigError, match="ready_order must name each of 6 units once"):
        replace(small(), ready_order=(0, 0, 1, 2, 3, 4))
