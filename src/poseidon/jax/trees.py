"""Trees of arrays: their leaves' names, and copies of worker 0's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poseidon.engine.outside import OutsideVariable, check_alike, take_from_first
from poseidon.errors import ConfigError
from poseidon.team.team import Team


def name_leaves(tree: Any) -> list[str]:
    """Return the path of each leaf, such as ``encoder/dense/kernel``."""
    return [_name(path) or "the array" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def describe_leaves(tree: Any) -> list[OutsideVariable]:
    """Return names, shapes and types of all leaves."""
    leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return [
        OutsideVariable(name, tuple(leaf.shape), str(leaf.dtype))
        for name, leaf in zip(name_leaves(tree), leaves, strict=True)
    ]


def check_like(params: Any, gradients: Any) -> None:
    """Raise unless a tree has the leaves of the parameters, in shape and type."""
    if jax.tree.structure(params) != jax.tree.structure(gradients):
        wanted, found = set(name_leaves(params)), set(name_leaves(gradients))
        odd = sorted(wanted ^ found)
        what = f"; {odd[0]} is only in {'the parameters' if odd[0] in wanted else 'the gradients'}" if odd else ""
        raise ConfigError(
            f"the tree of gradients is not that of the parameters given to distribute(){what}; pass the gradients with "
            "respect to these parameters, and all of them"
        )
    for name, wanted, found in zip(
        name_leaves(params), jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True
    ):
        if (wanted.shape, wanted.dtype) != (jnp.shape(found), jnp.result_type(found)):
            raise ConfigError(
                f"the gradient of {name} is {jnp.result_type(found)}{list(jnp.shape(found))}, the parameter "
                f"{wanted.dtype}{list(wanted.shape)}; pass gradients of the parameters' shapes and types"
            )


def take_tree(team: Team, tree: Any, what: str) -> Any:
    """Return worker 0's tree; all workers pass trees of the same shapes and types. Collective."""
    check_alike(team, describe_leaves(tree))
    leaves, structure = jax.tree.flatten(tree)
    arrays = take_from_first(team, [_as_array(leaf) for leaf in leaves], what)
    return structure.unflatten([_like(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])


def _name(path: Any) -> str:
    parts = (getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path)
    return "/".join(map(str, parts))


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_array(leaf: Any) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(leaf: Any, array: np.ndarray[Any, Any]) -> Any:
    if _is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
    return jnp.asarray(array) if isinstance(leaf, jax.Array) else array
