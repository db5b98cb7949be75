"""A Keras model trained by all workers: what ``distribute`` installs around it.

``fit`` gets this worker's part of the data and callbacks that make all workers take the same decisions; the backend
(``backend.py``) makes each train step exchange gradients; at the end of an epoch metrics are summed over the workers.
"""

from __future__ import annotations

import inspect
import logging
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import keras
import numpy as np

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import SummingChannel, as_tensor, check_alike, end_steps
from poseidon.errors import ConfigError, UnsupportedError
from poseidon.following.keras_rates import SEED_STRIDE
from poseidon.keras.backend import Backend, KerasExchange, Setup, load_backend
from poseidon.keras.batches import BatchDeal, unpack
from poseidon.keras.callbacks import with_ours
from poseidon.keras.inputs import deal_inputs, symbolic_batch
from poseidon.keras.sharing import add_up_metrics, mean_logs, share, state_of
from poseidon.keras.units import describe_model, find_units
from poseidon.planning.planner import Plan
from poseidon.team.epochs import refuse_elastic
from poseidon.team.team import Team

log = logging.getLogger("poseidon.keras")

_DISTRIBUTED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Models that are currently distributed."""


@dataclass(frozen=True)
class DistributeOptions:
    """The user's choices of how a model is distributed."""

    batch: Literal["per-worker", "total"] = "per-worker"
    """What a batch size counts: the samples of one worker, or of all workers together."""
    data: Literal["shard", "own"] = "shard"
    """Divide the data given to ``fit``, or take them as this worker's own part."""
    sync_batchnorm: bool | None = None
    """Moments over all workers in every BatchNormalization (True), in none, or in those made with synchronized=True."""
    exchange: ExchangeOptions = field(default_factory=ExchangeOptions)

    def __post_init__(self) -> None:
        for name, known in (("batch", ("per-worker", "total")), ("data", ("shard", "own"))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")


class Alone:
    """Stands in for :class:`Distribution` if there is only one worker."""

    rank = 0
    size = 1
    plan: Plan | None = None

    def summary(self) -> str:
        """Say in words how gradients travel."""
        return "one worker: nothing travels"

    def verify_replicas(self) -> None:
        """Do nothing: there is one."""

    def share_averages(self) -> None:
        """Do nothing: there is one."""

    def close(self) -> None:
        """Do nothing: the model was not changed."""


class Distribution:
    """One model distributed over the workers. The constructor is collective; :meth:`close` restores the model."""

    def __init__(self, model: Any, options: DistributeOptions) -> None:
        if model in _DISTRIBUTED:
            raise ConfigError(
                f"{model.name} is already distributed; first call close() on the object that distribute() returned"
            )
        refuse_elastic("a Keras model")
        self.model = model
        self._options = options
        self._team = Team(None, options.exchange.timeout_s)
        self._deal = BatchDeal(self._team.rank, self._team.size, options.batch == "total")
        self._backend: Backend | None = None
        self._exchange: KerasExchange | None = None
        self._attached: tuple[Any, ...] = ()
        self._moments: SummingChannel | None = None
        self._is_seeded = False
        self._is_evaluating = False
        self._is_fitting = False
        self._has_named = False
        self._originals: dict[str, Any] = {}
        _DISTRIBUTED.add(model)
        self._replace("fit", self._fit)
        self._replace("evaluate", self._evaluate)
        self._replace("train_on_batch", self._train_on_batch)
        self._replace("_get_metrics_result_or_logs", self._end_epoch)
        self._replace("_symbolic_build", self._symbolic_build)
        for name in ("save", "save_weights", "export"):
            self._replace(name, self._write)
        if getattr(model, "compiled", False) and model.built and model.optimizer is not None:
            try:
                self.attach()
            except BaseException:
                self.close()
                raise

    @property
    def rank(self) -> int:
        """The number of this worker."""
        return self._team.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._team.size

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step."""
        return None if self._exchange is None else self._exchange.plan

    def summary(self) -> str:
        """Say in words how gradients travel."""
        if self.plan is None or self._backend is None:
            return "no plan yet: the end of the first step makes it"
        return f"{self.plan}\nGradients travel {self._backend.timing}."

    def verify_replicas(self) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers hold the same weights. Collective."""
        from poseidon.team.verify import check_same_bits

        weights = [(v.path, as_tensor(keras.ops.convert_to_numpy(v).copy())) for v in self.model.weights]
        check_same_bits(self._team, weights)

    def share_averages(self) -> None:
        """Copy worker 0's moving averages to all workers, which ``fit`` does itself. Collective."""
        if self._exchange is not None and not self._is_fitting:
            share(self._team, self.model.non_trainable_weights, "the moving averages")

    def close(self) -> None:
        """Stop exchanging and restore the model."""
        self._detach()
        for name in self._originals:
            vars(self.model).pop(name, None)
        self._originals.clear()
        _DISTRIBUTED.discard(self.model)
        self._team.close()

    # Inside: installing the exchange.

    def attach(self) -> None:
        """Install the exchange for the model as it is now compiled, if it is not yet installed. Collective."""
        model = self.model
        backend = load_backend(model)
        backend.check(model)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        state = (model.optimizer, model.run_eagerly, *model.trainable_variables)
        if len(state) == len(self._attached) and all(a is b for a, b in zip(state, self._attached, strict=True)):
            return
        self._detach()
        self._backend = backend
        if not model.trainable_variables:
            raise UnsupportedError(f"{model.name} has no trainable variables: there is nothing to exchange")
        self._agree()
        self._exchange = backend.attach(self._setup(backend))
        self._attached = state

    def _setup(self, backend: Backend) -> Setup:
        model, options = self.model, self._options
        layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
        if options.sync_batchnorm is not None:
            layers = layers if options.sync_batchnorm else []
        else:
            layers = [layer for layer in layers if layer.synchronized]
        if layers and self._moments is None:
            self._moments = SummingChannel(self._team)
        units = find_units(model, backend.forms, backend.has_sparse_means)
        variables = model.trainable_variables
        return Setup(model, variables, units, self._team, options.exchange, layers, self._moments)

    def _agree(self) -> None:
        """Check that all workers hold the same model, copy worker 0's state, and give each its own random numbers."""
        check_alike(self._team, describe_model(self.model))
        share(self._team, state_of(self.model), "the initial state")
        if not self._is_seeded and self.rank > 0:
            for layer in self.model._flatten_layers():
                for generator in getattr(layer, "_seed_generators", ()):
                    state_now = keras.ops.convert_to_numpy(generator.state)
                    generator.state.assign((state_now + SEED_STRIDE * self.rank).astype(state_now.dtype))
        self._is_seeded = True

    def _detach(self) -> None:
        if self._exchange is not None:
            self._exchange.detach()
        self._exchange, self._attached = None, ()

    def _replace(self, name: str, ours: Callable[..., Any]) -> None:
        original = getattr(self.model, name)
        self._originals[name] = original
        setattr(self.model, name, lambda *args, **kwargs: ours(original, *args, **kwargs))

    # Inside: the replacements of the model's own methods.

    def _fit(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        settings = inspect.signature(original).bind(*args, **kwargs).arguments
        self.model._assert_compile_called("fit")
        # From the generator that keras.utils.set_random_seed seeds, so that a run can be repeated.
        seed = self._team.gather_ints([np.random.randint(2**31)], "the seed")[0][0]
        settings = deal_inputs(settings, self._deal, seed, is_own=self._options.data == "own")
        self._build(settings)
        self.attach()
        settings["callbacks"] = with_ours(settings.get("callbacks"), self._team)
        if self.rank > 0:
            settings["verbose"] = 0
        self._is_fitting = True
        try:
            return self._with_true_cause(lambda: original(**settings))
        finally:
            self._is_fitting = False

    def _build(self, settings: dict[str, Any]) -> None:
        """Create the variables of a model, or of its metrics, whose shapes follow from the first batch."""
        if self._is_complete() or (self.model.built and type(self.model).train_step is not keras.Model.train_step):
            return
        if self.model.built and isinstance(settings["x"], types.GeneratorType):
            return
        if type(self.model).call is keras.Model.call and self._has_built_layers():
            return  # it is never called, so it never counts as built
        load_backend(self.model).build(self.model, symbolic_batch(settings["x"], settings.get("y")))

    def _has_built_layers(self) -> bool:
        return all(layer.built for layer in self.model._flatten_layers(include_self=False))

    def _is_complete(self) -> bool:
        model = self.model
        parts = [*model._flatten_layers(), model._compile_metrics, model._compile_loss, model.optimizer]
        return all(part is None or part.built for part in parts)

    def _symbolic_build(self, original: Callable[..., Any], iterator: Any = None, data_batch: Any = None) -> Any:
        """Show Keras an unpacked batch when it creates variables from the first one."""
        if data_batch is None and not self._is_complete():
            _, _, data = next(iter(iterator))
            data_batch = data[0] if isinstance(data, list | tuple) else next(data)
        return original(iterator) if data_batch is None else original(data_batch=unpack(data_batch)[0])

    def _train_on_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        settings = inspect.signature(original).bind(*args, **kwargs).arguments
        if not self.model.built:
            self.model._symbolic_build(data_batch=(settings["x"], settings.get("y")))
        self.attach()
        return self._with_true_cause(lambda: original(*args, **kwargs))

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        settings = inspect.signature(original).bind(*args, **kwargs)
        if self.rank > 0:
            settings.arguments["verbose"] = 0
        self._is_evaluating = True
        try:
            return original(*settings.args, **settings.kwargs)
        finally:
            self._is_evaluating = False

    def _end_epoch(self, original: Callable[..., Any], logs: Any) -> Any:
        """Sum the metrics of an epoch, and copy worker 0's moving averages before any evaluation."""
        if not self._is_evaluating and self._exchange is not None:
            end_steps(self._team)
            self._name_assigned(share(self._team, self.model.non_trainable_weights, "the moving averages"))
            if keras.backend.backend() != "jax":  # which keeps the weights elsewhere until fit ends
                self.verify_replicas()
            add_up_metrics(self._team, self.model.metrics)
            found = original(logs)
            return mean_logs(self._team, found, self._exchange.share) if found is logs else found
        return original(logs)

    def _name_assigned(self, changed: list[Any]) -> None:
        """Say which variables, besides moving averages, a step has assigned from each worker's own samples."""
        layers = [layer for layer in self.model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
        averages = {id(variable) for layer in layers for variable in layer.variables}
        names = [variable.path for variable in changed if id(variable) not in averages]
        if names and not self._has_named and self.rank == 0:
            log.warning("%s: assigned from each worker's own samples; worker 0's value is kept", ", ".join(names[:3]))
        self._has_named = self._has_named or bool(names)

    def _write(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if self.rank == 0 else None

    def _with_true_cause(self, train: Callable[[], Any]) -> Any:
        """Raise an error of the exchange itself, not the framework's version of it."""
        try:
            return train()
        except Exception as error:
            cause = None if self._exchange is None else self._exchange.error
            if cause is None or cause is error:
                raise
            raise cause from error
