"""Lets the hundreds of processes that the suite starts import large libraries without looking for garbage.

What they make stays, so to look through it, again and again as it grows, is for nothing: a tenth of torch's import.
Later looks do without it too.
"""

import gc
import importlib.machinery
import sys

LARGE = {"jax", "keras", "tensorflow", "torch"}


class _Finder:
    """Finds large libraries where they are."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in LARGE else None
        if spec is not None and spec.has_location:
            spec.loader.exec_module = _without_looking(spec.loader.exec_module)
        return spec


def _without_looking(execute):
    def import_all(module):
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            execute(module)
        finally:
            gc.freeze()
            if was_enabled:
                gc.enable()

    return import_all


sys.meta_path.insert(0, _Finder)
