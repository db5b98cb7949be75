import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import ConfigError
from poseidon.wire.cap import FRAMING, TokenBucket

RATE = 200.0
BYTES_PER_S = RATE * 1e6 / 8


def send_all(bucket, sizes, now_s=0.0):
    """Send as soon as the bucket lets; return when the last one left."""
    for size in sizes:
        while wait_s := bucket.wait_s(now_s):
            now_s += wait_s
        bucket.charge(size, now_s)
    return now_s


@given(st.lists(st.integers(1, 4 << 20), min_size=1, max_size=60))
def test_the_average_stays_under_the_cap_whatever_the_sizes(sizes):
    took_s = send_all(TokenBucket(RATE, 0.0), sizes)
    # All but the last had to be paid for, apart from what was saved up at the start.
    assert took_s >= sum(sizes[:-1]) * FRAMING / BYTES_PER_S - 0.02 - 1e-9
    assert took_s <= sum(sizes[:-1]) * FRAMING / BYTES_PER_S + len(sizes) * 1e-6


def test_idle_time_is_saved_up_for_a_moment_only():
    bucket = TokenBucket(RATE, 0.0)
    bucket.charge(1 << 20, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx((1 << 20) * FRAMING / BYTES_PER_S - 0.02)
    assert bucket.wait_s(60.0) == 0
    assert send_all(bucket, [1000] * 1000, 60.0) == pytest.approx(60 + 1e6 * FRAMING / BYTES_PER_S - 0.02, abs=1e-3)


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_a_cap_that_lets_nothing_through_is_refused(rate):
    with pytest.raises(ConfigError, match="lets nothing through"):
        TokenBucket(rate, 0.0)
