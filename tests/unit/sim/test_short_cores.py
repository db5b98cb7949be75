"""Workers that compute on the cores that also move their gradients."""

from dataclasses import replace

import pytest

from poseidon.sim.cells import Bench, predict_ms
from poseidon.sim.media import MEDIA, STALL_S_PER_BYTE, contention_on, transports_of
from poseidon.sim.steps import simulate
from sim_settings import dense, profile, setting

MEASURED = {
    2: (610, {"ddp": 1119, "poseidon": 1042, "poseidon-distribute": 849}),
    4: (1227, {"ddp": 2030, "poseidon": 1894, "poseidon-distribute": 1733}),
    6: (1921, {"ddp": 2701, "poseidon": 2457, "poseidon-distribute": 2368}),
}
"""ResNet-18, batch 4, machines that share 2 cores at 500 Mbit/s: linear, and milliseconds per step of each system."""


def hidden(**changes):
    """Three buckets of 28 MB that take far less time on the wire than backward does, and a small last one."""
    units = [dense("last", 1_000, backward_s=1.0), *(dense(f"c{i}", 7_000_000, backward_s=1.0) for i in range(3))]
    return simulate(setting(profile(*units), gbit=10, system="ddp", **changes)).step_s


def test_exchanges_delay_computation_by_their_processor_time():
    busy = replace(MEDIA["ideal"], work_s_per_byte=10e-9)
    plain = hidden()
    sent_bytes = 2 * 3 / 4 * 84e6
    assert hidden(collectives=busy) == pytest.approx(plain)  # other cores do the work
    for contention in (1.0, 2.0):
        delayed = hidden(collectives=busy, contention=contention)
        assert delayed - plain == pytest.approx(contention * sent_bytes * 10e-9, rel=0.01)


def test_what_is_done_while_nothing_computes_delays_nothing():
    busy = replace(MEDIA["ideal"], work_s_per_byte=10e-9, stall_s_per_byte=1e-6)
    alone = profile(dense("only", 1_000_000))
    times = [simulate(setting(alone, system="ddp", collectives=each)).step_s for each in (MEDIA["ideal"], busy)]
    assert times[0] == pytest.approx(times[1])


def test_bytes_wait_for_cores_that_compute_and_for_no_others():
    assert transports_of(False, 2.0, computes=True).collectives.stall_s_per_byte == 0
    assert transports_of(False, 0.5, computes=False).collectives.stall_s_per_byte == 0
    assert transports_of(False, 1.0, computes=True).collectives.stall_s_per_byte == STALL_S_PER_BYTE
    halves = transports_of(False, 0.5, computes=True)
    assert halves.collectives.stall_s_per_byte == 2 * STALL_S_PER_BYTE
    assert halves.messages.stall_s_per_byte == 2**1.25 * STALL_S_PER_BYTE
    assert [contention_on(cores) for cores in (0.5, 1.0, 1.5, 2.0, 8.0)] == [2.0, 1.0, 0.5, 0.0, 0.0]


@pytest.fixture(scope="module")
def resnet18():
    import torch

    from poseidon import zoo
    from poseidon.profiling.measuring import estimate_profile

    with torch.device("meta"):
        network = zoo.build("resnet18", dropout=0.0)
    inputs = tuple(part.to("meta") for part in network.batch(4)[0])
    return lambda flops: estimate_profile(network.model, inputs, name="resnet18", batch=4, flops=flops)


@pytest.mark.parametrize("machines", MEASURED)
def test_resnet18_on_two_cores_is_predicted_within_a_tenth(resnet18, machines):
    linear_ms, systems = MEASURED[machines]
    flops = 60e9 * min(1.0, 2 / machines)
    bench = Bench(resnet18(flops), linear_ms / 1e3, machines, 5e8, False, 2, flops, uses_cores=True)
    for system, measured_ms in systems.items():
        assert predict_ms(bench, system) == pytest.approx(measured_ms, rel=0.1), system
