"""Tagged messages between workers, over the wire in memory: any order, any size, and the loss of a worker."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import Future

import pytest

from poseidon.errors import FrameError
from poseidon.team import mail as mail_module
from poseidon.team import team as team_module
from poseidon.team.mail import Mail, Tag, then
from poseidon.team.membership import PeerLostError
from poseidon.team.team import Team
from poseidon.wire.memory import make_memory_network


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_module, "PIECE_BYTES", 10)


@pytest.mark.parametrize("seed", range(20))
def test_messages_of_any_size_arrive_whole_in_any_order(seed: int) -> None:
    chance = random.Random(seed)
    transports = make_memory_network(3, lambda parcels: chance.randrange(len(parcels)))
    network, mails = transports[0].network, [Mail(transport) for transport in transports]
    sizes = [1, 9, 10, 11, 20, 35, 100]
    sends, expected = [], []
    calls = [(sender, peer, number) for sender in range(3) for peer in range(3) for number in range(len(sizes))]
    chance.shuffle(calls)
    for sender, peer, number in calls:
        data = bytes(chance.randrange(256) for _ in range(sizes[number]))
        tag = Tag(number, 2**60 + number)
        steps = [
            lambda sender=sender, peer=peer, tag=tag, data=data: sends.append(
                mails[sender].send(peer, tag, memoryview(data))
            ),
            lambda sender=sender, peer=peer, tag=tag, data=data: expected.append(
                (mails[peer].expect(sender, tag, memoryview(bytearray(len(data)))), data)
            ),
        ]
        chance.shuffle(steps)
        for step in steps:
            step()
            network.pump(chance.randrange(4))
    network.pump()
    assert all(send.result(0) is None for send in sends)
    assert all(bytes(future.result(0)) == data for future, data in expected)
    assert not any(mail._slots or mail._sending for mail in mails), "something is kept for ever"


def test_what_is_expected_of_a_lost_worker_and_what_comes_later_fails_with_its_name() -> None:
    transports = make_memory_network(3)
    mails = [Mail(transport) for transport in transports]
    waiting = mails[0].expect(2, Tag(1, 1), memoryview(bytearray(5)))
    sending = mails[0].send(1, Tag(1, 1), memoryview(b"hello"))
    transports[2].die("pulled the plug")
    later = [mails[0].expect(1, Tag(2, 2), memoryview(bytearray(5))), mails[0].send(1, Tag(3, 3), memoryview(b"x"))]
    for future in (waiting, sending, *later):
        with pytest.raises(PeerLostError, match="pulled the plug") as caught:
            future.result(0)
        assert caught.value.rank == 2


@pytest.mark.parametrize("comes_early", [False, True])
def test_a_message_of_another_size_is_refused(comes_early: bool) -> None:
    transports = make_memory_network(2)
    mails = [Mail(transport) for transport in transports]
    mails[1].send(0, Tag(1, 1), memoryview(b"four"))
    if comes_early:
        transports[0].network.pump()
        with pytest.raises(FrameError, match="4 bytes came where 5 were expected"):
            mails[0].expect(1, Tag(1, 1), memoryview(bytearray(5))).result(0)
    else:
        mails[0].expect(1, Tag(1, 1), memoryview(bytearray(5)))
        with pytest.raises(FrameError, match="5 bytes were expected"):
            transports[0].network.pump()


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("source", [0, 1])
@pytest.mark.parametrize("length", [0, 7, 150])
def test_a_broadcast_reaches_everybody_and_crosses_no_link_twice(
    size: int, source: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team_module, "_SMALL_BYTES", 20)
    transports = make_memory_network(size)
    teams = []
    for rank, transport in enumerate(transports):
        team = Team.__new__(Team)
        team.rank, team.size, team._mail, team._tags = rank, size, Mail(transport), Counter()
        teams.append(team)
    for step in range(3):
        data = [bytearray([rank + 10 * step] * length) for rank in range(size)]
        futures = [team.start_broadcast(memoryview(mine), source) for team, mine in zip(teams, data, strict=True)]
        transports[0].network.pump()
        assert all(future.done() and future.exception() is None for some in futures for future in some)
        assert data == [bytearray([source + 10 * step] * length)] * size
    if length > 20:
        assert max(transport.stats.sent_bytes for transport in transports) == 3 * length


def test_a_broadcast_that_is_not_passed_on_fails_behind() -> None:
    first: Future[None] = Future()
    waiting = then(first, lambda: Future())
    first.set_exception(PeerLostError(0, "gone"))
    with pytest.raises(PeerLostError, match="gone"):
        waiting.result(0)
