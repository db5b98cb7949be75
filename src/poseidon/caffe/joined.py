"""The common base of workers that train one Caffe net, whether they stay in step or drift apart."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from poseidon.caffe.net import BuiltNet
from poseidon.team.agree import check_same_model, describe
from poseidon.team.epochs import refuse_elastic
from poseidon.team.mirror import mirror_all, mirror_different
from poseidon.team.team import Team


class JoinedWorkers:
    """One worker of torch's default process group (see ``solver/workers.py`` for the calls).

    The constructor is collective: it copies worker 0's parameters and raises if the workers' nets differ.
    """

    def __init__(self, net: BuiltNet, timeout_s: float | None) -> None:
        refuse_elastic("a Caffe net")
        self._net = net
        self._team = Team(None, timeout_s)
        learnable = net.learnable
        names = [f"{net.layers[entry.layer_index].name}.{entry.param_index}" for entry in learnable]
        tensors = [entry.blob.data_tensor for entry in learnable]
        check_same_model(self._team, describe(list(zip(names, tensors, strict=True))))
        mirror_different(self._team, tensors, 0, "the initial parameters")

    @property
    def is_root(self) -> bool:
        """Whether this worker writes files and logs."""
        return self._team.rank == 0

    @property
    def rank(self) -> int:
        """The number of this worker."""
        return self._team.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._team.size

    def average(self, values: Sequence[float]) -> list[float]:
        """Return the means of the values over all workers, added in rank order so that all get the same bits."""
        words = struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))
        rows = self._team.gather_ints(words, "the others' outputs")
        everybody = [struct.unpack(f"{len(row)}d", struct.pack(f"{len(row)}q", *row)) for row in rows]
        return [sum(column) / self._team.size for column in zip(*everybody, strict=True)]

    def take_from_root(self, numbers: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the root's numbers and make the tensors equal to the root's."""
        mirror_all(self._team, tensors, 0, "the solver's state")
        return self._team.gather_ints(numbers, "the solver's state")[0]
