"""PyTorch's own tests of its DistributedDataParallel, from its wheel, run against any class, on CPU.

Most of them ask for GPUs but test nothing about them: :func:`_on_cpu` answers ``cuda`` with the CPU while one runs.
They expect processes of their own; here one team runs many in a row (:func:`run_tests`), each in a fresh process group.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import types
import unittest
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import poseidon
from poseidon.planning.cluster import Cluster

WORLD_SIZE = 2
ENVIRONMENT = {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD_SIZE)}
"""Read by the tests' module when it is imported."""
MODULE = "torch.testing._internal.distributed.distributed_test"
_TIMEOUT = timedelta(seconds=30)


def ddp_tests() -> list[str]:
    """Return the names of the tests in torch's wheel that are about DDP: read, not imported, which takes seconds."""
    source = (Path(torch.__file__).parents[1] / Path(*MODULE.split("."))).with_suffix(".py").read_text()
    lines = source.splitlines()
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    methods = {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in classes["_DistTestBase"].body
        if isinstance(node, ast.FunctionDef)
    }
    return sorted(name for name in methods if name.startswith("test") and _uses_ddp(methods, name))


def run_tests(names: Sequence[str], is_torch: bool, folder: Path) -> None:
    """Run tests in a row on this rank; raises for the first that fails.

    Writes each test's name into ``folder`` before it begins: :func:`last_begun` tells which failed or hung.
    """
    os.environ.update(POSEIDON_MACHINE=f"machine of {dist.get_rank()}", POSEIDON_TRIALS="0")
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    dist.destroy_process_group()
    for number, name in enumerate(names):
        (folder / str(rank)).write_text(name)
        prefix = dist.PrefixStore(f"{number}", store)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=WORLD_SIZE, timeout=_TIMEOUT)
        with _on_cpu(), _instead_of_ddp(TorchOnCpu if is_torch else PoseidonOnCpu):
            _run(name, rank)
        dist.barrier()
        dist.destroy_process_group()


def last_begun(folder: Path, names: Sequence[str]) -> str:
    """Return the first test that some rank did not get beyond."""
    begun = [(folder / str(rank)).read_text() for rank in range(WORLD_SIZE) if (folder / str(rank)).exists()]
    return min(begun, key=names.index, default=names[0])


def _module() -> Any:
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        # torch's test classes inherit from its class, whose own assertion no test here uses.
        stand_in: Any = types.ModuleType("expecttest")
        stand_in.TestCase, stand_in.ACCEPT = unittest.TestCase, False
        sys.modules.setdefault("expecttest", stand_in)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        return importlib.import_module(MODULE)


def _uses_ddp(methods: dict[str, str], name: str) -> bool:
    """Return whether a method, or a helper that it calls, makes a model distributed."""
    source = methods[name]
    helpers = [helper for helper in re.findall(r"self\.(_\w+)\(", source) if helper in methods and helper != name]
    return "DistributedDataParallel(" in source or any(_uses_ddp(methods, helper) for helper in helpers)


def _run(name: str, rank: int) -> None:
    from torch.testing._internal.common_utils import TestCase

    module = _module()

    class Case(TestCase, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        world_size = WORLD_SIZE
        file_name = ""

        def _barrier(self, *_: Any, **__: Any) -> None:
            dist.barrier()

    case = Case(name)
    case.rank = rank
    torch.manual_seed(0)
    # Without the decorators, which skip where there is no GPU, or repeat with other levels of logging.
    method = inspect.unwrap(getattr(Case, name))
    method(case)


class TorchOnCpu(TorchDDP):
    """Torch's class, which refuses device numbers for a model on the CPU."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


class PoseidonOnCpu(poseidon.DistributedDataParallel):
    """Poseidon's class, likewise, on a slow link: linear layers and embeddings take their short forms.

    The link is given and no plan is tried, because some tests expect two wrappers of one model to round alike.
    """

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        super().__init__(module, cluster=Cluster(WORLD_SIZE), **options)


@contextlib.contextmanager
def _instead_of_ddp(replacement: type) -> Iterator[None]:
    """Make the tests find another class where they look for torch's."""
    with contextlib.ExitStack() as stack:
        for place in (_module(), torch.nn.parallel, torch.nn.parallel.distributed):
            stack.enter_context(mock.patch.object(place, "DistributedDataParallel", replacement))
        yield


@contextlib.contextmanager
def _on_cpu() -> Iterator[None]:
    module = _module()
    to_tensor, to_module = torch.Tensor.to, nn.Module.to
    with contextlib.ExitStack() as stack:

        def patch(place: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(place, name, value))

        patch(module, "torch", _TorchOnCpu())
        patch(module, "init_multigpu_helper", lambda size, _: {rank: [rank] for rank in range(size)})
        patch(module, "autocast", functools.partial(torch.autocast, "cpu"))
        patch(torch.Tensor, "cuda", lambda self, *_, **__: self)
        patch(torch.Tensor, "to", lambda self, *args, **kwargs: to_tensor(self, *_here(args), **_here(kwargs)))
        patch(torch, "Stream", _NoStream)
        patch(dist, "new_subgroups", functools.partial(dist.new_subgroups, group_size=WORLD_SIZE))
        patch(nn.SyncBatchNorm, "convert_sync_batchnorm", lambda model: model)
        patch(torch.accelerator, "current_stream", _NoStream)
        patch(nn.Module, "cuda", lambda self, *_, **__: self)
        patch(nn.Module, "to", lambda self, *args, **kwargs: to_module(self, *_here(args), **_here(kwargs)))
        stack.enter_context(mock.patch.dict(os.environ, TEMP_DIR=stack.enter_context(tempfile.TemporaryDirectory())))
        yield


def _here(arguments: Any) -> Any:
    """Return a call's arguments with the CPU for every device."""
    if isinstance(arguments, dict):
        return {name: _here((value,))[0] if name == "device" else value for name, value in arguments.items()}
    return tuple("cpu" if _is_cuda(value) else value for value in arguments)


def _is_cuda(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return (isinstance(value, int) and not isinstance(value, bool)) or str(value).startswith("cuda")


class _TorchOnCpu(types.ModuleType):
    """The torch that the tests' module sees."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _NoCuda()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if inspect.isbuiltin(found) or inspect.isfunction(found):
            return lambda *args, **kwargs: found(*args, **_here(kwargs))
        return found

    def device(self, *args: Any) -> torch.device:
        return torch.device("cpu") if _is_cuda(args[0]) else torch.device(*args)


class _NoStream(contextlib.nullcontext[None]):
    """A stream where there is only one."""

    def wait_stream(self, _: Any) -> None:
        pass


class _NoCuda:
    """What the tests ask torch.cuda for."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return WORLD_SIZE

    def device(self, _: Any) -> Any:
        return contextlib.nullcontext()

    def set_device(self, _: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def synchronize(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)
