import time

import pytest

from poseidon.planning.candidates import AS_TORCH, AT_ONCE, Candidate, make_candidates, shortlist
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.planner import LAYER_BY_LAYER, make_plan
from poseidon.planning.schedule import Model, Packing, make_schedule
from poseidon.routes import standard_routes
from poseidon.sim.ranking import Equipment, observed_profile, predict_s
from sim_settings import dense, linear, profile


def ranked(given, gbit=10.0, machines=8, defers=False, offers=False, **changes):
    """The candidates' predicted times, by name."""
    routes = standard_routes(offers_server=offers, gathers_factors=True)
    cluster = Cluster(machines, between=Link(gbit * 1e9, 5e-5), flops=5e12)
    best = make_plan(given.specs, given.loads, cluster, routes)
    packing, fulls = Packing(cluster, None, defers), ["allreduce", "sharded"]
    model = Model.of(given.specs)
    made = make_candidates(model, given.ready_order, given.loads, routes, None, best, packing, fulls)
    equipment = Equipment(routes, is_nccl=True, compacts=True, cores=2.0, uses_cores=False)
    equipment = Equipment(**{**vars(equipment), **changes})
    return made, {one.name: predict_s(one, given, equipment) for one in made}


def transformer(layers=12, tokens=4096):
    units = [linear(f"l{i}.{j}", 768, 3072, batch=tokens, forward_s=1e-3, backward_s=2e-3)
             for i in range(layers) for j in range(4)]  # fmt: skip
    return profile(dense("embedding", 38_000_000, 1e-3, 2e-3), *units)


def test_a_net_bound_by_the_wire_is_faster_through_the_server_which_sends_fewer_bytes():
    made, predicted = ranked(transformer())
    assert predicted["sharded alone"] < predicted[LAYER_BY_LAYER]
    tried = [made[number].name for number in shortlist(made, list(predicted.values()))]
    assert "sharded alone" in tried
    assert AS_TORCH in tried or LAYER_BY_LAYER in tried


def test_landing_later_is_never_predicted_to_be_slower_than_landing_at_once():
    _, predicted = ranked(transformer(), defers=True, offers=True)
    assert predicted[LAYER_BY_LAYER] < predicted[LAYER_BY_LAYER + AT_ONCE]


def test_factors_win_where_they_save_most():
    vgg = profile(
        *(dense(f"conv{i}", 500_000) for i in range(10)), linear("fc1", 4096, 25088), linear("fc2", 4096, 4096)
    )
    made, predicted = ranked(vgg)
    assert min(predicted, key=predicted.__getitem__) in (LAYER_BY_LAYER, "sharded and short forms",
                                                         "sharded and the best short forms")  # fmt: skip
    assert predicted[AS_TORCH] > 2 * min(predicted.values())
    assert AS_TORCH not in [made[number].name for number in shortlist(made, list(predicted.values()))]


def test_direct_messages_inside_one_machine_cost_their_processor_time():
    small = profile(*(linear(f"l{i}", 256, 256, batch=8, forward_s=1e-4, backward_s=2e-4) for i in range(3)))
    routes = standard_routes()
    cluster = Cluster(1, 2, inside=Link(10e9, 5e-5), flops=1e12)
    packing = Packing(cluster)
    plans = [make_plan(small.specs, small.loads, cluster, routes, {"*": name}) for name in ("factors", "allreduce")]
    equipment = Equipment(routes, is_nccl=False, compacts=False, cores=1.0, uses_cores=True)
    times = [predict_s(Candidate(plan, packing), small, equipment) for plan in plans]
    assert times[0] > times[1]


def test_ranking_a_deep_net_takes_a_moment():
    deep = profile(*(dense(f"conv{i}", 400_000, 1e-3, 2e-3) for i in range(150)))
    began = time.process_time()
    made, _ = ranked(deep, defers=True, offers=True)
    assert len(made) >= 5
    assert time.process_time() - began < 5  # about one second where nothing else runs


def test_times_of_items_become_times_of_units():
    given = profile(*(dense(f"c{i}", 500_000) for i in range(4)))
    routes, cluster = standard_routes(), Cluster(2)
    model = Model.of(given.specs)
    packing = Packing(cluster, 2 * 2_000_000)
    schedule = make_schedule(model, ["allreduce"] * 4, given.ready_order, routes, packing)
    assert [item.units for item in schedule.items] == [(3,), (2,), (1,), (0,)] or len(schedule.items) < 4
    ready_s = {item.number: 0.1 * (item.number + 1) for item in schedule.items}
    made = observed_profile(schedule, ready_s, {}, given.ready_order)
    assert made.backward_s == pytest.approx(max(ready_s.values()))
    assert made.forward_s == pytest.approx(made.backward_s / 2)
    assert made.ready_order == given.ready_order
    assert made.forward_order == tuple(reversed(given.ready_order))
    assert all(one.backward_s > 0 for one in made.units)


def test_items_that_become_ready_out_of_order_share_their_time():
    given = profile(*(dense(f"c{i}", 500_000) for i in range(3)))
    routes, cluster = standard_routes(), Cluster(2)
    packing = Packing(cluster, 1)
    schedule = make_schedule(Model.of(given.specs), ["allreduce"] * 3, given.ready_order, routes, packing)
    made = observed_profile(schedule, {0: 0.3, 1: 0.1, 2: 0.5}, {}, given.ready_order)
    assert [one.backward_s for one in made.units] == pytest.approx([0.2, 0.15, 0.15])
