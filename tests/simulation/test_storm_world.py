"""The simulated world itself: its clock, its threads, and what its network has in common with the kernel's."""

from __future__ import annotations

import errno
import random
import socket as real
from collections.abc import Callable

import pytest

from storm.network import Connection, create_connection, create_server, network_of
from storm.primitives import queue, threading, time
from storm.world import World, here


def run(*works: Callable[[], object], seed: int = 0, limit_s: float = 1e6) -> World:
    """Run each function as the main thread of a process of its own."""
    with World(seed) as world:
        tasks = [
            world.spawn(world.process(f"p{number}", f"10.0.0.{number + 1}"), "main", work)
            for number, work in enumerate(works)
        ]
        world.run(tasks, limit_s)
    return world


def talk(server: Callable[[Connection], object], client: Callable[[Connection], object], seed: int = 0) -> World:
    """Let two processes talk over a connection."""

    def serve() -> None:
        server(create_server(("10.0.0.1", 7)).accept()[0])

    def connect() -> None:
        time.sleep(0.1)
        client(create_connection(("10.0.0.1", 7)))

    world = run(serve, connect, seed=seed)
    assert not world.crashes
    return world


def test_an_hour_passes_when_everybody_waits() -> None:
    world = run(lambda: time.sleep(3600))
    assert world.now == pytest.approx(4600)
    assert world.problem is None


def test_who_waits_forever_is_found() -> None:
    def lock_both(first: threading.Lock, second: threading.Lock) -> None:
        with first:
            time.sleep(1.0)
            with second:
                pass

    def work() -> None:
        one, two = threading.Lock(), threading.Lock()
        threads = [threading.Thread(target=lock_both, args=pair) for pair in ((one, two), (two, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert "a hang" in str(run(work).problem)


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_decides_who_comes_first(seed: int) -> None:
    def order() -> tuple[list[int], int]:
        came: list[int] = []

        def work() -> None:
            threads = [threading.Thread(target=came.append, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return came, run(work, seed=seed).digest

    assert order() == order()


def test_different_seeds_differ() -> None:
    assert (
        len({run(lambda: [queue.SimpleQueue().put(n) for n in range(50)], seed=seed).digest for seed in range(9)}) > 5
    )


def test_a_wait_ends_in_time_or_with_what_it_waited_for() -> None:
    said = []

    def work() -> None:
        event = threading.Event()
        said.append(event.wait(2.0))
        threading.Thread(target=lambda: (time.sleep(1.0), event.set())).start()
        said.append(event.wait(2.0))

    assert run(work).now == pytest.approx(1003, abs=0.1)
    assert said == [False, True]


@pytest.mark.parametrize("seed", range(5))
def test_bytes_arrive_in_order_however_they_were_sent(seed: int) -> None:
    data = random.Random(seed).randbytes(200_000)
    came = bytearray()

    def read(connection: Connection) -> None:
        while piece := connection.recv(5000):
            came.extend(piece)

    def write(connection: Connection) -> None:
        for start in range(0, len(data), 30_000):
            connection.sendall(data[start : start + 30_000])
        connection.close()

    talk(read, write, seed)
    assert bytes(came) == data


def test_a_killed_process_is_an_end_after_its_last_bytes() -> None:
    came = []

    def read(connection: Connection) -> None:
        came.append(connection.recv(10, real.MSG_WAITALL))

    def write(connection: Connection) -> None:
        connection.sendall(b"last")
        connection.process.kill()
        here().point()

    talk(read, write)
    assert came == [b"last"]


def test_silence_ends_only_who_asked_for_it() -> None:
    ends: list[tuple[str, float]] = []

    def read(name: str, connection: Connection) -> None:
        began = here().now
        try:
            connection.recv(1)
        except OSError as error:
            ends.append((f"{name}: {errno.errorcode[error.errno]}", here().now - began))

    def patient(connection: Connection) -> None:
        read("patient", connection)

    def careful(connection: Connection) -> None:
        connection.setsockopt(real.SOL_SOCKET, real.SO_KEEPALIVE, 1)
        connection.setsockopt(real.IPPROTO_TCP, real.TCP_USER_TIMEOUT, 6000)
        network_of(here()).cut("10.0.0.1")
        read("careful", connection)

    world = talk(patient, careful)
    assert [name for name, _ in ends] == ["careful: ETIMEDOUT"]
    assert ends[0][1] == pytest.approx(6.0, abs=0.1)
    assert "a hang" in str(world.problem)


def test_a_close_does_not_wake_who_is_blocked_and_a_shutdown_does() -> None:
    woken = []

    def read(how: str) -> Callable[[Connection], None]:
        def work(connection: Connection) -> None:
            thread = threading.Thread(target=lambda: woken.append((how, connection.recv(1))))
            thread.start()
            time.sleep(1.0)
            if how == "shutdown":
                connection.shutdown(real.SHUT_RDWR)
            else:
                connection.close()
            thread.join()

        return work

    def wait(_connection: Connection) -> None:
        time.sleep(100.0)

    assert "a hang" in str(talk(read("close"), wait).problem)
    talk(read("shutdown"), wait)
    assert woken == [("shutdown", b"")]
