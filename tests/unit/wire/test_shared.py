from __future__ import annotations

import os

import pytest

from poseidon.errors import WireError
from poseidon.wire.shared import SharedBlock


def test_what_one_writes_the_other_reads() -> None:
    mine = SharedBlock.create(10_000)
    theirs = SharedBlock.open(mine.handle)
    assert len(theirs.data) == len(mine.data) == 10_000
    assert bytes(theirs.data) == bytes(10_000)
    mine.data[9_999], theirs.data[0] = 7, 8
    assert (theirs.data[9_999], mine.data[0]) == (7, 8)


def test_nobody_opens_it_once_all_have() -> None:
    block = SharedBlock.create(100)
    block.unlist()
    with pytest.raises(WireError, match=f"process {os.getpid()}"):
        SharedBlock.open(block.handle)
    block.data[99] = 1  # still here


def test_another_process_under_the_same_number_is_noticed() -> None:
    block, other = SharedBlock.create(100), SharedBlock.create(100)
    pid, number, _ = other.handle
    with pytest.raises(WireError, match="do not see each other's processes"):
        SharedBlock.open((pid, number, block.handle[2]))


def test_an_unknown_process_is_named() -> None:
    with pytest.raises(WireError, match="process 0 cannot be opened"):
        SharedBlock.open((0, 3, ""))


def test_a_process_that_may_not_look_into_the_owner_is_given_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    look = os.open

    def refuse(path: str, *args: int) -> int:
        if path.startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return look(path, *args)

    mine = SharedBlock.create(100)
    monkeypatch.setattr(os, "open", refuse)
    theirs = SharedBlock.open(mine.handle)
    mine.data[99] = 7
    assert theirs.data[99] == 7
    mine.unlist()
    with pytest.raises(WireError, match="Permission denied"):
        SharedBlock.open(mine.handle)
