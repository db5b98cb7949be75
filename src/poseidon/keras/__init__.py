"""Keras models on all workers: ``poseidon.keras.distribute(model)`` before ``fit``.

Works on Keras' TensorFlow, torch and JAX backends; ``docs/keras.md`` is the guide.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from poseidon.engine.assemble import ExchangeOptions
from poseidon.job.limits import time_limit
from poseidon.job.world import join_workers
from poseidon.keras.callbacks import BroadcastCallback
from poseidon.keras.distribution import Alone, DistributeOptions, Distribution
from poseidon.planning.cluster import Cluster

__all__ = ["Alone", "BroadcastCallback", "Distribution", "distribute"]


def distribute(
    model: Any,
    *,
    batch: Literal["per-worker", "total"] = "per-worker",
    data: Literal["shard", "own"] = "shard",
    sync_batchnorm: bool | None = None,
    routes: Mapping[str, str] | None = None,
    cluster: Cluster | str | Path | None = None,
    timeout_s: float | None = None,
) -> Distribution | Alone:
    """Train a model on all workers; call it on every worker, before ``fit``, before or after ``compile``.

    ``batch`` says what a batch size counts: the samples of one worker, or of all workers together, which then divide
    each batch. ``data="own"`` takes the arguments of ``fit`` as this worker's own part, instead of dealing them out.
    ``sync_batchnorm`` makes every BatchNormalization use the moments of all workers' samples; None leaves it to the
    layer's ``synchronized``.
    ``routes``, ``cluster`` and ``timeout_s`` are those of :class:`poseidon.DistributedDataParallel`.

    Returns an object that knows the plan. With one worker the model does not change.
    """
    options = DistributeOptions(batch, data, sync_batchnorm, ExchangeOptions(routes, cluster, time_limit(timeout_s)))
    if join_workers() == 1:
        return Alone()
    return Distribution(model, options)
