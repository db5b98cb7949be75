"""Run a function on several ranks, as processes on this machine that can talk to each other.

``run_ranks(train, 4, model_name)`` calls ``train(model_name)`` on 4 ranks with a gloo process group and returns
what each returned, by rank. A rank that raises makes the call raise with that rank's traceback; no process outlives
the call, except the nursery.

The nursery is a process that imports PyTorch, Poseidon and the module of the test once, and forks the ranks: a rank
starts in milliseconds instead of seconds. Ranks share nothing else; each starts with fresh state.

With ``POSEIDON_TEST_DEVICE=cuda:0`` a rank makes its tensors there unless it names a device, so tests that name none
can be tried on a GPU.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import compiler_later
import torch
import torch.distributed as dist

# Asking whether there is a GPU must not initialise CUDA: a process that has it cannot fork ranks that use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
_SPAWN = multiprocessing.get_context("spawn")

_PRELOADED = (
    "pytest",
    "torch.distributed.algorithms.join",
    "poseidon.api",
    "poseidon.distributing",
    "poseidon.routes.sharded",
    "poseidon.wire.tcp",
    "poseidon.zoo",
    "twins",
)
_END_S = 10.0
"""For ranks that have reported, to end by themselves: they may have more to write, such as their coverage."""


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 90.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    lost: Sequence[int] = (),
    preload: Sequence[str] = (),
) -> list[Any]:
    """Call ``function(*args)`` on ``size`` ranks and return the results by rank; ``lost`` ones give none.

    ``preload`` names modules that are slow to import and that every rank needs. They are imported once, with ``env``
    already set if it is the same for all ranks, and stay imported for later calls with the same environment. What is
    Poseidon's own (``POSEIDON_...``) is read later, and may differ.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = env if isinstance(env, Sequence) else [env or {}] * size
    nursery = _nursery_for(_seen_by_imports(env) if preload and isinstance(env, Mapping) else {})
    job = _Job(size, store.port, tuple(preload), pickle.dumps((function, args)))
    pipes = nursery.start(job, [dict(one) for one in environments])
    reported: set[int] = set()
    try:
        return _collect(pipes, time.monotonic() + timeout_s, set(lost), reported)
    finally:
        nursery.end(reported)
        for pipe in pipes:
            pipe.close()


def _seen_by_imports(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(("POSEIDON_", "MASTER_"))}


def _collect(pipes: Sequence[Connection], deadline: float, lost: set[int], reported: set[int]) -> list[Any]:
    results: dict[int, Any] = dict.fromkeys(lost)
    errors: dict[int, str] = {}
    while len(results) + len(errors) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results and rank not in errors}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} gave no result in time; {_first(errors)}")
        for pipe in ready:
            rank = waiting[pipe]
            try:
                is_ok, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                is_ok, value = False, "died without a word"
            reported.add(rank)
            (results if is_ok else errors)[rank] = value
        if errors:
            # What follows from the first error is noise, but the first to arrive need not be the first to happen.
            deadline = min(deadline, time.monotonic() + 20.0)
    if errors:
        raise RankError(_first(errors))
    return [results[rank] for rank in range(len(pipes))]


def _first(errors: Mapping[int, str]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, text in errors.items()) or "no rank reported an error"


# The nursery, as the test sees it.


@dataclass(frozen=True)
class _Job:
    size: int
    port: int
    preload: tuple[str, ...]
    call: bytes
    """The pickled function and its arguments."""


class _Nursery:
    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = dict(env)
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_serve, args=(theirs, self.env), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, job: _Job, environments: Sequence[Mapping[str, str]]) -> list[Connection]:
        """Start the ranks of a job; return where each of them reports."""
        pipes = []
        self._pipe.send((job, environments))
        for _ in range(job.size):
            ours, theirs = _SPAWN.Pipe(duplex=False)
            send_handle(self._pipe, theirs.fileno(), self._process.pid)
            theirs.close()
            pipes.append(ours)
        return pipes

    def end(self, reported: Collection[int]) -> None:
        """Return when no rank is left."""
        self._pipe.send(set(reported))
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


_nurseries: dict[str, _Nursery] = {}


def _nursery_for(env: Mapping[str, str]) -> _Nursery:
    """Return the nursery for everybody, or one whose imports have seen an environment; the last of those is kept."""
    kind = "special" if env else "common"
    found = _nurseries.get(kind)
    if found is not None and found.env != dict(env):
        _nurseries.pop(kind).close()
        found = None
    if found is None:
        found = _nurseries[kind] = _Nursery(env)
    return found


# What runs in the nursery and in the ranks.


def _serve(pipe: Connection, env: Mapping[str, str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    if not env:
        compiler_later.import_compiler()  # once for all ranks
    _import(_PRELOADED)
    gc.freeze()  # ranks need not look through it for garbage
    _save_coverage()
    children: dict[int, int] = {}
    try:
        while True:
            job, environments = pipe.recv()
            # For all ranks at once, and the module of the function too; what goes wrong here goes wrong again in the
            # ranks, which tell.
            with contextlib.suppress(Exception):
                _import(job.preload)
                pickle.loads(job.call)
            for rank in range(job.size):
                handle = recv_handle(pipe)
                children[rank] = os.fork()
                if children[rank] == 0:
                    pipe.close()
                    os.set_inheritable(handle, False)
                    _run(job, rank, environments[rank], Connection(handle, readable=False))
                os.close(handle)
            _end(children, pipe.recv())
            pipe.send(None)
    except EOFError:
        _end(children, ())


def _save_coverage() -> None:
    """Write down what is covered so far, if that is measured; or every rank would write it again."""
    if "coverage" in sys.modules and (coverage := sys.modules["coverage"].Coverage.current()) is not None:
        coverage.save()


def _import(modules: Sequence[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def _end(children: dict[int, int], reported: Collection[int]) -> None:
    """Kill the ranks that are left, after some patience with those that were about to end."""
    deadline = time.monotonic() + _END_S
    while children:
        for rank, pid in list(children.items()):
            if rank not in reported or time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                del children[rank]
            elif os.waitpid(pid, os.WNOHANG)[0]:
                del children[rank]
        time.sleep(0.001)


def _run(job: _Job, rank: int, env: Mapping[str, str], pipe: Connection) -> None:
    """Be a rank: call the function, report, end."""
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        place = {"RANK": rank, "WORLD_SIZE": job.size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(env, GLOO_SOCKET_IFNAME="lo", **{name: str(value) for name, value in place.items()})
        torch.set_num_threads(1)
        if "POSEIDON_TEST_DEVICE" in os.environ:
            torch.set_default_device(os.environ["POSEIDON_TEST_DEVICE"])
            torch.backends.cuda.matmul.allow_tf32 = False
        function, args = pickle.loads(job.call)
        store = dist.TCPStore("127.0.0.1", job.port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.size)
        # Nobody may come to its end while another one is still connecting.
        dist.barrier()
        _send(pipe, True, function(*args))
        # What the test has dropped closes itself, and with it goes what is still on its way to slower ranks. In a cycle
        # of references it would not, and ending at once would cut it off.
        gc.collect()
    except BaseException:
        _send(pipe, False, traceback.format_exc())
    finally:
        # Skip interpreter shutdown: a rank whose peers are gone must not linger in their sockets' destructors.
        os._exit(0)


def _send(pipe: Connection, is_ok: bool, value: Any) -> None:
    # Plain pickle: the pickler of multiprocessing shares tensors through a process that is about to end.
    pipe.send_bytes(pickle.dumps((is_ok, value)))
