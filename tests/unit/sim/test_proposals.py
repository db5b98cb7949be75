"""``poseidon plan --allow lossy``: what is proposed, in which order, and when exact is good enough."""

import json

import pytest

from poseidon.cli.main import main
from poseidon.planning.lossy import LOSSY
from poseidon.sim.proposals import GOOD_ENOUGH, INTERVALS, PRICES, cover

CLUSTER = ("--machines", "4", "--device-gflops", "1000", "--batch", "8")


def plan(folder, model, rate):
    path = folder / "plan.json"
    assert main(["plan", model, *CLUSTER, "--rate", rate, "--allow", "lossy", "--json", str(path)]) == 0
    return json.loads(path.read_text())["proposals"]


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    return plan(tmp_path_factory.mktemp("plans"), "alexnet", "100mbit")


def test_every_way_is_proposed_once_the_exact_one_first_and_each_has_its_price(slow):
    names = [way["name"] for way in slow["ways"]]
    assert names[0] == "exact"
    assert sorted(names) == sorted(["exact", "local", *LOSSY])
    assert [way["is_lossy"] for way in slow["ways"]] == [False, *[True] * (len(names) - 1)]
    assert set(names) == set(PRICES)
    assert all(way["loss_cost"] and way["source"] for way in slow["ways"])


def test_what_loses_more_sends_less_and_is_faster_on_a_slow_link(slow):
    sent = {way["name"]: way["sent_bytes"] for way in slow["ways"]}
    step = {way["name"]: way["step_ms"] for way in slow["ways"]}
    assert sent["exact"] > sent["bf16"] > sent["int8"] > sent["topk"]
    assert sent["lowrank"] < sent["exact"] / 5
    assert step["exact"] > step["bf16"] > step["int8"] > step["lowrank"]
    assert not slow["exact_is_good_enough"]
    assert slow["advised"] != "exact"
    assert "poseidon.distribute(model, optimizer, " in slow["verdict"]


def test_local_steps_take_the_shortest_interval_that_is_good_enough(tmp_path, slow):
    def interval(found):
        call = next(way["call"] for way in found["ways"] if way["name"] == "local")
        return int(call.split("sync_every=")[1].split(",")[0])

    fast = plan(tmp_path, "cifar10-quick", "10gbit")
    assert interval(fast) < interval(slow) == INTERVALS[-1]
    assert next(way["times_linear"] for way in fast["ways"] if way["name"] == "local") <= GOOD_ENOUGH


def test_exact_is_good_enough_where_it_is_nearly_linear(tmp_path):
    found = plan(tmp_path, "resnet18", "100gbit")
    assert found["exact_is_good_enough"]
    assert found["advised"] == "exact"
    assert "nothing to gain" in found["verdict"]


def test_of_one_machine_the_verdict_names_the_link_inside(capsys):
    command = ["plan", "lenet", "--machines", "1", "--workers-per-machine", "2", "--device-gflops", "1000"]
    assert main([*command, "--rate", "100gbit", "--inside-rate", "20mbit", "--allow", "lossy"]) == 0
    assert "linear at 20 Mbit/s" in capsys.readouterr().out


def test_of_one_machine_what_is_shorter_is_faster_and_nothing_leaves_it(tmp_path):
    path = tmp_path / "plan.json"
    inside = ("--machines", "1", "--workers-per-machine", "8", "--inside-rate", "1gbit", "--device-gflops", "10000")
    assert main(["plan", "alexnet", *inside, "--batch", "8", "--allow", "lossy", "--json", str(path)]) == 0
    facts = json.loads(path.read_text())
    assert facts["prediction"]["limit"] == "link inside"
    ways = {way["name"]: way for way in facts["proposals"]["ways"]}
    step = {name: way["step_ms"] for name, way in ways.items()}
    assert step["exact"] > 1.2 * step["bf16"] > 1.2**2 * step["int8"] > 1.2**3 * max(step["lowrank"], step["topk"])
    assert {way["sent_bytes"] for way in ways.values()} == {0.0}


def test_units_whose_exact_route_is_shorter_stay_exact(tmp_path):
    ways = {way["name"]: way for way in plan(tmp_path, "dlrm", "100mbit")["ways"]}
    assert '"tables.*": "exact"' in ways["int8"]["call"]
    assert ways["int8"]["sent_bytes"] < ways["exact"]["sent_bytes"]


def test_units_are_lossy_where_that_is_faster_inside_machines_though_more_travels_between_them(tmp_path):
    path = tmp_path / "plan.json"
    slow_inside = ("--machines", "2", "--workers-per-machine", "4", "--rate", "10gbit", "--inside-rate", "1gbit")
    command = ["plan", "resnet18", *slow_inside, "--device-gflops", "50000", "--batch", "4", "--allow", "lossy"]
    assert main([*command, "--json", str(path)]) == 0
    ways = {way["name"]: way for way in json.loads(path.read_text())["proposals"]["ways"]}
    assert ways["bf16"]["call"] == 'lossy="bf16"'
    assert ways["bf16"]["step_ms"] < 0.6 * ways["exact"]["step_ms"]


def test_the_table_is_printed_below_the_plan_and_only_if_allowed(capsys):
    command = ["plan", "lenet", *CLUSTER, "--rate", "1gbit"]
    assert main([*command, "--allow", "lossy"]) == 0
    assert "what it costs" in capsys.readouterr().out
    assert main(command) == 0
    assert "what it costs" not in capsys.readouterr().out


def test_patterns_cover_whole_parents_only_where_all_children_are_meant():
    names = ["a.0", "a.1", "b.0", "b.1", "c"]
    assert cover(["a.0", "a.1", "b.0", "c"], names) == ["a.*", "b.0", "c"]
