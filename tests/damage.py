"""Valid content made invalid, for readers that must refuse it: at random, but always the same examples by day."""

from __future__ import annotations

import contextlib
import json
import resource
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import nightly
from poseidon.errors import PoseidonError

EXTREMES = (0, 1, 0x7F, 0xFF, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
"""Numbers that a reader is likely to believe and must not."""
ODD_VALUES = (None, True, -1, 0, 2**31, 10**30, -0.5, float("nan"), float("inf"), "", "x", "\0", "=", "\ud800")
ODD_VALUES += ([], {}, [[]], [-1], {"x": -1}, "9" * 5000, "²")
MEMORY_BYTES = 3 << 30
"""How much memory a reader may ask for beyond what the process has."""
SECONDS = 5.0
"""How much processor time one example may take."""


def fuzz(examples, night=5000):
    """Settings of a test with a fixed number of examples: the same ones by day, others every night."""
    return settings(
        max_examples=nightly.amount(examples, night),
        deadline=None,
        derandomize=not nightly.IS_NIGHT,
        # A reader does not change what the fixtures made, so they serve all examples.
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
    )


@st.composite
def damaged(draw, content):
    """Bytes with flipped bits, extreme numbers, parts that were cut off, taken out or copied elsewhere."""
    out = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        if not out:
            break
        place = draw(st.integers(0, len(out) - 1))
        length = draw(st.integers(1, 64))
        match draw(st.sampled_from(["flip", "number", "cut", "remove", "splice"])):
            case "flip":
                out[place] ^= 1 << draw(st.integers(0, 7))
            case "number":
                width = draw(st.sampled_from([1, 2, 4, 8]))
                value = draw(st.sampled_from(EXTREMES)) % (1 << 8 * width)
                out[place : place + width] = value.to_bytes(width, "little")
            case "cut":
                del out[place:]
            case "remove":
                del out[place : place + length]
            case "splice":
                source = draw(st.integers(0, len(out) - 1))
                out[place : place + length] = out[source : source + length]
    return bytes(out)


@st.composite
def odd_json(draw, data):
    """Plain data in which one value is replaced, left out or nested deeply; sometimes its bytes are damaged instead."""
    text = json.dumps(data)
    if draw(st.integers(0, 4)) == 0:
        return draw(damaged(text.encode()))
    data = json.loads(text)
    places = list(_places(data))
    for container, key in draw(st.lists(st.sampled_from(places), min_size=1, max_size=2, unique_by=str)):
        with contextlib.suppress(KeyError, IndexError):
            match draw(st.sampled_from(["replace", "replace", "remove", "deep"])):
                case "replace":
                    container[key] = draw(st.sampled_from(ODD_VALUES))
                case "remove":
                    del container[key]
                case "deep":
                    container[key] = "@deep@"
    deep = "[" * 100_000
    return json.dumps(data).replace('"@deep@"', deep).encode()


def _places(data):
    pairs = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in list(pairs):
        yield data, key
        yield from _places(value)


@contextlib.contextmanager
def only_refused():
    """Let a block succeed or raise an error of ours, within bounds of memory and time; anything else is a defect."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    began = time.process_time()
    try:
        with contextlib.suppress(PoseidonError):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - began < SECONDS
