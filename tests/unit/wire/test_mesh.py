from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.errors import WireError
from poseidon.wire import mesh as mesh_module
from poseidon.wire.handshake import Credentials
from poseidon.wire.mesh import Mesh, MeshError

SECRET = b"sixteen bytes or more"


def connected(
    size: int, secrets: list[bytes] | None = None, timeout_s: float = 10.0, encrypt: bool = False
) -> list[Mesh]:
    meshes = [Mesh(rank, size, "127.0.0.1") for rank in range(size)]
    addresses = [mesh.address for mesh in meshes]
    with ThreadPoolExecutor(size) as threads:
        given = [Credentials(secret, encrypt) for secret in secrets or [SECRET] * size]
        jobs = [threads.submit(mesh.connect, addresses, given[rank], timeout_s) for rank, mesh in enumerate(meshes)]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            for mesh in meshes:
                mesh.close()
            raise
    return meshes


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def three(request) -> Iterator[list[Mesh]]:
    meshes = connected(3, encrypt=request.param)
    yield meshes
    for mesh in meshes:
        mesh.close()


def test_everybody_gets_everybodys_bytes_by_rank(three) -> None:
    data = [bytes([rank]) * rank for rank in range(3)]
    numbers = [mesh.send(mine) for mesh, mine in zip(three, data, strict=True)]
    for mesh, mine, number in zip(three, data, numbers, strict=True):
        assert mesh.receive(number, mine, 5.0) == data


def test_messages_may_be_read_in_any_order_and_a_rank_may_be_ahead(three) -> None:
    numbers = [[mesh.send(bytes([rank, step])) for step in range(5)] for rank, mesh in enumerate(three)]
    for rank, (mesh, mine) in enumerate(zip(three, numbers, strict=True)):
        for step in (3, 0, 4, 2, 1):
            assert mesh.receive(mine[step], bytes([rank, step]), 5.0) == [bytes([other, step]) for other in range(3)]


def test_senders_of_more_than_the_kernel_takes_do_not_wait_for_each_other(three) -> None:
    data = [bytes([rank]) * (20 << 20) for rank in range(3)]
    numbers = [mesh.send(mine) for mesh, mine in zip(three, data, strict=True)]
    with ThreadPoolExecutor(3) as threads:
        results = threads.map(lambda mesh, number, mine: mesh.receive(number, mine, 30.0), three, numbers, data)
        assert all(result == data for result in results)


def test_a_rank_that_leaves_is_named_after_its_last_words(three) -> None:
    numbers = [mesh.send(bytes([rank])) for rank, mesh in enumerate(three)]
    assert three[1].receive(numbers[1], b"\1", 5.0) == [b"\0", b"\1", b"\2"]
    three[1].close()
    assert three[0].receive(numbers[0], b"\0", 5.0) == [b"\0", b"\1", b"\2"]
    number = three[0].send(b"0")
    three[2].send(b"2")
    with pytest.raises(MeshError, match="rank 1") as caught:
        three[0].receive(number, b"0", 5.0)
    assert caught.value.rank == 1


def test_a_rank_that_does_not_read_loses_its_connection_before_memory_is_full(three, monkeypatch) -> None:
    monkeypatch.setattr(mesh_module, "MOST_BYTES", 1 << 20)
    numbers = [three[0].send(bytes(1 << 19)) for _ in range(40)]

    def read_all() -> None:
        for number in numbers:
            three[2].send(b"")
            three[1].send(b"")
            three[1].receive(number, b"", 5.0)

    with pytest.raises(MeshError, match=r"rank 0.*(ended|reset|EOF)"):
        read_all()
    with pytest.raises(WireError, match="cannot send 1048577 bytes at once"):
        three[0].send(bytes((1 << 20) + 1))


def test_a_silent_rank_is_named(three) -> None:
    number = three[0].send(b"")
    # Rank 0 waits for rank 1 first, so it does not matter when this arrives.
    three[2].send(b"")
    with pytest.raises(MeshError, match="rank 1: it was silent for too long"):
        three[0].receive(number, b"", 0.05)


@pytest.mark.parametrize("encrypt", [False, True])
def test_a_stranger_gets_no_connection(encrypt) -> None:
    with pytest.raises(WireError, match="is not connected to ranks"):
        connected(2, [SECRET, b"another secret, also long"], timeout_s=1.0, encrypt=encrypt)


def test_a_stranger_does_not_keep_the_ranks_apart() -> None:
    meshes = [Mesh(rank, 2, "127.0.0.1") for rank in range(2)]
    addresses = [mesh.address for mesh in meshes]
    with socket.create_connection(addresses[0]) as stranger, ThreadPoolExecutor(2) as threads:
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 8)
        for job in [
            threads.submit(mesh.connect, addresses, Credentials(SECRET, encrypt=False), 10.0) for mesh in meshes
        ]:
            job.result()
    number = meshes[1].send(b"1")
    meshes[0].send(b"0")
    assert meshes[1].receive(number, b"1", 5.0) == [b"0", b"1"]
    for mesh in meshes:
        mesh.close()
