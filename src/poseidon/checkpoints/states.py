"""What a checkpoint holds: the states of a program's objects, copied so that training can go on at once."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from poseidon.checkpoints.plain import like_mapping, like_sequence, own_value
from poseidon.errors import ConfigError


class Stateful(Protocol):
    """Anything with a state: models, optimizers, schedulers, scalers, samplers."""

    def state_dict(self) -> Any:
        """Return the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state over."""


def check_part(name: str, part: Any) -> None:
    """Raise :class:`ConfigError` unless a part of the program has a state."""
    missing = [method for method in ("state_dict", "load_state_dict") if not callable(getattr(part, method, None))]
    if missing:
        raise ConfigError(
            f"checkpoint: {name} is a {type(part).__name__} without {' and '.join(missing)}(); "
            "keep plain values in checkpoint.values"
        )


def state_of(part: Any) -> Any:
    """Return a part's state; of a model, under the names that it has without wrapper and compiler.

    Of a model whose workers drift apart, it is what they agreed on last.
    """
    inner = _plain(part)
    if _differs(inner):
        return inner.shared_state_dict()
    return (inner.module if _is_wrapper(inner) else inner).state_dict()


def load_into(part: Any, state: Any) -> None:
    """Let a part take a state over; a wrapper does so itself, since it may have more to do than its model."""
    inner = _plain(part)
    if _is_wrapper(inner):
        state = {f"module.{name}": value for name, value in state.items()}
    inner.load_state_dict(state)


def parts_that_differ(parts: Mapping[str, Any]) -> tuple[dict[str, Stateful], dict[str, Stateful]]:
    """Return what else to save where a model takes local steps: for all workers alike, and for each its own.

    Then optimizers and all else differ between workers, too. These states are loaded after those of ``parts``.
    """
    shared: dict[str, Stateful] = {}
    own: dict[str, Stateful] = {}
    drifting = [name for name, part in parts.items() if _differs(_plain(part))]
    for name in drifting:
        for_all, for_each = _plain(parts[name]).checkpoint_parts()
        shared |= {f"{name}: {what}": part for what, part in for_all.items()}
        own |= {f"{name}: {what}": part for what, part in for_each.items()}
    if drifting:
        own |= {
            f"{name} of this worker": part
            for name, part in parts.items()
            # A place in the data that all have in common is that of the step that all go on from.
            if name not in drifting and not getattr(part, "counts_for_all", False)
        }
    return shared, own


def _differs(part: Any) -> bool:
    """Whether a model's workers drift apart: it tells what they share, and what is each one's own."""
    return callable(getattr(type(part), "checkpoint_parts", None))


class LossyState:
    """What the lossy layers of a distributed model keep on this worker; each worker has its own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> Any:
        """Return it."""
        return self._model.lossy_state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over what this worker kept."""
        self._model.load_lossy_state_dict(state_dict)

    def load_shares(self, states: Sequence[Any]) -> None:
        """Take over the sum of what some workers kept."""
        self._model.load_lossy_shares(states)


def find_lossy(parts: Mapping[str, Any]) -> dict[str, LossyState]:
    """Return the lossy states of the distributed models among a program's parts, by the names they are saved as."""
    found: dict[str, LossyState] = {}
    for name, part in parts.items():
        for path, module in part.named_modules() if isinstance(part, nn.Module) else ():
            if getattr(module, "is_lossy", False) is True and hasattr(module, "lossy_state_dict"):
                # Alike for a compiled model and the one inside.
                inside = path.replace("_orig_mod", "").strip(".")
                found[f"{name}.{inside}, lossy" if inside else f"{name}, lossy"] = LossyState(module)
    return found


def holds(part: Any, model: nn.Module) -> bool:
    """Return whether the state of ``part`` has that of a wrapped model, as far as that can be seen."""
    if not isinstance(part, nn.Module):
        return False
    inside = set(part.modules())
    return model in inside or getattr(model, "module", None) in inside


def forget_step(part: Any) -> None:
    """Let a part forget a step that was interrupted, as far as that is not in its state."""
    if isinstance(part, torch.amp.GradScaler):
        # Or it would complain that gradients are unscaled twice.
        part._per_optimizer_states.clear()


def host_copy(value: Any) -> Any:
    """Return plain data in which every tensor is a copy in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return like_mapping(value, {key: host_copy(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return like_sequence(value, list(map(host_copy, value)))
    return own_value(value)


def check_readable(name: str, state: Any) -> None:
    """Raise :class:`ConfigError` unless a state can be read back: plain data and tensors are, other objects are not."""
    try:
        from_bytes(as_bytes(_without_values(state)))
    except Exception as error:
        raise ConfigError(
            f"checkpoint: the state of {name} cannot be saved such that it can be read back without running code; "
            f"keep plain values and tensors in it ({str(error).splitlines()[0]})"
        ) from None


def as_bytes(state: Any) -> bytes:
    """Return a small state as bytes."""
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """Return the state in these bytes; only plain data and tensors are read, never code."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _without_values(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty(0, dtype=value.dtype, device="cpu")
    if isinstance(value, Mapping):
        return like_mapping(value, {key: _without_values(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return like_sequence(value, list(map(_without_values, value)))
    return own_value(value)


class RandomState:
    """The random numbers of Python, NumPy and torch in this process."""

    def state_dict(self) -> dict[str, Any]:
        """Return all states, as plain data and tensors."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": [version, torch.tensor(words, dtype=torch.int64, device="cpu"), gauss],
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        }
        numpy = _numpy()
        if numpy is not None:
            name, keys, position, has_gauss, cached = numpy.random.get_state()
            state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), position, has_gauss, cached]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these random numbers."""
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_initialized() and len(state["cuda"]) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(state["cuda"])
        numpy = _numpy()
        if numpy is not None and "numpy" in state:
            name, keys, position, has_gauss, cached = state["numpy"]
            numpy.random.set_state((name, keys.numpy().astype("uint32"), position, has_gauss, cached))


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _plain(part: Any) -> Any:
    """Return a compiled model as it was before."""
    original = getattr(part, "_orig_mod", None)
    return part if original is None else original


def _is_wrapper(part: Any) -> bool:
    """Whether a model is inside: torch's class, Poseidon's, and what is derived from them."""
    is_model = isinstance(part, nn.Module) and isinstance(getattr(part, "module", None), nn.Module)
    return is_model and any(each.__name__.endswith("DataParallel") for each in type(part).__mro__)
