"""Copies CUDA tensors to the wire and back through pinned memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import torch
from torch import Tensor

from poseidon.routes.base import Exchange
from poseidon.sums.events import Waiter, record
from poseidon.team.team import Team


class Stager:
    """Moves buckets between the device and pinned memory, on its own streams and thread."""

    def __init__(self) -> None:
        self._hosts: dict[int, Tensor] = {}
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._waiter = Waiter("poseidon-stager")

    def start(
        self, flat: Tensor, number: int, between: Callable[[Tensor], Future[None]], team: Team, name: str
    ) -> Exchange:
        """Copy ``flat`` out, sum it with ``between`` and copy it back, off the compute stream.

        Buckets with the same ``number`` share memory, so only one of them may be under way.
        """
        out, back = self._streams_of(flat.device)
        host = self._host_for(number, flat)
        out.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(out):
            host.copy_(flat, non_blocking=True)
            copied = record(out)
        future: Future[torch.cuda.Event] = Future()

        def land(summed: Future[None]) -> None:
            try:
                summed.result()
                with torch.cuda.device(flat.device), torch.cuda.stream(back):
                    flat.copy_(host, non_blocking=True)
                    done = record(back)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(done)

        self._waiter.put(copied, lambda: between(host).add_done_callback(land), future.set_exception)
        return StagedExchange(team, future, name, flat.device)

    def forget(self) -> None:
        """Free the memory of earlier slots; exchanges under way keep theirs."""
        self._hosts.clear()

    def close(self) -> None:
        """Stop the thread."""
        self._waiter.close()

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))
        return self._streams[device]

    def _host_for(self, number: int, flat: Tensor) -> Tensor:
        if number not in self._hosts:
            self._hosts[number] = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        return self._hosts[number]


class StagedExchange(Exchange):
    """An exchange that ends with a CUDA event; only the compute stream waits for it."""

    def __init__(self, team: Team, future: Future[torch.cuda.Event], name: str, device: torch.device) -> None:
        self._team = team
        self._future = future
        self._name = name
        self._device = device

    def finish(self, is_used: bool) -> None:  # noqa: ARG002
        """Make the compute stream wait for the bucket."""
        done = self._team.result(self._future, self._name)
        torch.cuda.current_stream(self._device).wait_event(done)
