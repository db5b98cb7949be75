"""What earlier runs chose, in the user's cache folder: a later run of the same job need not try plans again.

Only rank 0 reads and writes; it tells the others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.planning.cluster import Cluster
from poseidon.units import Load, Unit

FORMAT = "poseidon-choice-1"
_LOAD_STEP, _RATE_STEP = 1.25, 2.0
"""Loads and measured link speeds that differ by less than about these factors count as equal."""


_FILLED_STEPS = 4
"""Between factors that are all zero and factors without a zero."""


def cache_folder() -> Path:
    """Return where choices are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError:  # a container whose user has no home
            base = tempfile.gettempdir()
    return Path(base) / "poseidon" / "choices"


def describe_job(units: Sequence[Unit], loads: Mapping[str, Load], cluster: Cluster, others: Mapping[str, Any]) -> str:
    """Return a digest of everything that a choice depends on; ``others`` is plain data, such as versions."""
    words = {
        "units": [(u.name, u.kind, u.is_sparse, [(p.shape, p.itemsize) for p in u.parameters]) for u in units],
        "loads": {
            name: (_coarse(load.rows, _LOAD_STEP), load.value_bytes, round(_FILLED_STEPS * load.filled))
            for name, load in sorted(loads.items())
        },
        "cluster": [cluster.machines, cluster.workers_per_machine],
        "links": [
            _coarse(link.bits_per_s, _RATE_STEP) for link in (cluster.between, cluster.inside, cluster.combining)
        ],
        **others,
    }
    return hashlib.sha256(json.dumps(words, sort_keys=True).encode()).hexdigest()[:32]


def _coarse(value: float, step: float) -> int:
    return round(math.log(value, step)) if value > 0 else -1


class Choices:
    """The file with one job's choice; :attr:`key` names it."""

    def __init__(self, folder: Path, reads: bool = True) -> None:
        self.key = ""
        self._folder = folder
        self._reads = reads

    @property
    def path(self) -> Path:
        """The file."""
        return self._folder / f"{self.key}.json"

    def read(self) -> dict[str, Any] | None:
        """Return what was chosen: the plan's name, and what was tried; None if nothing useful is stored."""
        if not self._reads:
            return None
        try:
            if not self.path.exists():
                return None
            data = files.read_json(self.path, "stored choice")
            if data["format"] != FORMAT:
                return None
            return {"name": str(data["name"]), "tried": [_tried(one) for one in data["tried"]]}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            warnings.warn(
                f"the stored choice {self.path} cannot be used ({error!r}); plans are tried anew", stacklevel=2
            )
            return None

    def write(self, choice: Mapping[str, Any]) -> None:
        """Store a choice; a folder that cannot be written costs a later run its trial again, nothing else."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.write_json(self.path, {"format": FORMAT, **choice}, "choice of a plan")
        except (OSError, ConfigError) as error:
            warnings.warn(f"the choice of a plan cannot be stored in {self._folder} ({error})", stacklevel=2)


def _tried(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return one plan that was tried, or raise if it is not what :meth:`Choices.write` stores."""
    times = [one["predicted_s"], *([] if one["measured_s"] is None else [one["measured_s"]])]
    if not all(isinstance(time, int | float) and 0 <= time < math.inf for time in times):
        raise ValueError(f"times of a plan are {times}, expected seconds")
    return {"name": str(one["name"]), "predicted_s": one["predicted_s"], "measured_s": one["measured_s"]}
