"""A plain JAX loop on all workers: `poseidon run --nproc 2 examples/jax/train.py`.

The three lines that differ from a program for one device are marked.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np

import poseidon.jax

BATCH, STEPS, RATE = 64, 60, 0.1


def make_params(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    sizes = (64, 256, 10)
    keys = jax.random.split(key, len(sizes))
    return {
        f"layer{i}": {"kernel": jax.random.normal(keys[i], (a, b)) * (2 / a) ** 0.5, "bias": jnp.zeros(b)}
        for i, (a, b) in enumerate(itertools.pairwise(sizes))
    }


def find_loss(params: dict[str, dict[str, jax.Array]], images: jax.Array, labels: jax.Array) -> jax.Array:
    x = jax.nn.relu(images @ params["layer0"]["kernel"] + params["layer0"]["bias"])
    scores = jax.nn.log_softmax(x @ params["layer1"]["kernel"] + params["layer1"]["bias"])
    return -jnp.take_along_axis(scores, labels[:, None], axis=1).mean()


def main() -> None:
    exchange = poseidon.jax.distribute(make_params(jax.random.key(0)))  # (1) join the job; start as worker 0 does
    differentiate = exchange.value_and_grad(find_loss)  # (2) in place of jax.value_and_grad(find_loss)

    @jax.jit
    def step(params, images, labels):
        loss, gradients = differentiate(params, images, labels, samples=len(images))
        return jax.tree.map(lambda p, g: p - RATE * g, params, gradients), loss

    random = np.random.default_rng(0)
    centres = random.normal(size=(10, 64)).astype("float32")
    params = exchange.params
    for number in range(STEPS):
        labels = random.integers(0, 10, BATCH)
        images = centres[labels] + random.normal(size=(BATCH, 64)).astype("float32")
        mine = slice(exchange.rank, None, exchange.size)  # (3) this worker's part of the batch
        params, loss = step(params, images[mine], labels[mine])
        if number % 20 == 19:
            mean = float(exchange.mean(loss, samples=len(images[mine])))
            if exchange.rank == 0:
                print(f"step {number + 1}: loss {mean:.4f}")
    exchange.verify_replicas(params)
    if exchange.rank == 0:
        print(exchange.summary())
    exchange.close()


if __name__ == "__main__":
    main()
