"""JAX programs (Flax, Optax, plain loops) on all workers: ``poseidon.jax.distribute(params)``.

``docs/jax.md`` is the guide. Keras models on JAX need only :mod:`poseidon.keras`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poseidon.engine.assemble import ExchangeOptions
from poseidon.jax.exchange import TreeExchange
from poseidon.job.limits import time_limit
from poseidon.job.world import join_workers
from poseidon.planning.cluster import Cluster

__all__ = ["TreeExchange", "distribute"]


def distribute(
    params: Any,
    *,
    routes: Mapping[str, str] | None = None,
    cluster: Cluster | str | Path | None = None,
    timeout_s: float | None = None,
) -> TreeExchange:
    """Join the job and make an exchange for a tree of parameters; call it on every worker.

    Training starts from ``exchange.params``, worker 0's parameters. In the training step, ``exchange.value_and_grad``
    takes the place of ``jax.value_and_grad``, or ``exchange.average`` follows it; both work inside and outside ``jit``.
    ``routes`` (by the path of a leaf, such as ``{"decoder/*": "allreduce"}``), ``cluster`` and ``timeout_s`` are those
    of :class:`poseidon.DistributedDataParallel`. With one worker nothing changes.
    """
    options = ExchangeOptions(routes, cluster, time_limit(timeout_s))
    return TreeExchange(params, options, join_workers(timeout_s))
