"""Lets the hundreds of processes that the suite starts do without torch's compiler.

Torch's optimizers and Poseidon's wrappers import ``torch._dynamo`` only to be left out of what it compiles, and that
takes longer than importing torch. Here it is imported as soon as something else of it is used.
"""

import functools
import importlib
import importlib.util
import sys
from types import ModuleType

COMPILER = "torch._dynamo"


class _Later(ModuleType):
    """Stands for the compiler while nothing is compiled."""

    is_imported = False

    def __getattr__(self, name):
        # Who goes through all modules asks for __file__, and the import system for __path__ while it makes this one.
        if name.startswith("__") and not (name == "__path__" and self.is_imported):
            raise AttributeError(name)
        return getattr(import_compiler(), name)

    @staticmethod
    def disable(function=None, *arguments, **options):
        if function is None:  # a decorator's arguments
            return functools.partial(_Later.disable, **options)

        @functools.wraps(function)
        def call(*args, **kwargs):
            compiler = sys.modules[COMPILER]
            if isinstance(compiler, _Later):
                return function(*args, **kwargs)
            return compiler.disable(function, *arguments, **options)(*args, **kwargs)

        return call

    @staticmethod
    def graph_break():
        """Break no graph: none is being made."""


class _Finder:
    """Finds the stand-in, once."""

    @staticmethod
    def find_spec(name, *_):
        return importlib.util.spec_from_loader(name, _Finder) if name == COMPILER else None

    @staticmethod
    def create_module(spec):
        return _Later(spec.name)

    @staticmethod
    def exec_module(module):
        module.is_imported = True


def import_compiler():
    """Import the real one; for good."""
    if _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)
        sys.modules.pop(COMPILER, None)
    return importlib.import_module(COMPILER)


sys.meta_path.insert(0, _Finder)
