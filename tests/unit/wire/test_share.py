from __future__ import annotations

import pytest

from poseidon.wire.share import SMALLEST_PART, BufferShare

EACH = 16000


@pytest.fixture
def share() -> BufferShare:
    return BufferShare(EACH, range(4))


def test_peers_for_which_as_much_waits_have_the_same(share: BufferShare):
    for peer in range(4):
        share.add(peer, 5000)
    assert [share.buffer_bytes(peer) for peer in range(4)] == [EACH] * 4


def test_who_is_behind_gets_more_and_who_is_ahead_less(share: BufferShare):
    for peer, waiting in enumerate((8000, 10000, 10000, 12000)):
        share.add(peer, waiting)
    ahead, even, _, behind = [share.buffer_bytes(peer) for peer in range(4)]
    assert ahead < EACH == even < behind


def test_a_peer_alone_has_the_buffers_of_all(share: BufferShare):
    share.add(2, 1)
    assert share.buffer_bytes(2) == 4 * EACH


def test_nobody_falls_below_a_smallest_part(share: BufferShare):
    share.add(0, 1)
    share.add(1, 10**9)
    assert share.buffer_bytes(0) == SMALLEST_PART * EACH


def test_what_was_sent_counts_no_more(share: BufferShare):
    share.add(0, 10**6)
    share.add(1, 1000)
    share.add(0, -(10**6))
    assert share.buffer_bytes(1) == 4 * EACH


def test_what_waits_for_a_peer_that_is_gone_takes_nothing_from_the_others(share: BufferShare):
    share.add(0, 10**6)
    share.add(1, 1000)
    share.drop(0)
    share.add(0, 10**6)  # queued by a thread that does not know yet
    assert share.buffer_bytes(1) == 3 * EACH


def test_without_anything_waiting_a_buffer_is_as_usual(share: BufferShare):
    assert share.buffer_bytes(3) == EACH


def test_where_no_peers_are_told_all_buffers_are_as_usual():
    assert BufferShare(EACH, ()).buffer_bytes(0) == EACH
