from __future__ import annotations

import pytest

from poseidon.planning.candidates import Candidate
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.planner import make_plan
from poseidon.planning.schedule import Packing
from poseidon.planning.transfers import SentBits
from poseidon.routes import standard_routes
from poseidon.sim.ranking import Equipment, predict_s
from poseidon.units import Load
from sim_settings import dense, linear, profile


def predict(route: str, value_bytes: int, compacts: bool, sent_bits: SentBits | None = None) -> float:
    cluster = Cluster(8, between=Link(10e9, 1e-4), flops=1e13)
    convs = [dense(f"conv{number}", 8 << 20, 1e-3, 2e-3) for number in range(4)]
    head = linear("head", 100, 512)
    loads = {"head": Load(32, value_bytes)}
    made = profile(*convs, type(head)(head.unit, loads["head"], head.forward_s, head.backward_s))
    routes = standard_routes(offers_server=True)
    plan = make_plan([unit.unit for unit in made.units], loads, cluster, routes, {"*": route})
    equipment = Equipment(routes, is_nccl=True, compacts=compacts, cores=16, uses_cores=False)
    return predict_s(Candidate(plan, Packing(cluster, None, defers=False)), made, equipment, sent_bits)


def test_autocast_shortens_what_goes_through_the_server_and_not_collectives() -> None:
    full = predict("sharded", 4, compacts=True)
    assert predict("sharded", 2, compacts=True) < 0.75 * full
    assert full < predict("sharded", 4, compacts=False)
    assert predict("sharded", 2, compacts=False) < 0.9 * predict("sharded", 4, compacts=False)
    assert predict("allreduce", 2, compacts=True) == predict("allreduce", 4, compacts=True)


def test_bits_that_were_measured_count_more_than_the_precision() -> None:
    expected = predict("sharded", 2, compacts=True)
    assert predict("sharded", 4, compacts=True, sent_bits=SentBits(compacted=(12.3, 19.9))) == pytest.approx(
        expected, rel=0.05
    )
    zeros = SentBits(compacted=(3.0, 4.0), plain=(3.0, 4.0))
    assert predict("sharded", 2, compacts=True, sent_bits=zeros) < 0.8 * expected
    assert predict("sharded", 2, compacts=True, sent_bits=SentBits(plain=(3.0, 4.0))) == expected
    assert predict("allreduce", 2, compacts=True, sent_bits=zeros) == predict("allreduce", 2, compacts=True)
