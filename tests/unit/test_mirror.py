from typing import cast

import pytest
import torch
from torch import Tensor

from poseidon.team import mirror
from poseidon.team.mirror import Mirror, mirror_all
from poseidon.team.team import Team


class Wire:
    """Stands for a team: what the source sent is what the others receive."""

    is_nccl = False

    def __init__(self) -> None:
        self.rank = 0
        self.messages: list[Tensor] = []
        self._received = 0

    def result(self, future: str, what: str) -> None:
        assert (future, what) == ("sent or come", "the buffers")

    def start_broadcast(self, data: memoryview, source: int) -> list[str]:
        message = torch.frombuffer(data, dtype=torch.uint8) if data.nbytes else torch.empty(0, dtype=torch.uint8)
        if self.rank == source:
            self.messages.append(message.clone())
        else:
            message.copy_(self.messages[self._received])
            self._received += 1
        return ["sent or come"]


@pytest.fixture
def wire() -> Wire:
    return Wire()


def team(wire: Wire) -> Team:
    return cast("Team", wire)


def some_tensors(seed: int) -> list[Tensor]:
    """Return tensors of every width, in an order that would misalign them, with odd sizes and layouts."""
    generator = torch.Generator().manual_seed(seed)
    randn = torch.randn(2, 3, 5, 7, generator=generator)
    return [
        torch.randint(0, 2, (3,), generator=generator, dtype=torch.bool),
        randn.to(memory_format=torch.channels_last),
        torch.randn(3, generator=generator).to(torch.bfloat16),
        torch.tensor(seed),
        torch.randn(5, generator=generator, dtype=torch.float64),
        torch.randint(-100, 100, (1,), generator=generator, dtype=torch.int8),
        torch.randn(4, 3, generator=generator).t(),
        torch.empty(0),
        torch.randn(2, generator=generator, dtype=torch.complex128),
    ]


def test_all_tensors_arrive_bit_for_bit_in_one_message(wire: Wire) -> None:
    ours, theirs = some_tensors(1), some_tensors(2)
    sender, receiver = Mirror(ours), Mirror(theirs)
    sender.copy_from(team(wire), 0, "the buffers")
    wire.rank = 1
    receiver.copy_from(team(wire), 0, "the buffers")
    assert len(wire.messages) == 1
    for left, right, original in zip(ours, theirs, some_tensors(1), strict=True):
        assert torch.equal(left, original)
        assert torch.equal(right, original)
        assert right.stride() == original.stride()


def test_a_mirror_is_used_again_and_again(wire: Wire) -> None:
    ours, theirs = [torch.zeros(3)], [torch.zeros(3)]
    sender, receiver = Mirror(ours), Mirror(theirs)
    for value in (1.0, 2.0):
        ours[0].fill_(value)
        wire.rank = 0
        sender.copy_from(team(wire), 0, "the buffers")
        wire.rank = 1
        receiver.copy_from(team(wire), 0, "the buffers")
        assert theirs[0].tolist() == [value] * 3


def test_many_tensors_travel_in_messages_of_bounded_size(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_MESSAGE_BYTES", 100)
    ours = [torch.full((size,), float(size)) for size in (10, 10, 10, 60, 1, 1)]
    theirs = [torch.zeros_like(tensor) for tensor in ours]
    mirror_all(team(wire), ours, 0, "the buffers")
    wire.rank = 1
    mirror_all(team(wire), theirs, 0, "the buffers")
    assert sum(message.numel() for message in wire.messages) == 4 * 92
    # A message may exceed the bound by its last tensor, but not by more.
    assert [message.numel() for message in wire.messages] == [120, 240, 8]
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))


def test_no_tensors_make_no_message(wire: Wire) -> None:
    mirror_all(team(wire), [], 0, "the buffers")
    assert not wire.messages
