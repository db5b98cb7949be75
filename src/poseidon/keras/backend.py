"""What a Keras backend must do for ``poseidon.keras``: one small contract, one file per backend.

``distribution.py`` calls it. The backend alone knows how its framework makes gradients, and so where the exchange can
happen; everything else (data, metrics, callbacks, files) is the same for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import OutsideUnit, SummingChannel
from poseidon.errors import UnsupportedError, unknown_name
from poseidon.planning.planner import Plan
from poseidon.team.team import Team
from poseidon.units import Kind

_MODULES = {
    "tensorflow": "poseidon.keras.tensorflow_backend",
    "torch": "poseidon.keras.torch_backend",
    "jax": "poseidon.keras.jax_backend",
}


@dataclass(frozen=True)
class Setup:
    """What a backend is given to work on."""

    model: Any
    """A compiled and built ``keras.Model``; its optimizer is built too."""
    variables: Sequence[Any]
    """``model.trainable_variables``, each once; positions in the units count here."""
    units: Sequence[OutsideUnit]
    """Made from the layers, in forms that the backend says it can deliver."""
    team: Team
    options: ExchangeOptions
    synchronized: Sequence[Any]
    """BatchNormalization layers that are to take their moments over the samples of all workers."""
    moments: SummingChannel | None
    """Where those moments are summed; None if there are no such layers."""


class Exchange(Protocol):
    """The exchange of one model's gradients, in place."""

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""

    @property
    def error(self) -> BaseException | None:
        """What went wrong inside the framework's own machinery, which would only show its text."""

    def detach(self) -> None:
        """Give model, layers and optimizer back as they were and end the engine, but not the team."""


class Backend(Protocol):
    """One of Keras' backends."""

    forms: frozenset[Kind]
    """Forms in which it can deliver this model's gradients besides ``dense``."""
    has_sparse_means: bool
    """Whether the optimizer can take an embedding's mean as rows."""
    timing: str
    """When gradients travel, in words for the plan: "during backward", "after backward: the step is compiled"."""

    def check(self, model: Any) -> None:
        """Raise :class:`~poseidon.errors.UnsupportedError`, saying what to do, if the model cannot be distributed."""

    def attach(self, setup: Setup) -> Exchange:
        """Make every train step of the model exchange gradients. Collective."""


def check_alone(model: Any) -> None:
    """Raise if Keras distributes by itself, or if gradients would reach an optimizer that nobody watches."""
    active = keras.distribution.distribution()
    if active is not None:
        raise UnsupportedError(
            f"keras.distribution.{type(active).__name__} is active; leave out keras.distribution.set_distribution: "
            "Poseidon runs one worker per device"
        )
    others = [
        name
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer) and value is not model.optimizer
    ]
    if others:
        raise UnsupportedError(
            f"{model.name} has optimizers besides its compiled one: {', '.join(sorted(others))}. Only gradients of "
            "model.optimizer are averaged; train each part as a model of its own and distribute each"
        )


def load_backend(model: Any) -> Backend:
    """Return the one that Keras uses, made for a compiled model."""
    name = keras.backend.backend()
    if name not in _MODULES:
        raise unknown_name("Keras backend", name, tuple(_MODULES))
    made: Backend = importlib.import_module(_MODULES[name]).make_backend(model)
    return made
