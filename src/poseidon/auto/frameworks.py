"""Frameworks besides PyTorch: hooked when the script imports them, and never imported otherwise."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team

if TYPE_CHECKING:
    from poseidon.tensorflow.datasets import Datasets

Aside = Callable[[], contextlib.AbstractContextManager[None]]
"""Returns a context in which the PyTorch hooks ignore backward passes."""


class Follower(Protocol):
    """The hooks for scripts of one framework."""

    @property
    def has_trained(self) -> bool:
        """Whether the workers have taken any step together."""

    def install(self, patches: Patches) -> None:
        """Install the hooks."""

    def conclude(self) -> None:
        """Check at the end that the workers hold the same. Collective."""


class Frameworks:
    """Hooks TensorFlow and Keras when they are imported."""

    def __init__(self, team: Team, options: AutoOptions, seed: int, report: ScriptReport, aside: Aside) -> None:
        self._team = team
        self._options = options
        self._seed = seed
        self._report = report
        self._aside = aside
        self._followers: list[Follower] = []
        self._datasets: Datasets | None = None
        self._keras_waits = False

    @property
    def has_trained(self) -> bool:
        """Whether a script of another framework has trained."""
        return any(follower.has_trained for follower in self._followers)

    def install(self, patches: Patches) -> None:
        """Start waiting for the imports."""
        if self._team.rank:
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # its C++ part knows nothing of a silenced stderr
        if "OMP_NUM_THREADS" in os.environ:  # the launcher divides a machine's cores between its workers
            os.environ.setdefault("TF_NUM_INTRAOP_THREADS", os.environ["OMP_NUM_THREADS"])
        watch_import(patches, "tensorflow", lambda: self._follow_tensorflow(patches))
        watch_import(patches, "keras", lambda: self._follow_keras(patches))

    def conclude(self) -> None:
        """Check at the end that the workers hold the same. Collective."""
        for follower in self._followers:
            follower.conclude()

    def _follow_tensorflow(self, patches: Patches) -> None:
        from poseidon.tensorflow.following import Following

        following = Following(self._team, self._options, self._seed, self._report)
        self._datasets = following.datasets
        self._follow(following, patches)
        if self._keras_waits:
            self._follow_keras(patches)

    def _follow_keras(self, patches: Patches) -> None:
        self._keras_waits = "tensorflow" in sys.modules and self._datasets is None
        if self._keras_waits:
            return  # it is TensorFlow, still being imported, that imports Keras
        from poseidon.auto.keras_models import KerasModels

        self._follow(KerasModels(self._team, self._options, self._report, self._aside), patches)
        if sys.modules["keras"].backend.backend() == "tensorflow":
            from poseidon.tensorflow.eager import EagerLoops

            assert self._datasets is not None  # Keras has imported TensorFlow
            rate = float(self._team.size) if self._options.scale_lr else 1.0
            self._follow(EagerLoops(self._team, self._datasets, self._report, rate), patches)

    def _follow(self, follower: Follower, patches: Patches) -> None:
        if self._options.lossy is not None and not self._followers:
            # Not refused: a script for PyTorch may import TensorFlow just to write its logs.
            self._report.say("--lossy is for PyTorch: gradients of Keras and TensorFlow models travel exactly")
        follower.install(patches)
        self._followers.append(follower)


def watch_import(patches: Patches, name: str, then: Callable[[], None]) -> None:
    """Call ``then`` right after a module's first import, or now if it is already imported."""
    if name in sys.modules:
        then()
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    patches.on_undo(lambda: sys.meta_path.remove(finder) if finder in sys.meta_path else None)


class _Finder(importlib.abc.MetaPathFinder):
    """Adds an action to the loader of one module; finds nothing itself."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then: Callable[[], None] | None = then
        self._is_asking = False

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        """Return the other finders' spec of the module; a lookup does not mean that it will be imported."""
        if fullname != self._name or self._is_asking or self._then is None:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            spec.loader = _Loader(loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


class _Loader(importlib.abc.Loader):
    """Loads a module, then runs an action."""

    def __init__(self, loader: Any, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code, then the action."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
