"""Gradients of one tree of parameters, averaged over all workers, inside and outside ``jit``."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from poseidon.engine.assemble import ExchangeOptions
from poseidon.engine.outside import Array, OutsideFrontEnd, OutsideUnit, SummingChannel
from poseidon.errors import ConfigError
from poseidon.jax.callbacks import HostCallbacks
from poseidon.jax.short_forms import ShortForm, agree_on_forms, find_forms, run_tapped, trace_function
from poseidon.jax.trees import check_like, describe_leaves, name_leaves, take_tree
from poseidon.planning.planner import Plan
from poseidon.routes import standard_routes
from poseidon.team.epochs import refuse_elastic
from poseidon.team.team import Team
from poseidon.team.verify import check_same_bits
from poseidon.units import Kind


class OptaxTransform(NamedTuple):
    """A gradient transformation as Optax defines it."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]


class TreeExchange:
    """What :func:`poseidon.jax.distribute` returns: exchanges the gradients of one tree of parameters.

    :attr:`params` are the parameters to start with, equal on all workers. All methods that exchange something are
    collective: every worker calls them in the same order.
    """

    def __init__(self, params: Any, options: ExchangeOptions, size: int) -> None:
        refuse_elastic("a JAX program")
        self.size = size
        """The number of workers."""
        self.rank = 0
        """The number of this worker."""
        self.params: Any = jax.tree.map(jnp.asarray, params)
        """The initial parameters, worker 0's."""
        self._options = options
        self._variables = describe_leaves(self.params)
        self._names = name_leaves(self.params)
        self._host: HostCallbacks | None = None
        self._forms: dict[int, Kind] = {}
        if size > 1:
            self._team = Team(None, options.timeout_s)
            self.rank = self._team.rank
            self.params = take_tree(self._team, self.params, "the initial parameters")
            self._sums = SummingChannel(self._team)

    @property
    def plan(self) -> Plan | None:
        """The routes in force; None before the end of the first step, and with one worker."""
        return None if self._host is None else self._host.front.plan

    @property
    def error(self) -> BaseException | None:
        """The first error inside a jitted step; JAX passes on only its text."""
        return None if self._host is None else self._host.error

    def summary(self) -> str:
        """Say in words how gradients travel."""
        if self.size == 1:
            return "one worker: nothing travels"
        return "no plan yet: the end of the first step makes it" if self.plan is None else str(self.plan)

    def average(self, gradients: Any, samples: Any = None) -> Any:
        """Return the mean of all workers' gradients, a tree like :attr:`params`; call it before clipping.

        ``samples`` is the number of samples in this worker's batch, over which its gradients are a mean; a worker with
        more counts for more. None: all workers have equally many. 0: this worker's gradients do not count.
        """
        check_like(self.params, gradients)
        if self.size == 1:
            return gradients
        return self._exchange(self._open({}), gradients, samples, ())

    def value_and_grad(self, function: Callable[..., Any], has_aux: bool = False) -> Callable[..., Any]:
        """Return ``jax.value_and_grad(function, has_aux=has_aux)`` whose gradients are means over all workers.

        It takes the function's arguments, the parameters first, and ``samples`` (see :meth:`average`). The value is
        this worker's own. Gradients of matrices that the function multiplies with may travel as factors, those of
        tables as rows, wherever that is less: with :meth:`average` all travel in full.
        """
        if self.size == 1:
            plain = jax.value_and_grad(function, has_aux=has_aux)

            def alone(*args: Any, samples: Any = None, **kwargs: Any) -> Any:
                del samples
                return plain(*args, **kwargs)

            return alone

        def averaged(params: Any, *args: Any, samples: Any = None, **kwargs: Any) -> Any:
            check_like(self.params, params)
            traced, structure = trace_function(lambda params: function(params, *args, **kwargs), params)
            found = find_forms(traced)
            host = self._open(found)
            forms = [
                position for position, kind in self._forms.items() if position in found and found[position].kind == kind
            ]

            def run(params: Any) -> Any:
                return structure.unflatten(run_tapped(traced, jax.tree.leaves(params), host, forms))

            if forms:
                host.forget()
            value, gradients = jax.value_and_grad(run, has_aux=has_aux)(params)
            return value, self._exchange(host, gradients, samples, forms)

        return averaged

    def mean(self, tree: Any, samples: Any = None) -> Any:
        """Return the mean over all workers of numbers, such as losses, metrics or moving averages. Blocks.

        ``samples`` as for :meth:`average`; in a step of its own, with no samples anywhere, the mean is not a number.
        """
        if self.size == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        leaves = [jnp.asarray(leaf) for leaf in leaves]
        weight = jnp.asarray(1 if samples is None else samples)

        def add(count: Array, *arrays: Array) -> list[Array]:
            parts = [np.asarray(count, np.float64).reshape(1)]
            # What a worker without samples computed may not be a number, and shall not count.
            parts += [np.asarray(a, np.float64).reshape(-1) * count if count else np.zeros(a.size) for a in arrays]
            total, *sums = np.split(
                self._sums.sum(np.concatenate(parts), "the means"), np.cumsum([p.size for p in parts])[:-1]
            )
            return [(s / total).reshape(a.shape).astype(a.dtype) for s, a in zip(sums, arrays, strict=True)]

        results = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        return structure.unflatten(self._open({}).call(add, results, weight, *leaves))

    def transform(self) -> OptaxTransform:
        """Return :meth:`average` as the first link of an Optax chain: ``optax.chain(exchange.transform(), adam)``.

        It weighs all workers equally, so their batches must have equally many samples.
        """

        def update(updates: Any, state: Any, params: Any = None, **_: Any) -> Any:
            del params
            return self.average(updates), state

        return OptaxTransform(lambda _: (), update)

    def broadcast(self, tree: Any) -> Any:
        """Return worker 0's tree, such as an optimizer's state or a restored checkpoint. Outside ``jit``."""
        return tree if self.size == 1 else take_tree(self._team, tree, "worker 0's state")

    def verify_replicas(self, tree: Any) -> None:
        """Raise :class:`~poseidon.errors.MismatchError` unless all workers hold the same bits. Outside ``jit``."""
        if self.size == 1:
            return
        arrays = [np.array(leaf) for leaf in jax.tree.leaves(tree)]
        bits = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in arrays]
        check_same_bits(self._team, list(zip(name_leaves(tree), bits, strict=True)))

    def close(self) -> None:
        """Stop exchanging."""
        if self._host is not None:
            jax.effects_barrier()
            self._host.front.detach()
            self._host = None
        if self.size > 1:
            self._team.close()

    # Inside.

    def _forced(self) -> list[int]:
        """Return the parameters that the user wants to travel in short form, whatever it costs."""
        routes: Mapping[str, str] = self._options.routes or {}
        known = standard_routes()
        short = [p for p, route in routes.items() if route in known and known[route].delivers != "gradients"]
        return [i for i, name in enumerate(self._names) if any(fnmatch.fnmatchcase(name, p) for p in short)]

    def _open(self, found: Mapping[int, ShortForm]) -> HostCallbacks:
        """Make the exchange, in the first step: which short forms there are is known only now. Collective."""
        if self._host is None:
            sizes = [math.prod(variable.shape) for variable in self._variables]
            self._forms = agree_on_forms(self._team, found, sizes, self._forced())
            units = [
                OutsideUnit(name, self._forms.get(position, "dense"), (position,))
                for position, name in enumerate(self._names)
            ]
            front = OutsideFrontEnd(self._team, self._variables, units, self._options)
            self._host = HostCallbacks(front, units, None)
        return self._host

    def _exchange(self, host: HostCallbacks, gradients: Any, samples: Any, tapped: Collection[int]) -> Any:
        leaves, structure = jax.tree.flatten(gradients)
        count = jnp.asarray(1 if samples is None else samples)
        if count.ndim or not jnp.issubdtype(count.dtype, jnp.integer):
            raise ConfigError(
                f"samples is {count.dtype}{list(count.shape)}; pass one whole number, such as len(batch), or None"
            )
        return structure.unflatten(host.exchange(count, leaves, tapped))
