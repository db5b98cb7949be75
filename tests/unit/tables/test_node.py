"""Who is given up, and who is not, with messages that arrive when the test says so."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from poseidon.errors import WorkerLostError
from poseidon.tables.doubts import COMPLAINTS, Doubts
from poseidon.tables.node import Node
from poseidon.tables.tables import TableSpec
from poseidon.wire.memory import InFlightMessage, MemoryNetwork, first_urgent, make_memory_network
from poseidon.wire.message import Kind

SPEC = TableSpec("t", 16, 4, consistency="ssp", staleness=1)


def test_only_silence_through_several_complaints_of_one_rank_counts() -> None:
    doubts = Doubts()
    for _ in range(COMPLAINTS - 1):
        assert not doubts.complain(1, by=0)
        assert not doubts.complain(1, by=2)
    doubts.hear(1)
    assert [doubts.complain(1, by=0) for _ in range(COMPLAINTS)] == [False] * (COMPLAINTS - 1) + [True]


def complaints_first(parcels: Sequence[InFlightMessage]) -> int:
    kinds = [parcel.header.kind is Kind.LOST and not parcel.payload.nbytes for parcel in parcels]
    return kinds.index(True) if any(kinds) else first_urgent(parcels)


def open_nodes(size: int) -> tuple[MemoryNetwork, list[Node]]:
    transports = make_memory_network(size, complaints_first)
    nodes = [Node(transport, timeout_s=60) for transport in transports]
    for node in nodes:
        node.worker.open(SPEC)
    transports[0].network.pump()
    return transports[0].network, nodes


def complain(nodes: list[Node], by: int, to: int, clock: int) -> None:
    nodes[by]._post.send(to, Kind.LOST, SPEC.ident, clock)


def test_a_complaint_that_meets_a_change_of_servers_harms_nobody_alive() -> None:
    network, nodes = open_nodes(4)
    complain(nodes, by=3, to=2, clock=5)
    # Rank 2 takes over the place of rank 1 and waits for what ranks 0 and 3 know of it.
    network.transports[1].die()
    network.pump()
    for node in (nodes[0], nodes[2], nodes[3]):
        assert list(node.losses) == [1]
        node._post.check()


def test_a_worker_that_keeps_one_waiting_and_says_nothing_is_given_up_by_all() -> None:
    network, nodes = open_nodes(3)
    caches = [node.worker._caches[SPEC.ident] for node in nodes]
    for _ in range(2):
        for rank in (0, 2):
            nodes[rank].worker.clock(caches[rank])
    network.pump()
    for count in range(COMPLAINTS):
        assert nodes[0].losses == {}, count
        complain(nodes, by=0, to=2, clock=2)
        network.pump()
    assert nodes[0].losses == nodes[2].losses == {1: 0}


def test_a_worker_that_is_known_to_work_is_not_given_up_until_it_no_longer_does() -> None:
    network, nodes = open_nodes(3)
    busy = {1}
    for node in nodes:
        node._is_busy = busy.__contains__
    caches = [node.worker._caches[SPEC.ident] for node in nodes]
    for _ in range(2):
        for rank in (0, 2):
            nodes[rank].worker.clock(caches[rank])
    network.pump()
    for _ in range(5 * COMPLAINTS):
        complain(nodes, by=0, to=2, clock=2)
        network.pump()
    assert nodes[0].losses == nodes[2].losses == {}
    busy.clear()
    for count in range(COMPLAINTS):
        assert nodes[0].losses == {}, count
        complain(nodes, by=0, to=2, clock=2)
        network.pump()
    assert nodes[0].losses == nodes[2].losses == {1: 0}


def test_a_worker_whose_heartbeats_broke_is_lost_though_its_tables_are_reached() -> None:
    network, nodes = open_nodes(3)
    nodes[0].lose_connection(1, "the connection of its heartbeats broke")
    network.pump()
    assert nodes[0].losses == nodes[2].losses == {1: 0}
    with pytest.raises(WorkerLostError, match="worker 1 was given up"):
        nodes[1]._post.check()


def test_a_loss_that_shows_when_a_worker_leaves_is_not_passed_over() -> None:
    transports = make_memory_network(2, first_urgent)
    nodes: list[Node] = []

    def look() -> None:
        nodes[0].lose_connection(1, "the connection of its heartbeats broke")

    nodes += [Node(transport, timeout_s=1, look=look) for transport in transports]
    for node in nodes:
        node.worker.open(TableSpec("t", 16, 4))
    transports[0].network.pump()
    with pytest.raises(WorkerLostError, match=r"worker 1 is lost after clock 0 .*heartbeats broke"):
        nodes[0].leave()


def test_a_worker_that_moves_on_between_complaints_is_not_given_up() -> None:
    network, nodes = open_nodes(2)
    fast, slow = (node.worker._caches[SPEC.ident] for node in nodes)
    for clock in range(6):
        nodes[0].worker.clock(fast)
        for _ in range(COMPLAINTS - 1):
            complain(nodes, by=0, to=1, clock=clock + 8)
            network.pump()
        nodes[1].worker.clock(slow)
        network.pump()
    assert nodes[0].losses == nodes[1].losses == {}


def lose_before_opening(size: int) -> tuple[MemoryNetwork, list[Node]]:
    """Return nodes of which the first dies before any table is open."""
    transports = make_memory_network(size, first_urgent)
    nodes = [Node(transport, timeout_s=60) for transport in transports]
    transports[0].die()
    transports[1].network.pump()
    return transports[1].network, nodes[1:]


def test_a_table_opened_after_a_server_died_has_somebody_for_each_place() -> None:
    network, nodes = lose_before_opening(3)
    caches = [node.worker.open(SPEC) for node in nodes]
    network.pump()
    for node, cache in zip(nodes, caches, strict=True):
        node.worker.clock(cache)
    network.pump()
    for node in nodes:
        node._post.check()
    held = {place for node in nodes for _, place in node.holder._places}
    assert held == {0, 1, 2}


def test_a_table_in_lockstep_is_not_opened_without_a_worker_that_died() -> None:
    network, nodes = lose_before_opening(3)
    for node in nodes:
        with contextlib.suppress(WorkerLostError):
            node.worker.open(TableSpec("t", 16, 4))
    network.pump()
    for node in nodes:
        with pytest.raises(WorkerLostError, match="worker 0 is lost"):
            node._post.check()
