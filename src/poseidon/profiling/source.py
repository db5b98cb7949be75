"""From a user's description (a network, a callable, a prototxt, a profile) to a profile."""

from __future__ import annotations

import difflib
import functools
import importlib
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.planning.profile import Profile
from poseidon.planning.table import format_bytes

DEFAULT_BATCH = 32
RATE_ROUNDS = 9
"""How often a device's matrix rate is measured, to see how much it varies."""


@dataclass(frozen=True)
class ProfileSource:
    """A model and the device that will train it."""

    model: str
    """A network of the zoo, ``module:callable``, a prototxt, or a profile's JSON file."""
    batch: int | None = None
    """Samples per worker; None: the profile's own, or 32."""
    profile: Path | None = None
    """A profile of the model, whose times replace the estimate."""
    flops: float | None = None
    """The device's matrix rate; None: that of this machine's device, measured."""
    is_measured: bool = False
    """Train a few steps here and time every unit."""

    def __post_init__(self) -> None:
        if self.batch is not None and self.batch < 1:
            raise ConfigError(f"--batch is {self.batch}; it must be at least 1")
        if self.flops is not None and not self.flops > 0:
            raise ConfigError(f"the device's matrix rate is {self.flops} flop/s; it must be positive")
        if self.profile is not None and self.is_measured:
            raise ConfigError("a profile is either read (--profile) or measured (--measure), not both")


def find_profile(source: ProfileSource) -> Profile:
    """Return the profile of a source."""
    if source.model.endswith(".json"):
        profile = Profile.load_file(source.model)
        return profile.with_batch(source.batch or profile.batch)
    if source.profile is not None:
        profile = Profile.load_file(source.profile)
        profile.check_model(_units_of(source))
        return profile.with_batch(source.batch or profile.batch)
    batch = source.batch or DEFAULT_BATCH
    if source.model.endswith(".prototxt"):
        from poseidon.profiling.prototxt import profile_prototxt

        return profile_prototxt(source.model, batch, device_flops(source), source.is_measured)
    return _measured(source, batch) if source.is_measured else _estimated(source, batch)


def device_flops(source: ProfileSource) -> float:
    """Return the device's matrix rate: the given one, or that of this machine's GPU or CPU."""
    if source.flops is not None:
        return source.flops
    return statistics.median(device_rates())


@functools.cache
def device_rates() -> tuple[float, ...]:
    """Return the matrix rate of this machine's device, measured some times; once in a process."""
    import torch

    from poseidon.team.calibrate import measure_rates

    return tuple(measure_rates(torch.device(device_here()), RATE_ROUNDS))


def device_here() -> str:
    """Return the name of the device on which models train here."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _measured(source: ProfileSource, batch: int) -> Profile:
    from poseidon.profiling.measuring import moved_to, profile_model

    model, inputs = load_model(source.model, batch)
    model, inputs = moved_to(model, inputs, device_here())
    return profile_model(model.train(), inputs, name=source.model, batch=batch)


def _estimated(source: ProfileSource, batch: int) -> Profile:
    from poseidon.profiling.measuring import estimate_profile

    model, inputs = _on_meta(source.model, batch)
    return estimate_profile(model, inputs, name=source.model, batch=batch, flops=device_flops(source))


def _units_of(source: ProfileSource) -> list[Any]:
    if source.model.endswith(".prototxt"):
        from poseidon.profiling.prototxt import profile_prototxt

        return profile_prototxt(source.model, 1, 1e9).specs
    from poseidon.engine.discover import find_units

    model, _ = _on_meta(source.model, source.batch or DEFAULT_BATCH)
    return [unit.spec for unit in find_units(model)]


def _on_meta(name: str, batch: int) -> tuple[Any, Any]:
    """Return model and inputs on the meta device: building a network of the zoo then takes no time."""
    import torch

    from poseidon import zoo
    from poseidon.profiling.measuring import on_meta

    if name not in zoo.names() and not zoo.is_borrowed(name):
        return on_meta(*load_model(name, batch))
    with torch.device("meta"):
        network = zoo.build(name)
    return network.model, tuple(part.to("meta") for part in _draw(network, name, batch))


def _draw(network: Any, name: str, batch: int) -> tuple[Any, ...]:
    """Return a batch of inputs of a network of the zoo."""
    needed = batch * sum(part.nbytes for part in network.batch(1)[0])
    if needed > (most := files.memory_bytes()):
        raise ConfigError(
            f"--batch is {batch}: so many samples of {name} take {format_bytes(needed)} and this machine has "
            f"{format_bytes(most)}; choose a smaller batch"
        )
    inputs: tuple[Any, ...] = network.batch(batch)[0]
    return inputs


def load_model(name: str, batch: int) -> tuple[Any, Any]:
    """Return the model and one worker's inputs for a network of the zoo or a ``module:callable``."""
    from poseidon import zoo

    if name in zoo.names() or zoo.is_borrowed(name):
        network = zoo.build(name)
        return network.model, _draw(network, name, batch)
    module_name, _, attribute = name.partition(":")
    if not attribute or not module_name or module_name.startswith("."):
        near = difflib.get_close_matches(name, zoo.names(), n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"{meant}{name!r} is neither module:callable nor a .prototxt nor a profile's .json nor in the zoo; "
            f"the zoo has {', '.join(zoo.names())}"
        )
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        file = module_name.endswith(".py") and Path(module_name).is_file()
        hint = f"; a module is named without its .py: {module_name[:-3]}:{attribute}" if file else ""
        raise ConfigError(f"cannot load {name}: {error}{hint}") from error
    if not callable(make):
        raise ConfigError(f"{name} is a {type(make).__name__}, expected a callable that takes the batch size")
    made = make(batch)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ConfigError(f"{name}({batch}) returned {type(made).__name__}, expected (model, inputs)")
    return made
