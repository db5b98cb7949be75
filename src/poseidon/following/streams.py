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
import json
import random
import zlib
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


def _read_devices() -> list[Any]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _write_devices(states: list[Any]) -> None:
    for number, state in enumerate(states):
        if isinstance(state, int):
            torch.cuda.manual_seed_all(state)  # takes effect when they are first used
        else:
            torch.cuda.set_rng_state(state, number)


def _device_states(seed: int) -> list[Any]:
    """Return the states of all CUDA devices for a seed; if none is in use yet, the seed."""
    if not torch.cuda.is_initialized():
        return [seed]
    return [torch.Generator(f"cuda:{n}").manual_seed(seed).get_state() for n in range(torch.cuda.device_count())]


def _name_state(state: Any) -> int:
    return zlib.crc32(state.numpy().data)


_SAVED = 512
"""Saved states of torch's generator to remember; checkpointed layers save one each."""

_LIBRARIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state, _torch_state),
    "random": (random.getstate, random.setstate, _random_state),
    "numpy": (np.random.get_state, np.random.set_state, _numpy_state),
    "cuda": (_read_devices, _write_devices, _device_states),
}
"""Per library: read the state of its global generator, write it, and derive a state from a seed."""
_COMPARED = ("torch", "random", "numpy")
"""Those of which all workers must be at the same place; they need not have the same devices."""
_OF_TORCH = ("torch", "cuda")


class Streams:
    """The two streams of each library and which of them is in use."""

    def __init__(self, rank: int, seed: int) -> None:
        self._rank = rank
        self._seed = seed
        self._now = dict.fromkeys(_LIBRARIES, ALIKE)
        self._kept: dict[tuple[str, str], Any] = {}
        self._seeds: dict[str, int] = {}
        """By stream: what torch was seeded with last, for devices that are first used later."""
        self._has_parted = False
        self._is_using = False
        """Whether a context chooses the stream."""
        self._saved: dict[int, Any] = {}
        """By the script's saved states of torch's generator: the state of *alike* at that time."""
        self._generators = 0
        self.before_seeding: Callable[[], None] = lambda: None
        """Called when the script seeds torch after training has begun."""

    def install(self, patches: Patches) -> None:
        """Seed all libraries equally on all workers, and keep the streams apart when the script seeds later."""
        torch.manual_seed(self._seed)
        random.seed(self._seed)
        np.random.seed(self._seed % 2**32)
        patches.wrap(torch, "manual_seed", self._manual_seed)
        patches.replace(torch.random, "manual_seed", torch.manual_seed)
        patches.wrap(np.random, "default_rng", self._default_rng)
        for name, around in (("get_rng_state", self._get_state), ("set_rng_state", self._set_state)):
            patches.wrap(torch, name, around)
            patches.replace(torch.random, name, getattr(torch, name))

    def part(self) -> None:
        """Start training: from now on each worker draws its own noise."""
        if not self._has_parted:
            self._separate()
        if not self._is_using:
            self._switch_torch(APART)

    def rejoin(self) -> None:
        """Take back :meth:`part`: it was no training yet."""
        if self._has_parted and not self._is_using:
            self._switch_torch(ALIKE)

    def _separate(self) -> None:
        self._has_parted = True
        self._seeds = {ALIKE: torch.initial_seed(), APART: derive(torch.initial_seed(), self._rank)}
        for library, (_, _, state_of) in _LIBRARIES.items():
            self._kept[library, APART] = self._read(library, APART) if self._rank == 0 else state_of(self._seeds[APART])

    @contextlib.contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """Draw from one stream, in all libraries, inside this context."""
        if not self._has_parted:
            yield
            return
        before = dict(self._now)
        was_using, self._is_using = self._is_using, True
        for library in _LIBRARIES:
            self._switch(library, stream)
        try:
            yield
        finally:
            self._is_using = was_using
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

    def mark(self) -> int:
        """Return a number that tells where this worker's *alike* is."""
        return zlib.crc32(self.alike_as_bytes())

    def alike_as_bytes(self) -> bytes:
        """Return where *alike* is, as plain data for the other workers."""
        return json.dumps({library: _as_plain(self._alike(library)) for library in _COMPARED}).encode()

    def go_on_from(self, data: bytes) -> None:
        """Go on where another worker's *alike* is."""
        for library, plain in json.loads(data).items():
            state = _from_plain(plain)
            if self._now[library] == ALIKE:
                _LIBRARIES[library][1](state)
            else:
                self._kept[library, ALIKE] = state

    def _alike(self, library: str) -> Any:
        return _LIBRARIES[library][0]() if self._now[library] == ALIKE else self._kept[library, ALIKE]

    def _switch_torch(self, stream: str) -> None:
        for library in _OF_TORCH:
            self._switch(library, stream)

    def _switch(self, library: str, stream: str) -> None:
        now = self._now[library]
        if now != stream:
            self._kept[library, now] = self._read(library, now)
            _LIBRARIES[library][1](self._kept[library, stream])
            self._now[library] = stream

    def _read(self, library: str, stream: str) -> Any:
        """Return the state of a generator that is in a stream."""
        get, _, state_of = _LIBRARIES[library]
        state = get()
        return state_of(self._seeds[stream]) if isinstance(state, list) and not state else state

    def _manual_seed(self, original: Callable[[int], Any], seed: int) -> Any:
        if not self._has_parted:
            return original(seed)
        self.before_seeding()
        self._seeds = {ALIKE: int(seed), APART: derive(int(seed), self._rank)}
        generator = original(self._seeds[APART])
        for library in _OF_TORCH:
            _, put, state_of = _LIBRARIES[library]
            for stream, own in self._seeds.items():
                self._kept[library, stream] = state_of(own)
            put(self._kept[library, self._now[library]])
        return generator

    def _get_state(self, original: Callable[[], Any]) -> Any:
        """Remember, with a state that the script saves, where the stream that decides on samples is."""
        state = original()
        is_alike = self._now["torch"] == ALIKE
        self._saved[_name_state(state)] = state if is_alike else self._kept["torch", ALIKE]
        if len(self._saved) > _SAVED:
            del self._saved[next(iter(self._saved))]
        return state

    def _set_state(self, original: Callable[[Any], Any], state: Any) -> None:
        """Restore both streams: what happened in between, an evaluation for example, leaves no trace in the order."""
        original(state)
        alike = self._saved.get(_name_state(state))
        if alike is not None and self._now["torch"] == APART:
            self._kept["torch", ALIKE] = alike

    def _default_rng(self, original: Callable[..., Any], seed: Any = None) -> Any:
        if seed is not None:
            return original(seed)
        # numpy would draw a different seed on each worker, but a split made with it must be the same on all of them.
        self._generators += 1
        apart = [self._rank] if self._now["numpy"] == APART else []
        return original([self._seed, self._generators, *apart])


def _as_plain(state: Any) -> Any:
    """Return a generator's state as plain data; torch's, which is a tensor, as text."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes().hex()
    return [list(map(int, part)) if isinstance(part, tuple | np.ndarray) else part for part in state]


def _from_plain(plain: Any) -> Any:
    if isinstance(plain, str):
        return torch.frombuffer(bytearray.fromhex(plain), dtype=torch.uint8)
    return tuple(tuple(part) if isinstance(part, list) else part for part in plain)


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
