"""How busy a GPU is, asked of a stand-in for the driver's library."""

from __future__ import annotations

from typing import Any

import pytest

from poseidon.observe.gpu import UNKNOWN, GpuGauge

UUID = "GPU-7d2b1e4c"


class Driver:
    """Knows one GPU, which is at 37 %."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's names
        return int(self._failing == "init")

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:  # noqa: N802
        if uuid.decode() != UUID:
            return 6
        handle._obj.value = 4711
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, found: Any) -> int:  # noqa: N802
        if self._failing == "rates":
            return 3
        assert handle.value == 4711
        found._obj.gpu, found._obj.memory = 37, 12
        return 0


def test_the_drivers_library_tells_how_busy_a_gpu_is() -> None:
    assert GpuGauge(UUID, lambda _: Driver()).share_used() == pytest.approx(0.37)


@pytest.mark.parametrize("failing", ["init", "rates"])
def test_what_the_driver_does_not_say_is_unknown(failing: str) -> None:
    assert GpuGauge(UUID, lambda _: Driver(failing)).share_used() == UNKNOWN


def test_another_gpu_and_no_driver_are_unknown() -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    assert GpuGauge("GPU-other", lambda _: Driver()).share_used() == UNKNOWN
    assert GpuGauge(UUID, missing).share_used() == UNKNOWN
    assert GpuGauge(UUID, lambda _: object()).share_used() == UNKNOWN
