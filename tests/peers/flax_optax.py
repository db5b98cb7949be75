# A Flax model, Optax and a TrainState under jit, for `poseidon run`: the workers' result against one process's.
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import poseidon.jax


class Net(nn.Module):
    @nn.compact
    def __call__(self, ids, images):
        x = nn.Embed(200, 16)(ids).mean(1)
        x = jnp.concatenate([x, nn.relu(nn.Conv(4, (3, 3))(images)).reshape(len(images), -1)], 1)
        x = nn.relu(nn.LayerNorm()(nn.Dense(128)(x)))
        return nn.Dense(5)(x)


def batch(step, count=12):
    random = np.random.default_rng(step)
    ids, images = random.integers(0, 200, (count, 3)), random.normal(size=(count, 6, 6, 1)).astype("float32")
    return ids, images, random.integers(0, 5, count)


def loss_of(params, ids, images, labels):
    logits = model.apply({"params": params}, ids, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits


model = Net()
first = model.init(jax.random.key(0), *batch(0)[:2])["params"]
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-4))
exchange = poseidon.jax.distribute(first, routes={"Dense_0/kernel": "factors", "Embed_0/embedding": "rows"})
rank, size = exchange.rank, exchange.size


def train(params, differentiate, part, **options):
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    @jax.jit
    def step(state, *rows):
        more = {name: len(rows[0]) for name in options}
        (_, _), gradients = differentiate(state.params, *rows, **more)
        return state.apply_gradients(grads=gradients)

    for number in range(6):
        state = step(state, *(array[part] for array in batch(number)))
    return jax.block_until_ready(state.params)


mine = slice(0, 12 // size + 1) if rank == 0 else slice(12 * rank // size + (rank == 1), 12 * (rank + 1) // size)
ours = train(exchange.params, exchange.value_and_grad(loss_of, has_aux=True), mine, samples=True)
exchange.verify_replicas(ours)
theirs = train(first, jax.value_and_grad(loss_of, has_aux=True), slice(None))
pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs))
difference = max(float(jnp.abs(a - b).max()) for a, b in pairs)
routes = sorted(set(exchange.plan.routes.values())) if exchange.plan else []
if rank == 0:
    print(f"flax_optax.py: {size} workers, greatest difference {difference:.1e}, by {', '.join(routes)}")
exchange.close()
sys.exit(not difference < 2e-5)
