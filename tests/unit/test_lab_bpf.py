"""The lab's programs for packets, as instructions."""

import struct

import pytest

from poseidon.errors import ConfigError
from poseidon.lab import bpf


def run(program: bytes, drawn: int) -> int:
    """Run a program of few instructions, with what the kernel's random numbers give; return what it says."""
    result, place = None, 0
    while True:
        code, registers, offset, value = struct.unpack_from("<BBhi", program, 8 * place)
        assert registers == 0
        place += 1
        if code == 0x85:
            assert value == 7
            result = drawn
        elif code == 0x36:
            place += offset if result >= value % 2**32 else 0
        elif code == 0xB7:
            result = value
        else:
            assert code == 0x95
            return result


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5, 0.9])
def test_a_lossy_link_drops_the_share_of_what_is_drawn(share):
    program = bpf._assemble(bpf.losing(share))
    draws = range(0, 2**32, 2**32 // 9999)
    dropped = sum(run(program, drawn) == 2 for drawn in draws)
    assert dropped / len(draws) == pytest.approx(share, abs=2e-4)
    assert {run(program, drawn) for drawn in (0, 2**32 - 1)} == {2, -1}


@pytest.mark.parametrize("share", [0.0, -0.1, 1.0, 2.0])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        bpf.losing(share)
