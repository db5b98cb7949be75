from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from poseidon.errors import ConfigError, WireError
from poseidon.wire import door
from poseidon.wire import mesh as mesh_module
from poseidon.wire.handshake import Credentials
from poseidon.wire.mesh import Mesh, MeshError

SECRET = b"sixteen bytes or more"


def connected(
    size: int,
    secrets: list[bytes] | None = None,
    timeout_s: float = 10.0,
    encrypt: bool = False,
    ip: str = "127.0.0.1",
) -> list[Mesh]:
    meshes = [Mesh(rank, size, ip) for rank in range(size)]
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


@pytest.fixture(params=[(False, "127.0.0.1"), (True, "127.0.0.1"), (True, "::1")], ids=["plain", "encrypted", "IPv6"])
def three(request) -> Iterator[list[Mesh]]:
    encrypt, ip = request.param
    meshes = connected(3, encrypt=encrypt, ip=ip)
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
    data = [bytes([rank]) * (12 << 20) for rank in range(3)]
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
        connected(2, [SECRET, b"another secret, also long"], timeout_s=0.4, encrypt=encrypt)


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


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


MESSAGE = mesh_module._pack(1, b"sum")


@pytest.mark.parametrize("bit", range(8 * len(MESSAGE)))
def test_a_flipped_bit_is_found_and_both_ends_hear_of_it(pair, bit) -> None:
    near, far = pair
    broken = bytearray(MESSAGE)
    broken[bit // 8] ^= 1 << bit % 8
    peer = mesh_module._Peer(5, far)
    near.sendall(mesh_module._pack(0, b"before") + broken)
    far.setblocking(True)  # the bytes may be on their way
    assert peer.take(0) == b"before"
    for _ in range(2):
        with pytest.raises(MeshError, match=r"rank 5.*damaged") as caught:
            peer.take(1)
        assert (caught.value.rank, caught.value.is_broken, caught.value.is_damaged) == (5, True, True)
    near.settimeout(5)
    assert near.recv(1) == b"", "the sender does not hear of it"


def damage(near: Mesh, far: Mesh, place: int) -> None:
    """Flip a bit of the last record of TLS that one of two ranks has sent to the other, which has not read it."""
    ((sender,), (receiver,)) = ([peer.connection for peer in mesh._peers.values()] for mesh in (near, far))
    assert select.select([receiver], [], [], 5)[0]
    record = bytearray(socket.socket.recv(receiver, 1 << 16))
    record[place] ^= 4
    socket.socket.sendall(sender, record)
    assert select.select([receiver], [], [], 5)[0]


@pytest.mark.parametrize("place", [0, 5, 20, -1])
@pytest.mark.parametrize("is_asked", [False, True], ids=["heartbeat", "roll call"])
def test_a_bit_flipped_in_a_record_of_tls_is_found_and_both_ends_hear_of_it(place, is_asked) -> None:
    near, far = connected(2, encrypt=True)
    with contextlib.closing(near), contextlib.closing(far):
        near.signal(b"a heartbeat")
        damage(near, far, place)
        assert "damaged" in far.hear()[0].ended
        if is_asked:
            with pytest.raises(MeshError, match=r"rank 0.*damaged") as caught:
                far.receive(far.send(b""), b"", 5.0)
            assert (caught.value.is_broken, caught.value.is_damaged) == (True, True)
        with pytest.raises(MeshError, match="rank 1") as heard:
            near.receive(near.send(b""), b"", 5.0)
        assert (heard.value.is_broken, heard.value.is_damaged) == (True, False), "what came here was right"
        assert near.hear()[1].ended


def test_the_kernel_ends_a_connection_that_nobody_answers(three) -> None:
    for peer in three[0]._peers.values():
        assert peer.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert peer.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_a_crowd_of_silent_strangers_does_not_keep_the_ranks_apart() -> None:
    meshes = [Mesh(rank, 3, "127.0.0.1") for rank in range(3)]
    addresses = [mesh.address for mesh in meshes]
    strangers = [socket.create_connection(addresses[0]) for _ in range(door.STRANGERS)]
    credentials = Credentials(SECRET, encrypt=False)
    try:
        with ThreadPoolExecutor(3) as threads:
            for job in [threads.submit(mesh.connect, addresses, credentials, 5.0) for mesh in meshes]:
                job.result()
    finally:
        for each in [*strangers, *meshes]:
            each.close()


def test_a_rank_that_comes_again_replaces_its_first_connection() -> None:
    meshes = [Mesh(rank, 3, "127.0.0.1") for rank in range(3)]
    addresses = [mesh.address for mesh in meshes]
    credentials = Credentials(SECRET, encrypt=False)
    try:
        with ThreadPoolExecutor(3) as threads:
            # Rank 0 still waits for rank 2, so its door is open.
            jobs = [threads.submit(meshes[0].connect, addresses, credentials, 10.0)]
            first = door.enter(credentials, 1, 0, addresses[0], "127.0.0.1", 5.0)
            jobs += [threads.submit(meshes[1].connect, addresses, credentials, 10.0)]
            with first:
                first.settimeout(5)
                assert first.recv(1) == b"", "both connections are open"
            jobs += [threads.submit(meshes[2].connect, addresses, credentials, 10.0)]
            for job in jobs:
                job.result()
        numbers = [mesh.send(bytes([rank])) for rank, mesh in enumerate(meshes)]
        for rank, mesh in enumerate(meshes):
            assert mesh.receive(numbers[rank], bytes([rank]), 5.0) == [b"\0", b"\1", b"\2"]
    finally:
        for mesh in meshes:
            mesh.close()


def out_of_files(*_args: object, **_options: object) -> socket.socket:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_lack_of_descriptors_is_named_as_ones_own(monkeypatch) -> None:
    monkeypatch.setattr(door, "LISTEN_S", 0.0)
    meshes = [Mesh(rank, 2, "127.0.0.1") for rank in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(door.socket, "create_connection", out_of_files)
        patch.setattr(door.socket, "create_server", out_of_files)
        with pytest.raises(ConfigError, match=r"rank 1 could not connect.*too many open files here.*raise ulimit -n"):
            meshes[1].connect([mesh.address for mesh in meshes], Credentials(SECRET, encrypt=False), 0.3)
        with pytest.raises(ConfigError, match=r"rank 1 cannot listen.*too many open files here.*raise ulimit -n"):
            Mesh(1, 2, "127.0.0.1")
    for mesh in meshes:
        mesh.close()


def test_a_short_lack_of_descriptors_is_waited_out(monkeypatch) -> None:
    monkeypatch.setattr(door, "RETRY_S", 0.01)
    real, lacks = socket.create_connection, iter(range(3))

    def scarce(*args: object, **options: object) -> socket.socket:
        return real(*args, **options) if next(lacks, None) is None else out_of_files()

    monkeypatch.setattr(door.socket, "create_connection", scarce)
    for mesh in connected(2):
        mesh.close()
    assert next(lacks, None) is None


def test_of_signals_only_the_last_is_kept_and_messages_are_not_disturbed(three) -> None:
    numbers = []
    for rank, mesh in enumerate(three):
        mesh.signal(b"early")
        numbers.append(mesh.send(bytes([rank])))
        mesh.signal(b"late %d" % rank)
    for rank, mesh in enumerate(three):
        assert mesh.receive(numbers[rank], bytes([rank]), 5.0) == [b"\0", b"\1", b"\2"]
        others = [other for other in range(3) if other != rank]
        while any(not mesh.hear()[other].signal.startswith(b"late") for other in others):
            pass
        heard = mesh.hear()
        assert {other: heard[other].signal for other in others} == {other: b"late %d" % other for other in others}
        assert not any(one.ended for one in heard.values())


def test_whoever_parts_is_heard_to_the_last_signal(three) -> None:
    number = three[1].send(b"message")
    three[0].signal(b"unread")
    three[1].signal(b"goodbye")
    three[1].part()
    three[1].close()
    while not three[0].hear()[1].ended:
        pass
    assert three[0].hear()[1].signal == b"goodbye"
    assert three[0]._peers[1].take(number) == b"message"
    three[0].signal(b"to nobody")
    with pytest.raises(MeshError, match="no message from rank 1") as caught:
        three[0].receive(5, b"", 5.0)
    assert caught.value.is_broken


class Looks:
    """A wait of somebody who has had enough."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def look(self, peer: int) -> None:
        self.seen.append(peer)
        raise KeyError("enough")


def test_who_waits_may_look_and_give_up(three) -> None:
    looks = Looks()
    three[1].send(b"1")
    with pytest.raises(KeyError):
        three[0].receive(three[0].send(b""), b"", 60.0, lambda: contextlib.nullcontext(looks))
    assert looks.seen == [2], "rank 1 has come"


def test_what_comes_soon_is_no_wait(three) -> None:
    numbers = [mesh.send(bytes([rank])) for rank, mesh in enumerate(three)]

    def refuse():
        raise AssertionError("a wait was begun")

    for rank, mesh in enumerate(three):
        assert mesh.receive(numbers[rank], bytes([rank]), 60.0, refuse) == [b"\0", b"\1", b"\2"]
