from __future__ import annotations

import copy
import functools
import os
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import poseidon
import twins
from compact_codec import same_bits
from compact_twin import HostCompactor
from poseidon.errors import WorkerLostError
from poseidon.planning.cluster import Cluster, Link
from poseidon.routes import sharded
from poseidon.routes.base import Context
from poseidon.sums.compact import FEWEST_COMPACTED, SMALLEST_COMPACTED
from poseidon.sums.device import DeviceAdder, DeviceArithmetic
from poseidon.sums.server import SumServer
from poseidon.sums.slots import make_slots
from poseidon.team.team import Team
from poseidon.team.wiring import connect_wire
from ranks import run_ranks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LINK = Link(1e9, 1e-4)
STEPS = 12


def _draw(rank: int, number: int, step: int, size: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng([rank, number, step])
    values = generator.standard_normal(size).astype(np.float32) * np.float32(10.0 ** (rank - 1))
    if (step + number) % 6 == 0:
        # Of the precision of bf16; steps in between have longer rows.
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    if (step + rank) % 5 == 4:
        # Nothing would be gained by compacting these.
        values *= np.float32(10) ** generator.integers(-25, 8, size).astype(np.float32)
    return values


def _expect(number: int, step: int, size: int) -> np.ndarray[Any, Any]:
    return functools.reduce(np.add, [_draw(rank, number, step, size) for rank in range(dist.get_world_size())])


def _sum_over_the_wire() -> None:
    team = Team(None, 30.0)
    transport = connect_wire(team, range(team.size), link=LINK)
    compactor = HostCompactor()
    device = DeviceArithmetic(compactor)
    server = SumServer(transport)
    sizes = [FEWEST_COMPACTED * 7, FEWEST_COMPACTED * team.size * 3 + 5]
    slots = make_slots(0, sizes, [4, 4], team.size, 8 * FEWEST_COMPACTED)
    server.book([(slot, DeviceAdder(slot, team.rank, team.size, device)) for slot in slots])
    team.gather_ints([0])
    for step in range(STEPS):
        flats = [torch.from_numpy(_draw(team.rank, slot.number, step, sizes[slot.number])) for slot in slots]
        futures = [server.start(flat, slot, step) for flat, slot in zip(flats, slots, strict=True)]
        for future, flat, slot in zip(futures, flats, slots, strict=True):
            team.result(future, "a sum")
            assert same_bits(flat.numpy(), _expect(slot.number, step, sizes[slot.number])), (step, slot.number)
    assert compactor.copied
    device.close()
    transport.close()
    team.close()


@pytest.mark.parametrize("encrypt", ["0", "1"])
def test_sums_over_the_wire_have_the_bits_of_the_order_of_ranks(encrypt: str) -> None:
    run_ranks(_sum_over_the_wire, 3, env={"POSEIDON_WIRE_ENCRYPT": encrypt})


def _train_under_autocast() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.LayerNorm(300), nn.Linear(300, 5))
    alone = copy.deepcopy(net)
    model = poseidon.DistributedDataParallel(net, cluster=Cluster(size, between=LINK), routes={"*": "sharded"})
    for step in range(3):
        batches = [torch.randn(16, 40, generator=torch.Generator().manual_seed(100 * step + r)) for r in range(size)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batches[rank]).float().square().mean()
        model.zero_grad()
        loss.backward()
        parts = []
        for batch in batches:
            alone.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = alone(batch).float().square().mean()
            loss.backward()
            parts.append([parameter.grad.clone() for parameter in alone.parameters()])
        for parameter, *ones in zip(net.parameters(), *parts, strict=True):
            mean = functools.reduce(torch.add, ones) / size
            assert parameter.grad is not None
            # Before the first backward there is no plan, and collectives carry everything.
            assert step == 0 or same_bits(parameter.grad.numpy(), mean.numpy())
    model.close()


def test_means_under_autocast_have_the_bits_of_parts_added_in_the_order_of_ranks_and_divided() -> None:
    run_ranks(_train_under_autocast, 3)


def _lose_a_worker() -> str:
    sharded.find_compactor = lambda _: HostCompactor()
    team = Team(None, 30.0)
    route = sharded.ShardedExchanger(Context(team, Cluster(team.size, between=LINK), is_cuda=True))
    (slot,) = route.book([SMALLEST_COMPACTED], [torch.float32])
    assert route.compacts(slot)
    team.gather_ints([0])
    if team.rank == 1:
        os._exit(1)
    exchange = route.average(torch.ones(SMALLEST_COMPACTED), slot, 0, "a bucket")
    with pytest.raises(WorkerLostError) as caught:
        exchange.finish(is_used=True)
    return str(caught.value)


def test_a_worker_that_dies_is_named() -> None:
    messages = run_ranks(_lose_a_worker, 3, lost=[1])
    assert all("a bucket from rank 1" in message for message in (messages[0], messages[2])), messages


def _compact_on_all_but_one() -> bool:
    sharded.find_compactor = lambda _: None if dist.get_rank() == 1 else HostCompactor()
    team = Team(None, 30.0)
    route = sharded.ShardedExchanger(Context(team, Cluster(team.size, between=LINK), is_cuda=True))
    (slot,) = route.book([SMALLEST_COMPACTED], [torch.float32])
    return route.compacts(slot)


def test_where_one_worker_cannot_compact_nobody_does() -> None:
    assert run_ranks(_compact_on_all_but_one, 3) == [False] * 3


def _average_on_the_device() -> list[int]:
    team = Team(None, 30.0)
    route = sharded.ShardedExchanger(Context(team, Cluster(team.size, between=LINK), is_cuda=True))
    large = SMALLEST_COMPACTED
    sizes = [large, large * 2 + 5, 100, 5000, large + 3]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.float16, torch.bfloat16]
    slots = route.book(sizes, dtypes)
    for step in range(6):
        flats = [
            torch.from_numpy(_draw(team.rank, slot.number, step, size)).cuda().to(dtype)
            for slot, size, dtype in zip(slots, sizes, dtypes, strict=True)
        ]
        exchanges = [route.average(f, slot, step, "a bucket") for f, slot in zip(flats, slots, strict=True)]
        for exchange, flat, slot in zip(exchanges, flats, slots, strict=True):
            exchange.finish(is_used=True)
            if flat.dtype == torch.float32:
                mean = _expect(slot.number, step, len(flat)) / np.float32(team.size)
                assert same_bits(flat.cpu().numpy(), mean), (step, slot.number)
            if flat.dtype == torch.bfloat16:
                parts = [torch.from_numpy(_draw(r, slot.number, step, len(flat))).bfloat16() for r in range(team.size)]
                total = functools.reduce(torch.add, [part.float() for part in parts])
                assert torch.equal(flat.cpu(), (total / team.size).bfloat16()), (step, slot.number)
    compacted = [int(route.compacts(slot)) for slot in slots]
    team.gather_ints([0])
    route.close()
    team.close()
    return compacted


@needs_cuda
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("compact", ["0", "1"])
def test_means_on_the_device_have_the_bits_of_the_order_of_ranks(workers: int, compact: str) -> None:
    pytest.importorskip("triton", reason="Triton comes with PyTorch for CUDA; here it does not")
    compacted = run_ranks(_average_on_the_device, workers, env={"POSEIDON_WIRE_COMPACT": compact})
    assert compacted == [[int(compact), int(compact), 0, 0, int(compact)]] * workers


def _train_on_the_device(kind: str) -> list[Tensor]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(300, 1900), nn.Tanh(), nn.Linear(1900, 1500), nn.Tanh(), nn.Linear(1500, 9)
    )
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    options: dict[str, Any] = {"cluster": Cluster(3, between=Link(10e9, 1e-4)), "routes": {"*": "sharded"}}
    if kind == "distribute":
        model, optimizer = poseidon.distribute(model, optimizer, **options)
    else:
        model = poseidon.DistributedDataParallel(model, **options)
    for number in range(8):
        x = torch.randn(16, 300, generator=twins.seed_of_rank(number)).cuda()
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(16, 9, device="cuda")).backward()
        optimizer.step()
    model.verify_replicas()
    found = [parameter.detach().cpu() for parameter in model.parameters()]
    model.close()
    return found


@needs_cuda
def test_training_on_the_device_gives_the_same_bits_compacted_and_restored_deferred_and_not() -> None:
    runs = [
        run_ranks(_train_on_the_device, 3, kind, env={"POSEIDON_WIRE_COMPACT": compact})
        for kind in ("plain", "distribute")
        for compact in ("0", "1")
    ]
    first = runs[0][0]
    for run in runs:
        for parameters in run:
            assert all(torch.equal(a, b) for a, b in zip(first, parameters, strict=True))
