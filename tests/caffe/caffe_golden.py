"""Golden cases: folders that say what Caffe 1.0 does, each replayed on a copy."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"


def case_names(kind: str) -> list[str]:
    return sorted(path.name for path in (GOLDENS / kind).iterdir() if path.is_dir())


@dataclass
class Case:
    """One case; the working directory is a copy of its folder while a test runs."""

    kind: str
    name: str
    meta: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.meta = json.loads((GOLDENS / self.kind / self.name / "case.json").read_text())

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load("data.npz") as stored:
            return {key: stored[key] for key in stored.files}

    def expected(self) -> Any:
        return json.loads(Path("expected.json").read_text())

    def check(self, what: str, got: Any, want: Any, **tolerance: float) -> None:
        limits = {"rtol": 1e-4, "atol": 1e-5} | self.meta.get("tolerance", {}) | tolerance
        got, want = np.asarray(got), np.asarray(want)
        assert got.shape == want.shape, f"{what}: shape {got.shape}, Caffe gives {want.shape}"
        np.testing.assert_allclose(got, want, rtol=limits["rtol"], atol=limits["atol"], err_msg=what)


def set_params(net: Any, arrays: dict[str, np.ndarray], prefix: str) -> None:
    for key, value in arrays.items():
        if key.startswith(prefix):
            layer, number = key[len(prefix) :].split("/")
            net.params[layer][int(number)].data[...] = value


def check_params(case: Case, net: Any, arrays: dict[str, np.ndarray], prefix: str, side: str = "data") -> None:
    for key, value in arrays.items():
        if key.startswith(prefix):
            layer, number = key[len(prefix) :].split("/")
            case.check(key, getattr(net.params[layer][int(number)], side), value)
