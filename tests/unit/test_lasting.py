"""What an elastic job needs in one process: copies of the last step, positions that follow the job, refusals."""

from __future__ import annotations

import socket
import threading

import pytest
import torch

import poseidon
from poseidon import api, ps
from poseidon.checkpoints.memory import StepMemory, copy_over
from poseidon.data import samplers
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.job import world
from poseidon.job.cutting import NotedSockets
from poseidon.team import epochs


class FakeJob:
    """An elastic job without a launcher."""

    def __init__(self, most: int = 4) -> None:
        self.most = most


def test_copies_reuse_their_memory_and_follow_no_change() -> None:
    weight, memory = torch.ones(3), StepMemory()
    memory.keep(1, {"model": {"w": weight}, "optimizer": {"state": [(weight, 2)]}}, {}, {"best": [1.0]})
    assert memory.kept is not None
    held = memory.kept.parts["model"]["w"]
    weight.mul_(5)
    assert held.tolist() == [1, 1, 1]
    memory.keep(2, {"model": {"w": weight}, "optimizer": {"state": [(weight, 2)]}}, {}, {})
    assert memory.kept.parts["model"]["w"] is held
    assert held.tolist() == [5, 5, 5]
    assert memory.kept.step == 2


def test_a_copy_takes_new_memory_where_the_shape_has_changed() -> None:
    old = torch.zeros(2)
    assert copy_over(torch.ones(3), old).tolist() == [1, 1, 1]
    assert copy_over({"a": torch.ones(2)}, {"a": old})["a"] is old
    assert copy_over({"a": torch.ones(2)}, None)["a"] is not old


def test_state_that_would_be_lost_with_its_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "this_job", FakeJob)
    monkeypatch.setattr(ps, "this_job", FakeJob)
    net = torch.nn.Linear(2, 1)
    with pytest.raises(UnsupportedError, match=r"in an elastic job .* lost with its worker.*; leave it out"):
        poseidon.distribute(net, torch.optim.SGD(net.parameters(), 0.1), consistency="ssp", staleness=1)
    with pytest.raises(UnsupportedError, match="tables in an elastic job"):
        ps.connect()


def test_nccl_and_other_frameworks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "this_job", FakeJob)
    monkeypatch.setattr(epochs, "this_job", FakeJob)
    with pytest.raises(ConfigError, match="NCCL's operations cannot be interrupted"):
        poseidon.init("cpu:gloo,cuda:nccl")
    with pytest.raises(UnsupportedError, match="a JAX program in an elastic job"):
        epochs.refuse_elastic("a JAX program")


def test_batches_are_those_of_the_largest_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "this_job", FakeJob)
    whole = samplers.ElasticSampler(range(11), 4, shuffle=False)
    # A last batch of 3 could not be dealt to 4 workers, so there is none for one worker either.
    assert [*whole] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    with pytest.raises(ConfigError, match="batch_size=3 for 4 workers"):
        samplers.ElasticSampler(range(11), 3)


def test_a_sampler_follows_the_job_unless_its_place_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, fixed = (
        samplers.ElasticSampler(range(8), 4, shuffle=False),
        samplers.ElasticSampler(range(8), 4, rank=0, size=1),
    )
    assert [*sampler] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setattr(samplers, "place", lambda *_: (1, 2))
    assert [*sampler] == [[2, 3], [6, 7]]
    assert {len(share) for share in fixed} == {4}


def test_noted_connections_are_cut_and_others_are_not() -> None:
    noted = NotedSockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = socket.create_connection(listener.getsockname())
        with noted.noting():
            inside = socket.create_connection(listener.getsockname())
        with before, inside:
            ended = threading.Event()
            reader = threading.Thread(target=lambda: (inside.recv(1), ended.set()))
            reader.start()
            noted.cut()
            assert ended.wait(10)
            reader.join()
            before.send(b"x")  # still open
            with listener.accept()[0], listener.accept()[0]:
                noted.forget()
                noted.cut()
                before.send(b"x")


def test_connections_are_cut_while_they_are_being_opened() -> None:
    noted = NotedSockets()
    with socket.create_server(("127.0.0.1", 0)) as listener, noted.noting():
        inside = socket.create_connection(listener.getsockname())
        with inside, listener.accept()[0]:
            noted.cut()
            assert inside.recv(1) == b""
            # The listener itself still accepts.
            socket.create_connection(listener.getsockname()).close()
