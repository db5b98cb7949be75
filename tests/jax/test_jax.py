"""Plain JAX loops on several workers, against one process with the joined batch, in float64 and float32."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nightly import amount
from poseidon.errors import ConfigError, MismatchError
from poseidon.planning.cluster import Cluster, Link
from ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed"),
    pytest.mark.timeout(300),
]

ENV = {"JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=1"}
SLOW = Link(bits_per_s=1e7, latency_s=1e-5)
STEPS, RATE = 4, 0.1
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}


def _sizes(workers: int) -> list[int]:
    """Samples of each worker: uneven."""
    return [3, 6, 2][:workers]


def _params(dtype: str, seed: int) -> Any:
    import jax.numpy as jnp

    random = np.random.default_rng(seed)
    shapes = {"table": (60, 8), "first": {"kernel": (16, 40), "bias": (40,)}, "last": {"kernel": (40, 3)}}

    def make(shape: Any) -> Any:
        if isinstance(shape, dict):
            return {name: make(inner) for name, inner in shape.items()}
        return jnp.asarray(random.normal(size=shape) * 0.3, dtype)

    return make(shapes)


def _batch(step: int, count: int) -> tuple[Any, Any]:
    random = np.random.default_rng(100 + step)
    return random.integers(0, 60, (count, 2)), random.integers(0, 3, count)


def _loss(params: Any, ids: Any, labels: Any, penalty: float = 0.0) -> Any:
    import jax
    import jax.numpy as jnp

    x = jnp.take(params["table"], ids, axis=0).reshape(len(ids), -1)
    x = jax.nn.relu(x @ params["first"]["kernel"] + params["first"]["bias"])
    scores = jax.nn.log_softmax(x @ params["last"]["kernel"])
    loss = -jnp.take_along_axis(scores, labels[:, None], 1).mean()
    if penalty:
        # Uses of the same parameters that no short form tells.
        loss += penalty * ((params["first"]["kernel"] ** 2).sum() + (params["table"][:5] ** 2).sum())
    return loss


def _update(params: Any, gradients: Any) -> Any:
    import jax

    return jax.tree.map(lambda p, g: p - RATE * g, params, gradients)


def _alone(dtype: str, penalty: float, workers: int) -> Any:
    import jax

    step = jax.jit(lambda params, *batch: _update(params, jax.grad(_loss)(params, *batch, penalty)))
    params = _params(dtype, 0)
    for number in range(STEPS):
        params = step(params, *_batch(number, sum(_sizes(workers))))
    return params


def _together(dtype: str, penalty: float, workers: int, way: str, is_jitted: bool) -> tuple[Any, dict[str, str], bytes]:
    import jax

    import poseidon.jax

    rank = int(os.environ["RANK"])
    cluster = Cluster(machines=workers, between=SLOW, inside=SLOW)
    exchange = poseidon.jax.distribute(_params(dtype, rank), cluster=cluster)
    if way == "value_and_grad":
        differentiate = exchange.value_and_grad(_loss)
    else:

        def differentiate(*args: Any, samples: int) -> Any:
            value, gradients = jax.value_and_grad(_loss)(*args)
            return value, exchange.average(gradients, samples)

    def step(params: Any, ids: Any, labels: Any) -> Any:
        loss, gradients = differentiate(params, ids, labels, penalty, samples=len(ids))
        return _update(params, gradients), loss

    step = jax.jit(step) if is_jitted else step
    sizes = _sizes(workers)
    mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    params = exchange.params
    for number in range(STEPS):
        ids, labels = _batch(number, sum(sizes))
        params, loss = step(params, ids[mine], labels[mine])
        expected = exchange.mean(loss, len(ids[mine]))
    del expected
    exchange.verify_replicas(params)
    jax.block_until_ready(params)
    assert exchange.plan is not None
    routes = dict(exchange.plan.routes)
    exchange.close()
    return params, routes, b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))


WAYS = [
    # dtype, penalty, way, jitted
    ("float64", 0.0, "average", False),
    ("float64", 0.0, "value_and_grad", True),
    ("float64", 0.01, "value_and_grad", True),
    ("float32", 0.0, "value_and_grad", False),
    ("float32", 0.0, "average", True),
]


CHOSEN = {2: range(len(WAYS)), 3: amount((1, 4), (1, 2, 4))}


def _ways(workers: int) -> list[Any]:
    import jax

    found = {}
    for number in CHOSEN[workers]:
        dtype, penalty, way, is_jitted = WAYS[number]
        ours, routes, bits = _together(dtype, penalty, workers, way, is_jitted)
        theirs = _alone(dtype, penalty, workers)
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        found[number] = max(float(np.abs(a - b).max()) for a, b in pairs), routes, bits
    return [found, _parts()]


def _parts() -> dict[str, Any]:
    """Try what a step does not show."""
    import jax
    import jax.numpy as jnp

    import poseidon.jax

    rank = int(os.environ["RANK"])
    exchange = poseidon.jax.distribute({"w": jnp.full((2, 3), float(rank))})
    chain = exchange.transform()
    first, _ = chain.update({"w": jnp.full((2, 3), 1.0 + rank)}, chain.init(exchange.params), exchange.params)
    nobody = jnp.full((2, 3), jnp.nan) if rank else jnp.full((2, 3), 7.0)
    found = {
        "start": float(exchange.params["w"].sum()),
        "chained": float(first["w"][0, 0]),
        "without_samples": float(exchange.average({"w": jnp.where(rank, 0.0, nobody)}, 0 if rank else 5)["w"][0, 0]),
        "mean": float(jax.jit(exchange.mean)({"a": nobody[0, 0]}, jnp.asarray(0 if rank else 3))["a"]),
        "key": jax.random.key_data(exchange.broadcast({"key": jax.random.key(rank)})["key"]).tolist(),
    }
    for name, call in {
        "tree": lambda: exchange.average({"v": jnp.ones((2, 3))}),
        "shape": lambda: exchange.average({"w": jnp.ones((3, 2))}),
        "samples": lambda: exchange.average({"w": jnp.ones((2, 3))}, 0.5),
        "replicas": lambda: exchange.verify_replicas({"w": jnp.full(3, rank)}),
        "model": lambda: poseidon.jax.distribute({"w": jnp.ones(2 + rank)}),
    }.items():
        with pytest.raises((ConfigError, MismatchError)) as caught:
            call()
        found[name] = str(caught.value)
    exchange.close()
    return found


@pytest.fixture(scope="module")
def results() -> Callable[[int], Any]:
    """Return a function that gives what a number of workers found; they are started once for all tests."""
    return functools.cache(lambda size: run_ranks(_ways, size, size, env=ENV, timeout_s=250, preload=["poseidon.jax"]))


@pytest.mark.parametrize(("size", "number"), [(size, number) for size, numbers in CHOSEN.items() for number in numbers])
def test_workers_equal_one_with_the_joined_batch(results: Callable[[int], Any], size: int, number: int) -> None:
    found = [ways[number] for ways, _ in results(size)]
    assert max(difference for difference, _, _ in found) < TOLERANCE[WAYS[number][0]]
    assert len({bits for _, _, bits in found}) == 1


def test_products_travel_as_factors_and_look_ups_as_rows(results: Callable[[int], Any]) -> None:
    for number, (_, penalty, way, _) in enumerate(WAYS):
        routes = results(2)[0][0][number][1]
        if way == "average":
            assert not {"factors", "rows"} & set(routes.values())
        elif not penalty:
            assert routes["first/kernel"] == "factors"
            assert routes["table"] == "rows"
        assert routes["last/kernel"] not in ("factors", "rows")  # too small


@pytest.mark.parametrize("size", [2, 3])
def test_everything_comes_from_worker_0_and_means_are_everybodys(results: Callable[[int], Any], size: int) -> None:
    for _, parts in results(size):
        assert parts["start"] == 0.0
        assert parts["chained"] == 1.0 + (size - 1) / 2
        assert parts["without_samples"] == 7.0
        assert parts["mean"] == 7.0
        assert parts["key"] == [0, 0]


def test_mistakes_are_named(results: Callable[[int], Any]) -> None:
    parts = results(2)[1][1]
    assert "v is only in the gradients" in parts["tree"]
    assert "the gradient of w is float64[3, 2], the parameter float64[2, 3]" in parts["shape"]
    assert "samples is float" in parts["samples"]
    assert "w" in parts["replicas"]
    assert "w has shape [2] on rank 0 and [3] on rank 1" in parts["model"]
