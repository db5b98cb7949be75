"""The host's part of a train step on JAX, and the differentiable operations that call it; Keras' models use it too.

All callbacks are ordered: JAX runs them one after the other, in program order, on its own threads. They wait for
nothing but the other workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from poseidon.engine.moments import MomentsExchange, differentiate
from poseidon.engine.outside import Array, OutsideFrontEnd, OutsideUnit, Rows
from poseidon.errors import UnsupportedError


class HostCallbacks:
    """The host's part of the steps of one model; the public methods are called while a step is traced."""

    def __init__(self, front: OutsideFrontEnd, units: Sequence[OutsideUnit], moments: MomentsExchange | None) -> None:
        self.front = front
        self.error: BaseException | None = None
        """The first error of a callback; JAX would only pass on its text."""
        self.tied: set[int] = set()
        """Positions of variables that are also used outside their layer, so a short form would be incomplete."""
        self._unit_at = {position: unit for unit in units for position in unit.positions}
        self._moments = moments
        self._taken: defaultdict[int, list[tuple[Array, Array]]] = defaultdict(list)
        self._rests: dict[int, Array] = {}
        """What short forms left out, of variables that are used elsewhere too."""

    def begin(self, samples: Any) -> None:
        """Begin a step to which this worker adds ``samples`` samples (an array of one)."""

        def begin(count: Array) -> None:
            self._taken.clear()
            self.front.begin(int(count[0]))

        self._call(begin, None, samples)

    def share(self) -> Any:
        """Return this worker's part of the samples of the step."""
        dtype = jnp.result_type(float)
        found = lambda: np.asarray(self.front.weight / self.front.team.size, dtype)  # noqa: E731 - read in each step
        return self._call(found, jax.ShapeDtypeStruct((), dtype))

    def multiply(self, position: int, x: Any, kernel: Any) -> Any:
        """Return ``x @ kernel``, whose backward collects the factors of the kernel's gradient and leaves it zero."""

        @jax.custom_vjp
        def product(x: Any, kernel: Any) -> Any:
            return jnp.matmul(x, kernel)

        def backward(saved: Any, g: Any) -> Any:
            x, kernel = saved
            factors = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
            return jnp.matmul(g, kernel.T), self._take(position, kernel, *factors)

        product.defvjp(lambda x, kernel: (product(x, kernel), (x, kernel)), backward)
        return product(x, kernel)

    def look_up(
        self, position: int, table: Any, numbers: Any, dtype: Any, find: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """Return rows of a table; backward collects their numbers and gradients and leaves the table's gradient zero.

        ``dtype`` is the variable's own type, in which gradients are summed; the table may have a shorter one. ``find``
        looks the rows up, instead of ``jnp.take``. Numbers of rows that do not exist get no gradient.
        """

        @jax.custom_vjp
        def look_up(table: Any, numbers: Any) -> Any:
            return jnp.take(table, numbers, axis=0) if find is None else find(table, numbers)

        def backward(saved: Any, g: Any) -> Any:
            table, numbers = saved
            count = table.shape[0]
            numbers = jnp.where(numbers < 0, numbers + count, numbers).reshape(-1)
            is_row = (numbers >= 0) & (numbers < count)
            rows = jnp.where(is_row[:, None], g.reshape(-1, g.shape[-1]).astype(dtype), 0)
            numbers = jnp.where(is_row, numbers, 0)
            return self._take(position, table, numbers, rows), np.zeros(saved[1].shape, jax.dtypes.float0)

        look_up.defvjp(lambda table, numbers: (look_up(table, numbers), (table, numbers)), backward)
        return look_up(table, numbers)

    def combine(self, mean: Any, variance: Any, count: Any, name: str) -> Any:
        """Return mean and variance over all workers, given those of this worker's ``count`` rows."""
        assert self._moments is not None
        moments, like = self._moments, jax.ShapeDtypeStruct(mean.shape, mean.dtype)
        scalar = jax.ShapeDtypeStruct((), mean.dtype)

        def sum_forward(mean: Array, variance: Array, count: Array) -> Any:
            whole_mean, whole_variance, share = moments.forward(mean, variance, float(count), name)
            return whole_mean, whole_variance, np.asarray(share, mean.dtype)

        def forward(mean: Any, variance: Any, count: Any) -> Any:
            *wholes, share = self._call(sum_forward, (like, like, scalar), mean, variance, count)
            return tuple(wholes), (mean, wholes[0], share)

        def backward(saved: Any, gradients: Any) -> Any:
            sums = self._call(lambda left, right: moments.backward(left, right, name), (like, like), *gradients)
            return *differentiate(*sums, *saved), jnp.zeros_like(count)

        combined = jax.custom_vjp(lambda *arguments: forward(*arguments)[0])
        combined.defvjp(forward, backward)
        return combined(mean, variance, count)

    def average(
        self, positions: Sequence[int], gradients: Sequence[Any], tapped: Collection[int], is_first: bool
    ) -> Any:
        """Hand over all gradients, wait for the means and return them.

        The gradient of a ``tapped`` variable is what its short form leaves out. The first step checks whether it is
        zero and records in :attr:`tied` where it is not; later steps do not copy that much memory to the host.
        """
        operands = [
            jnp.any(gradient != 0) if position in tapped and not is_first else gradient
            for position, gradient in zip(positions, gradients, strict=True)
        ]

        def finish(*arrays: Array) -> list[Array]:
            for position, array in zip(positions, arrays, strict=True):
                if position not in tapped:
                    self.front.give(position, array)
                elif not array.any():
                    self._give_short(position)
                elif is_first:
                    self.tied.add(position)
                    self.front.give(position, array + self._full(position))
                else:
                    raise self._tied_late(position)
            self.front.finish()
            return [self._mean(position) for position in positions]

        return self._call(finish, [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients], *operands)

    # A step in one go, for a tree of gradients.

    def forget(self) -> None:
        """Forget what an earlier backward left, whose means nobody asked for."""

        def forget() -> None:
            self._taken.clear()
            self._rests.clear()

        self._call(forget, None)

    def exchange(self, samples: Any, gradients: Sequence[Any], tapped: Collection[int]) -> Any:
        """Do a whole step: hand over the gradients of all variables, wait for the means and return them.

        The gradient of a ``tapped`` variable is what its short form leaves out, and is copied to the host only if it is
        not zero. Without anything traced it runs at once, and raises its own errors.
        """
        for position in tapped:
            self._keep_rest(position, gradients[position])
        whole = [position for position in range(len(gradients)) if position not in tapped]

        def finish(count: Array, *arrays: Array) -> list[Array]:
            self.front.begin(int(count))
            for position in tapped:
                if (rest := self._rests.pop(position, None)) is None:
                    self._give_short(position)
                else:
                    self.front.give(position, rest + self._full(position))
            for position, array in zip(whole, arrays, strict=True):
                self.front.give(position, array)
            self.front.finish()
            return [self._mean(position) for position in range(len(gradients))]

        results = [jax.ShapeDtypeStruct(g.shape, g.dtype) for g in gradients]
        return self.call(finish, results, samples, *(gradients[position] for position in whole))

    def call(self, function: Callable[..., Any], results: Any, *operands: Any) -> Any:
        """Call the host with arrays: at once where nothing is traced, else when the traced step runs."""
        if any(isinstance(operand, jax.core.Tracer) for operand in operands):
            return self._call(function, results, *operands)
        jax.effects_barrier()  # callbacks of a backward before it
        return jax.tree.map(jnp.asarray, function(*map(np.asarray, operands)))

    # Inside.

    def _keep_rest(self, position: int, gradient: Any) -> None:
        def keep(array: Array) -> None:
            self._rests[position] = array.copy()

        def keep_traced(gradient: Any) -> None:
            self._call(keep, None, gradient)

        jax.lax.cond(jnp.any(gradient != 0), keep_traced, lambda _: None, gradient)

    def _call(self, function: Callable[..., Any], results: Any, *operands: Any) -> Any:
        def guarded(*arrays: Any) -> Any:
            try:
                return function(*map(np.asarray, arrays))
            except BaseException as error:
                self.error = self.error or error
                raise

        return io_callback(guarded, results, *operands, ordered=True)

    def _take(self, position: int, weight: Any, left: Any, right: Any) -> Any:
        """Keep a short form of a weight's gradient until the end of backward; return zeros for the full one."""

        def take(left: Array, right: Array) -> Array:
            # Copy: JAX may reuse the memory once this returns.
            self._taken[position].append((left.copy(), right.copy()))
            return np.zeros((), weight.dtype)

        zero = self._call(take, jax.ShapeDtypeStruct((), weight.dtype), left, right)
        return jnp.broadcast_to(zero, weight.shape)

    def _give_short(self, position: int) -> None:
        taken = self._taken.pop(position, [])
        if self._unit_at[position].kind == "linear":
            self.front.give_factors(position, taken)
            return
        width = self.front.shape(position)[1]
        numbers = [numbers for numbers, _ in taken] or [np.zeros(0, np.int32)]
        values = [values for _, values in taken] or [np.zeros((0, width), np.float32)]
        self.front.give_rows(position, np.concatenate(numbers), np.concatenate(values))

    def _full(self, position: int) -> Array:
        """Return the gradient that was collected in short form."""
        taken = self._taken.pop(position, [])
        if self._unit_at[position].kind == "linear":
            return sum((x.T @ g for x, g in taken), start=np.zeros((), np.float32))
        total = np.zeros(self.front.shape(position), taken[0][1].dtype if taken else np.float32)
        for numbers, values in taken:
            np.add.at(total, numbers, values)
        return total

    def _mean(self, position: int) -> Array:
        mean = self.front.mean(position)
        assert not isinstance(mean, Rows)
        return mean

    def _tied_late(self, position: int) -> UnsupportedError:
        name = self._unit_at[position].name
        return UnsupportedError(
            f"rank {self.front.team.rank}: the weight of {name} has a gradient from outside of its layer, which it had "
            f'not in the first step; let all of it travel in full: distribute(model, routes={{"{name}": "allreduce"}})'
        )
