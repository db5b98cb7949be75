"""Shorter forms of rows and factors hold all bits, and are left alone where they would save little."""

from __future__ import annotations

import pytest
import torch

from poseidon.routes import shortening
from poseidon.routes.shortening import drop_zeros, find_repeats, restore_zeros


@pytest.fixture(params=["memory", "device"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for repeated rows as in host memory, or as on a device."""
    if request.param == "device":
        monkeypatch.setattr(shortening, "_repeats_in_memory", shortening._repeats_on_device)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_repeated_rows_are_found_by_their_bits(dtype: torch.dtype) -> None:
    once = torch.randn(5, 12).to(dtype)
    once[0, 0], once[1, 0], once[2], once[3] = torch.nan, torch.inf, 0.0, -0.0
    values = once[torch.tensor([4, 0, 1, 1, 2, 3, 0, 0, 4, 2, 3, 1])]
    found = find_repeats(values)
    assert found is not None
    distinct, which = found
    assert distinct.shape == (5, 12)  # 0 and -0 are not the same
    assert torch.equal(distinct[which.long()].view(torch.uint8), values.view(torch.uint8))


@pytest.mark.usefixtures("where")
def test_rows_that_are_mixed_to_the_same_number_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortening, "_MIXER", shortening._MIXER * 0)
    shortening._mixer.cache_clear()
    try:
        assert find_repeats(torch.randn(2, 8).repeat(20, 1)) is None
        same = find_repeats(torch.ones(20, 8))
        assert same is not None
        assert same[0].shape == (1, 8)
    finally:
        shortening._mixer.cache_clear()


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("rows", [torch.randn(40, 8), torch.randn(1, 8), torch.randn(0, 8), torch.zeros(40, 3)])
def test_rows_that_hardly_repeat_stay_as_they_are(rows: torch.Tensor) -> None:
    assert find_repeats(rows) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [16, 1001])
def test_zeros_come_back(dtype: torch.dtype, count: int) -> None:
    values = torch.where(torch.arange(count) % 3 == 0, torch.randn(count), 0.0).to(dtype)
    values[3], values[6], values[9] = torch.nan, -0.0, torch.inf
    data = values.view(torch.uint8)
    short = drop_zeros(data, dtype.itemsize)
    assert short is not None
    assert short.numel() < 0.8 * data.numel()
    assert torch.equal(restore_zeros(short, data.numel(), dtype.itemsize), data)
    # Inside a message it may begin anywhere.
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), short])[1:]
    assert torch.equal(restore_zeros(shifted, data.numel(), dtype.itemsize), data)


def test_zeros_only() -> None:
    data = torch.zeros(4000, dtype=torch.uint8)
    short = drop_zeros(data, 4)
    assert short is not None
    assert short.numel() == 125
    assert torch.equal(restore_zeros(short, 4000, 4), data)


@pytest.mark.parametrize(("data", "itemsize"), [(torch.ones(400), 4), (torch.zeros(0), 4), (torch.zeros(400), 16)])
def test_values_that_are_not_zero_stay_as_they_are(data: torch.Tensor, itemsize: int) -> None:
    assert drop_zeros(data.view(torch.uint8), itemsize) is None


def test_a_form_of_another_size_is_refused() -> None:
    short = drop_zeros(torch.zeros(4000, dtype=torch.uint8), 4)
    assert short is not None
    for size_bytes, data in [(4000, torch.cat([short, short])), (40, short), (4002, short)]:
        with pytest.raises(ValueError, match="without their zeros"):
            restore_zeros(data, size_bytes, 4)
