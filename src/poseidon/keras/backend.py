"""The contract of a Keras backend for ``poseidon.keras``: one small protocol, one file per backend.

``distribution.py`` calls it. Only the backend knows how its framework computes gradients, and so where the exchange can
happen; everything else (data, metrics, callbacks, files) is the same for all backends.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

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
    """The input of a backend."""

    model: Any
    """A compiled and built ``keras.Model``; its optimizer is built too."""
    variables: Sequence[Any]
    """``model.trainable_variables``, each once; the units' positions index into it."""
    units: Sequence[OutsideUnit]
    """Built from the layers, in forms that the backend can deliver."""
    team: Team
    options: ExchangeOptions
    synchronized: Sequence[Any]
    """BatchNormalization layers whose moments span the samples of all workers."""
    moments: SummingChannel | None
    """The channel that sums those moments; None without such layers."""


class KerasExchange(Protocol):
    """The exchange of one model's gradients, installed in the model."""

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""

    @property
    def error(self) -> BaseException | None:
        """The exception raised inside the framework's own machinery, which only passes on its text."""

    @property
    def share(self) -> float:
        """The part of this worker in the samples of the last step."""

    def detach(self) -> None:
        """Restore model, layers and optimizer and close the engine, but not the team."""


class Backend(Protocol):
    """One of Keras' backends."""

    forms: frozenset[Kind]
    """Forms besides ``dense`` in which it can deliver this model's gradients."""
    has_sparse_means: bool
    """Whether the optimizer can take an embedding's mean as rows."""
    timing: str
    """When gradients travel, as the plan prints it: "during backward", "after backward: the step is compiled"."""

    def check(self, model: Any) -> None:
        """Raise :class:`~poseidon.errors.UnsupportedError`, with a remedy, if the model cannot be distributed."""

    def build(self, model: Any, batch: Any) -> None:
        """Create the variables of a model whose shapes follow from a batch; ``batch`` has shapes and types only."""

    def attach(self, setup: Setup) -> KerasExchange:
        """Make every train step of the model exchange gradients. Collective."""


def check_alone() -> None:
    """Raise if Keras itself distributes."""
    active = keras.distribution.distribution()
    if active is not None:
        raise UnsupportedError(
            f"keras.distribution.{type(active).__name__} is active; leave out keras.distribution.set_distribution: "
            "Poseidon runs one worker per device"
        )


def load_backend(model: Any) -> Backend:
    """Return the backend that Keras uses, for a compiled model."""
    name = keras.backend.backend()
    if name not in _MODULES:
        raise unknown_name("Keras backend", name, tuple(_MODULES))
    made: Backend = importlib.import_module(_MODULES[name]).make_backend(model)
    return made


def refuse_own_loop(model: Any) -> NoReturn:
    """Raise the error for a distributed model whose optimizer is called outside of its train step."""
    raise UnsupportedError(
        f"{model.name} is distributed, but its optimizer was called outside of fit() and train_on_batch(), which alone "
        "exchange gradients: every worker would train by itself. Put the loop's work into the model's train_step, or "
        "run a loop on a model that is not distributed with `poseidon run --auto`"
    )
