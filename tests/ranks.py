"""Run a function on several ranks, as processes on this machine that can talk to each other.

``run_ranks(train, 4, model_name)`` calls ``train(model_name)`` on 4 ranks with a gloo process group and returns
what each returned, by rank. A rank that raises makes the call raise with that rank's traceback; no process outlives
the call.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

# Children are forked from a server that has imported these once: a rank starts in milliseconds instead of seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.algorithms.join", "poseidon.api", "poseidon.zoo", "ranks"])


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float = 90.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
    lost: Sequence[int] = (),
) -> list[Any]:
    """Call ``function(*args)`` on ``size`` ranks and return the results by rank; ``lost`` ones give none."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environments = env if isinstance(env, Sequence) else [env or {}] * size
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        target = (rank, size, store.port, dict(environments[rank]), theirs, function, args)
        process = _CONTEXT.Process(target=_child, args=target, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _collect(pipes, time.monotonic() + timeout_s, set(lost))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(pipes: Sequence[Connection], deadline: float, lost: set[int]) -> list[Any]:
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
            (results if is_ok else errors)[rank] = value
        if errors:
            # What follows from the first error is noise, but the first to arrive need not be the first to happen.
            deadline = min(deadline, time.monotonic() + 20.0)
    if errors:
        raise RankError(_first(errors))
    return [results[rank] for rank in range(len(pipes))]


def _first(errors: Mapping[int, str]) -> str:
    return "\n".join(f"rank {rank}: {text}" for rank, text in errors.items()) or "no rank reported an error"


def _send(pipe: Connection, is_ok: bool, value: Any) -> None:
    # Plain pickle: the pickler of multiprocessing shares tensors through a process that is about to end.
    pipe.send_bytes(pickle.dumps((is_ok, value)))


def _child(
    rank: int, size: int, port: int, env: dict[str, str], pipe: Connection, function: Callable[..., Any], args: Any
) -> None:
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        _send(pipe, True, function(*args))
    except BaseException:
        _send(pipe, False, traceback.format_exc())
    finally:
        # Skip interpreter shutdown: a rank whose peers are gone must not linger in their sockets' destructors.
        os._exit(0)
