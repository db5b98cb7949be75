"""Compute time of each unit of a model, on one worker with one batch: the input of plans and simulations.

A profile is measured on a real device or estimated from operation counts (``profiling/``) and saved as a small,
portable JSON file. Pure: no tensors here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from poseidon import files
from poseidon.errors import ConfigError, unknown_name
from poseidon.units import Kind, Load, ParameterSpec, Unit

FORMAT = "poseidon-profile-1"
_MOST_VALUES = 1 << 50
"""More values than any model has; figures from larger ones would not fit a float."""
_MOST_ITEM_BYTES = 16
_LONGEST_S = 1e9


@dataclass(frozen=True)
class UnitProfile:
    """One unit: what it exchanges and how long it computes."""

    unit: Unit
    load: Load | None
    """None for dense units, and where no forward reached the unit."""
    forward_s: float
    """From the unit's first use in forward to the next unit's, including modules without parameters in between."""
    backward_s: float
    """From the previous unit's gradients to this one's."""


@dataclass(frozen=True)
class Profile:
    """All units of a model, and when they are needed and ready."""

    model: str
    device: str
    batch: int
    units: tuple[UnitProfile, ...]
    """In the model's order, which is the engine's."""
    forward_order: tuple[int, ...]
    """Numbers of units in the order in which forward first needs them."""
    ready_order: tuple[int, ...]
    """Numbers of units in the order in which their gradients become final."""
    update_s: float
    """The optimizer's step."""
    memory_bytes: int = 0
    """Peak device memory; 0 if not measured."""
    issue_s: float = 0.0
    """Host time to issue one unit's forward to the device, on average; 0 if not measured, or if the host computes."""
    source: str = "measured"
    """Where the times come from: measured, estimated, scaled; shown with predictions."""

    def __post_init__(self) -> None:
        _check_whole(f"profile of {self.model}: batch", self.batch, 1, _MOST_VALUES)
        _check_count(f"profile of {self.model}: memory_bytes", self.memory_bytes)
        if not self.units:
            raise ConfigError(f"profile of {self.model}: there are no units, so there is nothing to exchange")
        everybody = list(range(len(self.units)))
        for name in ("forward_order", "ready_order"):
            if sorted(getattr(self, name)) != everybody:
                raise ConfigError(f"profile of {self.model}: {name} must name each of {len(everybody)} units once")
        for one in self.units:
            for name in ("forward_s", "backward_s"):
                _check_time(f"profile of {self.model}: {name} of {one.unit.name}", getattr(one, name))
        for name in ("update_s", "issue_s"):
            _check_time(f"profile of {self.model}: {name}", getattr(self, name))

    @property
    def forward_s(self) -> float:
        """The whole forward."""
        return sum(one.forward_s for one in self.units)

    @property
    def backward_s(self) -> float:
        """The whole backward."""
        return sum(one.backward_s for one in self.units)

    @property
    def step_s(self) -> float:
        """A step of one worker alone."""
        return self.forward_s + self.backward_s + self.update_s

    @property
    def specs(self) -> list[Unit]:
        """The units, as input for the planner."""
        return [one.unit for one in self.units]

    @property
    def loads(self) -> dict[str, Load]:
        """The loads, as input for the planner."""
        return {one.unit.name: one.load for one in self.units if one.load is not None}

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(one.unit.size_bytes for one in self.units)

    def scaled_to(self, step_s: float) -> Profile:
        """Return a profile scaled to a step of ``step_s``: for another device, or a shared one."""
        if not 0 < step_s < math.inf:
            raise ConfigError(f"a step takes a positive time, not {step_s} s")
        if not self.step_s:
            raise ConfigError(f"profile of {self.model}: its times are all 0, so they cannot be scaled; measure it")
        factor = step_s / self.step_s
        return replace(self, units=self._stretched(factor), update_s=self.update_s * factor)

    def with_batch(self, batch: int) -> Profile:
        """Return a profile for another batch: passes and loads scale with it, the update does not."""
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be at least 1")
        if batch == self.batch:
            return self
        factor = batch / self.batch
        units = tuple(replace(one, load=_grown(one, factor)) for one in self._stretched(factor))
        return replace(self, batch=batch, units=units, source=f"{self.source}, scaled from batch {self.batch}")

    def check_model(self, units: Sequence[Unit]) -> None:
        """Raise :class:`ConfigError` unless the profile is of a model with exactly these units."""
        mine = {one.unit.name: one.unit for one in self.units}
        theirs = {unit.name: unit for unit in units}
        for name in mine:
            if name not in theirs:
                known = ", ".join(list(theirs)[:6])
                raise ConfigError(
                    f"the profile of {self.model} has a unit {name!r} that the model lacks; the model's are {known}, "
                    "...; measure a profile of this model"
                )
        for name, unit in theirs.items():
            if name not in mine:
                raise ConfigError(f"the profile of {self.model} lacks the model's unit {name!r}; measure a new one")
            if [p.shape for p in unit.parameters] != [p.shape for p in mine[name].parameters]:
                seen, expected = ([p.shape for p in each.parameters] for each in (mine[name], unit))
                raise ConfigError(f"unit {name!r} has shapes {seen} in the profile of {self.model}, not {expected}")

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file that :meth:`load_file` reads."""
        files.write_json(path, {"format": FORMAT, **self.to_dict()}, "profile")

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` reads back."""
        return asdict(self)

    @classmethod
    def load_file(cls, path: str | Path) -> Profile:
        """Read a profile from a JSON file."""
        data = files.read_json(path, "profile")
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ConfigError(f'{path} is not a profile: it lacks "format": "{FORMAT}"')
        return cls.from_dict(data, origin=f"profile {path}")

    @classmethod
    def from_dict(cls, data: dict[str, Any], origin: str = "profile") -> Profile:
        """Build a profile from plain data."""
        try:
            units = tuple(_unit_from_dict(one) for one in data["units"])
            orders = {name: tuple(data[name]) for name in ("forward_order", "ready_order")}
            return cls(**{**data, "units": units, **orders})
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{origin} does not have the expected form ({type(error).__name__}: {error})") from error

    def _stretched(self, factor: float) -> tuple[UnitProfile, ...]:
        return tuple(
            replace(one, forward_s=one.forward_s * factor, backward_s=one.backward_s * factor) for one in self.units
        )


def _grown(one: UnitProfile, factor: float) -> Load | None:
    if one.load is None:
        return None
    load = one.load.scaled(factor)
    if one.unit.kind == "embedding":
        load = replace(load, rows=min(load.rows, one.unit.matrix[0]))
    if one.unit.kind == "tied":
        load = replace(load, touched=min(load.touched, one.unit.matrix[0]))
    return load


def _check_time(what: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and 0 <= value <= _LONGEST_S):
        raise ConfigError(f"{what} is {value!r}; a time must be a number of seconds from 0 to {_LONGEST_S:g}")


def _unit_from_dict(data: dict[str, Any]) -> UnitProfile:
    unit, where = data["unit"], f"unit {data['unit']['name']!r}"
    parameters = tuple(_parameter_from_dict(one, where) for one in unit["parameters"])
    kind = unit["kind"]
    if kind not in get_args(Kind):
        raise unknown_name(f"kind of {where}", str(kind), get_args(Kind))
    if not parameters or (kind != "dense" and len(parameters[0].shape) != 2):
        shapes = [one.shape for one in parameters]
        raise ConfigError(
            f"{where} has parameters of shapes {shapes}; a {kind} one has a matrix first, or any if dense"
        )
    load = None if data["load"] is None else Load(**data["load"])
    if load is not None:
        for name in ("rows", "touched", "bags"):
            _check_count(f"{name} of {where}", getattr(load, name))
        _check_count(f"filled of {where}", load.filled, most=1)
        _check_whole(f"value_bytes of {where}", load.value_bytes, 1, _MOST_ITEM_BYTES)
    made = Unit(str(unit["name"]), kind, parameters, bool(unit["is_sparse"]), bool(unit.get("is_served", True)))
    return UnitProfile(made, load, data["forward_s"], data["backward_s"])


def _parameter_from_dict(data: dict[str, Any], where: str) -> ParameterSpec:
    what = f"{data['name']!r} of {where}"
    shape = tuple(data["shape"])
    for size in shape:
        _check_whole(f"shape {shape} of parameter {what}", size, 0, _MOST_VALUES)
    _check_whole(f"itemsize of parameter {what}", data["itemsize"], 1, _MOST_ITEM_BYTES)
    _check_whole(f"the number of values of parameter {what}", math.prod(shape), 0, _MOST_VALUES)
    return ParameterSpec(str(data["name"]), shape, data["itemsize"])


def _check_whole(what: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{what} is {value!r}, expected a whole number from {least} to {most}")


def _check_count(what: str, value: Any, most: int = _MOST_VALUES) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise ConfigError(f"{what} is {value!r}, expected a number from 0 to {most}")
