"""Snapshots in Caffe's formats: parameters, and a solver's state (``.solverstate``, ``.solverstate.h5``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from poseidon.caffe import weights
from poseidon.caffe.blob import Blob, stored_values
from poseidon.caffe.extras import require
from poseidon.caffe.io import hdf5_files
from poseidon.caffe.io.draws import MOST_SEED
from poseidon.caffe.memory import Array
from poseidon.caffe.net import BuiltNet
from poseidon.caffe.schema import SolverParameter, SolverState
from poseidon.caffe.schema.files import read_binary, write_binary
from poseidon.caffe.schema.messages import RecordsRead
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_GROUP = "history"
_RECORDS = "records_read"
_SEEDS = "seeds"


class SourceProgress(NamedTuple):
    """How far a data layer is; Caffe ignores this in files."""

    records: int
    """How many all workers together have taken."""
    seed: int = -1
    """Decides about order, crops and mirroring; -1: not known."""


class SolverProgress(NamedTuple):
    """A solver's counters: its state apart from parameters and history."""

    iteration: int
    step: int
    """Steps that the learning-rate policy has taken."""
    sources: Mapping[str, SourceProgress] = {}
    """By data layer."""


class Stored(NamedTuple):
    """What a state file holds, checked against the solver but not yet taken over."""

    progress: SolverProgress
    learned_net: str
    """The file of the parameters; empty: none."""
    history: list[Array]


def write_snapshot(net: BuiltNet, history: Sequence[Blob], progress: SolverProgress, param: SolverParameter) -> None:
    """Write parameters and state to the files that the solver's settings name; each write is atomic."""
    stem = f"{param.snapshot_prefix}_iter_{progress.iteration}"
    is_hdf5 = param.snapshot_format == SolverParameter.HDF5
    form, suffix = ("HDF5", ".h5") if is_hdf5 else ("binary proto", "")
    model_file, state_file = f"{stem}.caffemodel{suffix}", f"{stem}.solverstate{suffix}"
    # Parameters first: a state must never name an incomplete file.
    log.info("Snapshotting to %s file %s", form, model_file)
    (weights.save_hdf5 if is_hdf5 else weights.save)(net, model_file, param.snapshot_diff)
    log.info("Snapshotting solver state to %s file %s", form, state_file)
    (_write_hdf5 if is_hdf5 else _write_binary)(state_file, progress, model_file, history)


def read_snapshot(path: str | os.PathLike[str], net: BuiltNet, history: Sequence[Blob]) -> SolverProgress:
    """Fill ``history`` from a state file of either format, and the net from the parameters that it names."""
    read = _read_hdf5 if str(path).endswith(".h5") else _read_binary
    progress, learned_net, values = read(path, history)
    for layer, source in progress.sources.items():
        if not 0 <= source.records < 2**62:
            raise ConfigError(f"{path}: states {source.records} records read by layer {layer!r}; the file is damaged")
        if not -1 <= source.seed < MOST_SEED:
            raise ConfigError(f"{path}: states seed {source.seed} for layer {layer!r}; the file is damaged")
    if progress.iteration < 0 or progress.step < 0:
        raise ConfigError(
            f"{path}: states iteration {progress.iteration} and step {progress.step}, expected 0 or more; "
            "the file is damaged or not a solver's state"
        )
    # The parameters next: if they cannot be loaded, the history stays as it is too.
    if learned_net:
        weights.load(net, find_learned_net(learned_net, path))
    log.info("SGDSolver: restoring history")
    for blob, stored in zip(history, values, strict=True):
        blob.data.flat[...] = stored
    return progress


def find_learned_net(learned_net: str, state_path: str | os.PathLike[str]) -> str:
    """Return the path of a state's parameters: the one it names or, if both files were moved, one beside the state."""
    beside = Path(state_path).parent / Path(learned_net).name
    return str(beside) if not Path(learned_net).exists() and beside.exists() else learned_net


def _write_binary(path: str, progress: SolverProgress, learned_net: str, history: Sequence[Blob]) -> None:
    state = SolverState(iter=progress.iteration, learned_net=learned_net, current_step=progress.step)
    state.history.extend([blob.to_proto() for blob in history])
    state.records_read.extend(
        [RecordsRead(layer=name, records=source.records, seed=source.seed) for name, source in progress.sources.items()]
    )
    write_binary(path, state)


def _read_binary(path: str | os.PathLike[str], history: Sequence[Blob]) -> Stored:
    state = read_binary(path, SolverState)
    _check_count(path, len(state.history), len(history))
    values = []
    for number, (blob, stored) in enumerate(zip(history, state.history, strict=True)):
        if not blob.fits(stored):
            raise _misfit(path, number, blob, tuple(stored.shape.dim))
        try:
            values.append(stored_values(stored, "data"))
        except ConfigError as error:
            raise ConfigError(f"{path}: history {number}: {error}") from None
    sources = {
        each.layer: SourceProgress(each.records, each.seed if each.HasField("seed") else -1)
        for each in state.records_read
    }
    return Stored(SolverProgress(state.iter, state.current_step, sources), state.learned_net, values)


def _write_hdf5(path: str, progress: SolverProgress, learned_net: str, history: Sequence[Blob]) -> None:
    with hdf5_files.writing(path, "solver state") as file:
        file.create_dataset("iter", data=np.array([progress.iteration], np.int32))
        _write_c_string(require("h5py"), file, "learned_net", learned_net)
        file.create_dataset("current_step", data=np.array([progress.step], np.int32))
        group = file.create_group(_GROUP)
        for number, blob in enumerate(history):
            group.create_dataset(str(number), data=blob.data)
        if progress.sources:
            # Attributes, since the name of a layer may hold slashes.
            for group_name, position in ((_RECORDS, 0), (_SEEDS, 1)):
                numbers = {layer: source[position] for layer, source in progress.sources.items()}
                file.create_group(group_name).attrs.update(numbers)


def _read_hdf5(path: str | os.PathLike[str], history: Sequence[Blob]) -> Stored:
    origin = str(path)
    with hdf5_files.reading(path, "solver state") as file:
        missing = [name for name in ("iter", _GROUP) if name not in file]
        if missing:
            raise ConfigError(f"{path}: has no {missing[0]!r}; Caffe did not write this solver state")
        group = hdf5_files.group_of(file, _GROUP, origin)
        _check_count(path, len(group), len(history))
        values = []
        for number, blob in enumerate(history):
            stored = hdf5_files.numbers_of(group, str(number), origin)
            if tuple(stored.shape) != blob.shape:
                raise _misfit(path, number, blob, tuple(stored.shape))
            values.append(hdf5_files.values_of(stored).reshape(-1))
        step = hdf5_files.single_of(file, "current_step", origin) if "current_step" in file else 0
        learned_net = file["learned_net"][()].decode() if "learned_net" in file else ""
        records, seeds = (
            hdf5_files.group_of(file, name, origin).attrs if name in file else {} for name in (_RECORDS, _SEEDS)
        )
        sources = {
            str(layer): SourceProgress(int(count), int(seeds.get(layer, -1))) for layer, count in records.items()
        }
        progress = SolverProgress(hdf5_files.single_of(file, "iter", origin), step, sources)
        return Stored(progress, learned_net, values)


def _write_c_string(h5py: Any, file: Any, name: str, text: str) -> None:
    """Write a string with its terminating zero, without which Caffe would read past its end."""
    content = text.encode() + b"\0"
    kind = h5py.h5t.C_S1.copy()
    kind.set_size(len(content))
    kind.set_strpad(h5py.h5t.STR_NULLTERM)
    dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create(h5py.h5s.SCALAR))
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.array(content, f"S{len(content)}"), kind)


def _check_count(path: str | os.PathLike[str], stored: int, expected: int) -> None:
    if stored != expected:
        raise ConfigError(
            f"{path}: holds {stored} history blobs, this solver has {expected}; "
            "was it written by another type of solver or for another net?"
        )


def _misfit(path: str | os.PathLike[str], number: int, blob: Blob, stored: tuple[int, ...]) -> ConfigError:
    return ConfigError(f"{path}: history {number} has shape {stored}, this net's parameter has {blob.shape}")
