"""Random numbers: equal on all workers where they must be, different where they should be.

Until training starts, all workers draw the same numbers, so that models, splits and vocabularies are equal. From then
on each library has two streams. *Alike* decides which samples come next; *apart* gives each worker its own noise,
dropout and augmentation. The script's own code draws from *apart* with torch's generator, but from *alike* with
``random`` and numpy, except while samples are fetched: scripts make decisions with them, which must be the same on all
workers.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from poseidon.following.patches import Patches

ALIKE, APART = "alike", "apart"


def derive(seed: int, rank: int) -> int:
    """Return the seed of a worker's own stream; worker 0 keeps the script's, as if it ran alone. Pure."""
    if rank == 0:
        return seed
    return int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8], "little") >> 1


def _torch_state(seed: int) -> Any:
    return torch.Generator().manual_seed(seed).get_state()


def _random_state(seed: int) -> Any:
    return random.Random(seed).getstate()


def _numpy_state(seed: int) -> Any:
    return np.random.RandomState(seed % 2**32).get_state()


_LIBRARIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state, _torch_state),
    "random": (random.getstate, random.setstate, _random_state),
    "numpy": (np.random.get_state, np.random.set_state, _numpy_state),
}
"""Per library: read the state of its global generator, write it, and derive a state from a seed."""


class Streams:
    """The two streams of each library and which of them is in use."""

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed
        self._now = dict.fromkeys(_LIBRARIES, ALIKE)
        self._kept: dict[tuple[str, str], Any] = {}
        self._has_parted = False
        self._generators = 0

    def install(self, patches: Patches) -> None:
        """Seed all libraries equally on all workers, and keep the streams apart when the script seeds later."""
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        patches.wrap(torch, "manual_seed", self._manual_seed)
        patches.replace(torch.random, "manual_seed", torch.manual_seed)
        patches.wrap(np.random, "default_rng", self._default_rng)

    def part(self) -> None:
        """Start training: from now on each worker draws its own noise."""
        if self._has_parted:
            return
        self._has_parted = True
        seed = derive(torch.initial_seed(), self._rank)
        for library, (get, _, state_of) in _LIBRARIES.items():
            self._kept[library, APART] = get() if self._rank == 0 else state_of(seed)
        if self._rank and torch.cuda.is_available():
            torch.cuda.manual_seed_all(seed)
        self._switch("torch", APART)

    @contextlib.contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """Draw from one stream, in all libraries, inside this context."""
        if not self._has_parted:
            yield
            return
        before = dict(self._now)
        for library in _LIBRARIES:
            self._switch(library, stream)
        try:
            yield
        finally:
            for library, stream_before in before.items():
                self._switch(library, stream_before)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore all generators after this context."""
        before = {library: get() for library, (get, _, _) in _LIBRARIES.items()}
        try:
            yield
        finally:
            for library, (_, put, _) in _LIBRARIES.items():
                put(before[library])

    def _switch(self, library: str, stream: str) -> None:
        now = self._now[library]
        if now != stream:
            get, put, _ = _LIBRARIES[library]
            self._kept[library, now] = get()
            put(self._kept[library, stream])
            self._now[library] = stream

    def _manual_seed(self, original: Callable[[int], Any], seed: int) -> Any:
        if not self._has_parted:
            return original(seed)
        states = {ALIKE: _torch_state(int(seed)), APART: _torch_state(derive(int(seed), self._rank))}
        generator = original(derive(int(seed), self._rank))
        for stream, state in states.items():
            self._kept["torch", stream] = state
        torch.set_rng_state(states[self._now["torch"]])
        return generator

    def _default_rng(self, original: Callable[..., Any], seed: Any = None) -> Any:
        if seed is not None:
            return original(seed)
        # numpy would draw a different seed on each worker, but a split made with it must be the same on all of them.
        self._generators += 1
        apart = [self._rank] if self._now["numpy"] == APART else []
        return original([self._seed, self._generators, *apart])


class WorkerSeeds:
    """A ``worker_init_fn`` that gives the loader processes of each worker their own random numbers."""

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self._rank = rank
        self._then = then

    def __call__(self, number: int) -> None:
        """Reseed a loader process, then call the script's own function."""
        if self._rank:
            seed = derive(torch.initial_seed(), self._rank)
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
        if self._then is not None:
            self._then(number)
