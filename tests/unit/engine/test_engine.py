"""The heart without processes: workers are threads, gradients are given by hand or by autograd."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from in_memory import Meeting, MemoryRoute, ThreadTeam, run_threads
from poseidon.engine.discover import find_units
from poseidon.engine.engine import Engine
from poseidon.engine.hooks import AutogradFrontEnd
from poseidon.engine.options import Options
from poseidon.engine.policy import UpdateNow
from poseidon.engine.step import Phase
from poseidon.engine.update import DeferredUpdates
from poseidon.errors import UnsupportedError, WorkerLostError
from poseidon.planning.cluster import Cluster
from poseidon.planning.route import Routes

WORKERS = 2


_SEEDING = threading.Lock()


def net() -> nn.Sequential:
    with _SEEDING:  # the random state is one for all threads
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 2))


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell what ``torch.testing.assert_close`` would, which imports DTensor."""
    return torch.allclose(one, other, rtol=1.3e-6, atol=1e-5)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


class Worker:
    """A model with an engine over the in-memory route."""

    def __init__(self, rank: int, meeting: Meeting, route: MemoryRoute, **options: object) -> None:
        self.model = net()
        self.team = ThreadTeam(rank, meeting)
        chosen = Options(**{"bucket_bytes": 1, **options})  # type: ignore[arg-type]
        self.engine = Engine(find_units(self.model), self.team, Cluster(WORKERS), chosen, Routes([route]))  # type: ignore[arg-type]

    def give(self, number: int, value: float) -> None:
        parameter = self.engine.parameters[number]
        parameter.grad = torch.full_like(parameter, value)
        self.engine.parameter_ready(parameter, is_dense=True)


def together(work, queue: str | None = None, **options: object):
    meeting = Meeting(WORKERS)
    route = MemoryRoute(meeting, queue)
    return route, run_threads(lambda rank: work(rank, Worker(rank, meeting, route, **options)), WORKERS)


def test_means_are_in_grad_when_backward_ends_whatever_order_gradients_came_in() -> None:
    orders = ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4])

    def work(rank: int, worker: Worker) -> list[float]:
        worker.engine.arm(True, 4)
        worker.engine.begin_backward()
        for number in orders[rank]:
            worker.give(number, 10.0 * rank + number)
        worker.engine.end_backward()
        assert worker.engine.phase is Phase.LANDED
        return [parameter.grad.mean().item() for parameter in worker.engine.parameters]

    _, means = together(work)
    assert means[0] == means[1] == [5.0 + number for number in range(6)]


def test_workers_that_are_told_to_compare_at_different_times_do_it_when_rank_0_does() -> None:
    meeting = Meeting(WORKERS)
    route = MemoryRoute(meeting)

    def work(rank: int) -> None:
        worker = Worker(rank, meeting, route, check_interval=(2, 3)[rank])
        for _ in range(12):
            worker.engine.arm(True, 4)
            worker.engine.begin_backward()
            for number in range(6):
                worker.give(number, 1.0)
            worker.engine.end_backward()

    run_threads(work, WORKERS)  # or parts that are not the same would be found to differ


def test_a_queue_starts_in_one_order_on_all_workers() -> None:
    orders = ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4])

    def work(rank: int, worker: Worker) -> None:
        worker.engine.arm(True, 4)
        worker.engine.begin_backward()
        for number in orders[rank]:
            worker.give(number, 1.0)
        worker.engine.end_backward()

    route, _ = together(work, queue="one")
    by_rank = [[item for rank, _, item in route.log if rank == worker] for worker in range(WORKERS)]
    assert by_rank[0] == by_rank[1]
    loose, _ = together(work)
    assert [item for rank, _, item in loose.log if rank == 0] != [item for rank, _, item in loose.log if rank == 1]


def test_a_forgotten_gradient_is_named_and_the_others_still_land() -> None:
    def work(rank: int, worker: Worker) -> str:
        worker.engine.arm(True, 4)
        worker.engine.begin_backward()
        for number in (5, 4, 3, 2, 0):
            worker.give(number, 1.0)
        worker.engine.end_backward()
        assert worker.engine.phase is Phase.LANDED
        with pytest.raises(UnsupportedError) as caught:
            worker.engine.arm(True, 4)
        worker.engine.arm(True, 4)
        return str(caught.value)

    _, texts = together(work)
    assert all("1 parameter(s) got no gradient in step 0" in text for text in texts)
    assert ["not receive grad for rank 0: 0.bias" in texts[0], "rank 1: 0.bias" in texts[1]] == [True, True]


def test_after_a_backward_that_was_broken_off_no_forward_goes_on() -> None:
    def work(rank: int, worker: Worker) -> None:
        worker.engine.arm(True, 4)
        worker.engine.begin_backward()
        worker.give(5, 1.0)
        with pytest.raises(UnsupportedError, match="backward 0 was interrupted"):
            worker.engine.arm(True, 4)

    together(work)


def test_closing_ends_exchangers_and_team() -> None:
    def work(rank: int, worker: Worker) -> tuple[bool, bool]:
        worker.engine.close()
        (exchanger,) = worker.engine._schedules._exchangers.values()
        return exchanger.is_closed, worker.team.is_closed

    _, closed = together(work)
    assert closed == [(True, True)] * WORKERS


class Turns:
    """What a wrapper puts between autograd and the policy."""

    def __init__(self, policy) -> None:
        self.begin_backward, self.end_backward, self.close = policy.begin_backward, policy.end_backward, policy.close


def train(worker: Worker, rank: int, policy, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    policy.connect(worker.model, worker.engine)
    front_end = AutogradFrontEnd(worker.engine, Turns(policy))
    for step in range(steps):
        x = data(rank, step)
        policy.before_forward(worker.model, True, False)
        worker.engine.arm(True, x.numel())
        out = worker.model(x)
        front_end.watch_outputs([out], [])
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()
    policy.finish()
    values = [parameter.detach().clone() for parameter in worker.model.parameters()]
    front_end.close()
    policy.close()
    return values


def alone(steps: int) -> list[torch.Tensor]:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(WORKERS):
            (model(data(rank, step)).square().mean() / WORKERS).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.mark.parametrize("queue", [None, "one"])
def test_training_now_and_deferred_gives_the_same_bits_on_all_workers(queue: str | None) -> None:
    steps = 6

    def now(rank: int, worker: Worker) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(worker.model.parameters(), lr=0.05)
        return train(worker, rank, UpdateNow(), optimizer, steps)

    def deferred(rank: int, worker: Worker) -> list[torch.Tensor]:
        optimizer = torch.optim.Adam(worker.model.parameters(), lr=0.05)
        return train(worker, rank, DeferredUpdates(optimizer), optimizer, steps)

    _, (first, second) = together(now, queue)
    _, (third, fourth) = together(deferred, queue, defers=True)
    for one, two, three, four, expected in zip(first, second, third, fourth, alone(steps), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
        assert torch.equal(one, four)
        assert is_close(one, expected)


def test_deferred_updates_wait_for_the_first_touch_and_land_only_what_it_reads() -> None:
    def work(rank: int, worker: Worker) -> None:
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=1.0)
        policy = DeferredUpdates(optimizer)
        policy.connect(worker.model, worker.engine)
        front_end = AutogradFrontEnd(worker.engine, Turns(policy))
        for step in range(2):  # the first backward plans, and lands
            worker.engine.arm(True, 24)
            out = worker.model(data(rank, step))
            front_end.watch_outputs([out], [])
            optimizer.zero_grad()
            out.sum().backward()
            optimizer.step()
        assert worker.engine.phase is Phase.CLOSED
        assert worker.model[4].bias.shape == (2,)  # tells nothing about values
        assert worker.engine.phase is Phase.CLOSED
        assert worker.model[4].bias.grad is not None
        assert worker.engine.phase is Phase.SETTLED
        assert len(policy._pending) == 5
        _ = optimizer.state_dict()
        assert worker.engine.phase is Phase.LANDED
        assert not policy._pending
        front_end.close()
        policy.close()
        assert type(optimizer) is torch.optim.SGD

    together(work, defers=True)


def test_a_lost_worker_breaks_the_step_and_no_update_uses_what_arrived() -> None:
    def work(rank: int, worker: Worker) -> None:
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=1.0)
        policy = DeferredUpdates(optimizer)
        policy.connect(worker.model, worker.engine)
        with pytest.raises(WorkerLostError), policy.guard():
            raise WorkerLostError("worker 1 is gone")
        with pytest.raises(UnsupportedError, match="an update was interrupted"):
            optimizer.step()
        policy.close()

    together(work, defers=True)


def test_the_norm_is_clipped_alone_too() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = DeferredUpdates(optimizer, max_grad_norm=0.5)
    policy.connect(model, None)
    before = model.weight.detach().clone()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer.step()
    assert is_close(before - model.weight.detach(), torch.tensor([[0.3, 0.4]]))
    policy.close()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    before = model.weight.detach().clone()
    optimizer.step()
    assert is_close(before - model.weight.detach(), torch.tensor([[3.0, 4.0]]))


def test_a_backward_that_is_captured_as_a_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    is_capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)

    def work(rank: int, worker: Worker) -> int:
        worker.engine.has_cuda = True
        worker.engine.arm(True, 4)
        with pytest.raises(UnsupportedError, match=f"rank {rank}: a backward is being captured as a CUDA graph"):
            worker.engine.begin_backward()
        return worker.engine.step

    assert together(work)[1] == [0, 0]


@pytest.mark.parametrize("lands_at_once", [True, False])
def test_gradients_that_somebody_keeps_stay_what_they_were(lands_at_once: bool) -> None:
    def work(rank: int, worker: Worker) -> None:
        optimizer = torch.optim.SGD(worker.model.parameters(), lr=0.0)
        policy = DeferredUpdates(optimizer)
        policy.connect(worker.model, worker.engine)
        policy._is_paused = lands_at_once
        front_end = AutogradFrontEnd(worker.engine, Turns(policy))
        kept, copies = [], []
        for step in range(4):
            worker.engine.arm(True, 24)
            out = worker.model(data(rank, step))
            front_end.watch_outputs([out], [])
            optimizer.zero_grad()
            (out.sum() * (step + 1)).backward()
            kept.append([parameter.grad for parameter in worker.model.parameters()])
            copies.append([gradient.clone() for gradient in kept[-1]])
            optimizer.step()
        policy.finish()
        for now, then in zip(kept, copies, strict=True):
            assert all(map(torch.equal, now, then))
        front_end.close()
        policy.close()

    together(work, defers=True, keep_views=True, bucket_bytes=1 << 20)


def test_a_model_that_was_moved_and_is_back_is_watched_again() -> None:
    def work(rank: int, worker: Worker) -> list[torch.Tensor]:
        policy = UpdateNow()
        policy.connect(worker.model, worker.engine)
        front_end = AutogradFrontEnd(worker.engine, Turns(policy))
        worker.model.double().float()  # torch forgets who waits for its gradients, as between devices
        front_end.watch_again()
        worker.engine.arm(True, 24)
        out = worker.model(data(rank, 0))
        front_end.watch_outputs([out], [])
        out.sum().backward()
        front_end.close()
        return [parameter.grad.clone() for parameter in worker.model.parameters()]

    _, (first, second) = together(work)
    assert all(map(torch.equal, first, second))
