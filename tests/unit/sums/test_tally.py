from types import SimpleNamespace

import numpy as np
import pytest

from poseidon.planning.transfers import SentBits
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Encoding, PlainLayout
from poseidon.sums.tally import Tally

CHUNK = Chunk(0, 0, 0, 1000, 0)
HOST = SimpleNamespace(layouts={Encoding.PLAIN: PlainLayout(4)})
DEVICE = SimpleNamespace(layouts={Encoding.PLAIN: PlainLayout(4), Encoding.COMPACT: None})


def encoded(encoding: Encoding, size_bytes: int) -> Encoded:
    return Encoded(encoding, np.zeros(size_bytes, np.uint8))


def test_bits_are_known_once_parts_and_sums_were_sent() -> None:
    tally = Tally()
    assert tally.bits() == SentBits()
    tally.note(DEVICE, CHUNK, encoded(Encoding.COMPACT, 1500), is_part=True)
    assert tally.bits() == SentBits()
    tally.note(DEVICE, CHUNK, encoded(Encoding.COMPACT, 2500), is_part=False)
    assert tally.bits() == SentBits(compacted=(12.0, 20.0))


def test_what_a_device_could_not_shorten_counts_with_what_it_could() -> None:
    tally = Tally()
    for size_bytes, encoding in ((1000, Encoding.COMPACT), (4000, Encoding.PLAIN)):
        tally.note(DEVICE, CHUNK, encoded(encoding, size_bytes), is_part=True)
        tally.note(DEVICE, CHUNK, encoded(encoding, size_bytes), is_part=False)
    tally.note(HOST, CHUNK, encoded(Encoding.HALVES, 2000), is_part=True)
    tally.note(HOST, CHUNK, encoded(Encoding.PLAIN, 4000), is_part=False)
    assert tally.bits().compacted == pytest.approx((20.0, 20.0))
    assert tally.bits().plain == pytest.approx((16.0, 32.0))
