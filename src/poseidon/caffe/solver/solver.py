"""The loop of a solver: train a net, test it, log as Caffe does, write and resume from snapshots."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from poseidon.caffe import weights
from poseidon.caffe.layers.data import PrefetchingLayer
from poseidon.caffe.pycaffe import Net
from poseidon.caffe.replay import ReplayedPasses
from poseidon.caffe.schema import SolverParameter
from poseidon.caffe.solver import nets, state
from poseidon.caffe.solver.net_outputs import LossWindow, NetOutput, label_outputs, log_outputs, output_values
from poseidon.caffe.solver.policies import check_policy, learning_rate
from poseidon.caffe.solver.rules import RULES
from poseidon.caffe.solver.updater import ParameterUpdater
from poseidon.caffe.solver.workers import Action, ActionFunction, SoleWorker, Workers
from poseidon.caffe.upgrade import read_solver
from poseidon.errors import ConfigError
from poseidon.files import came_of_full_disk
from poseidon.job.tell import tell

log = logging.getLogger("poseidon.caffe")

OutputListener = Callable[[str, int, Sequence[NetOutput]], None]
"""Takes "train" or "test N", the iteration, and the outputs (means over all workers)."""
Connect = Callable[["Solver"], Workers]


class Solver:
    """Trains a net; built from a solver's prototxt file or a SolverParameter.

    ``connect`` joins the workers of a job; by default the solver joins those of torch's default process group, if any.
    """

    type: ClassVar[str] = ""

    def __init__(self, definition: str | os.PathLike[str] | SolverParameter, connect: Connect | None = None) -> None:
        self.param: SolverParameter = definition if isinstance(definition, SolverParameter) else read_solver(definition)
        self.iter = 0
        self._step = 0
        self._workers: Workers = SoleWorker()
        self._wanted: ActionFunction = _no_action
        self._is_stopped = False
        self._on_start: list[Callable[[], None]] = []
        self._on_gradients: list[Callable[[], None]] = []
        self.output_listeners: list[OutputListener] = []
        log.info("Initializing solver from parameters: \n%s", self.param)
        self._check()
        self._losses = LossWindow(self.param.average_loss)
        if self.param.random_seed >= 0:
            torch.manual_seed(self.param.random_seed + _rank())
        self.net = self._build_train_net()
        self.test_nets = [self._build_test_net(i, source) for i, source in enumerate(nets.test_sources(self.param))]
        self._replayed = ReplayedPasses(self.net)
        self._updater = ParameterUpdater(self.net.learnable, RULES[self.type](self.param), self.param)
        self._workers = (connect or _connect_default_group)(self)
        self._share_seeds()
        log.info("Solver scaffolding done.")

    # The interface of pycaffe.

    @property
    def lr(self) -> float:
        """The learning rate of the next iteration, before any ``lr_mult``."""
        return learning_rate(self.param, self.iter, self._step).value

    @property
    def smoothed_loss(self) -> float:
        """The mean of this worker's last ``average_loss`` losses."""
        return self._losses.mean

    @property
    def is_root(self) -> bool:
        """Whether this worker writes the job's files."""
        return self._workers.is_root

    def add_callback(self, on_start: Callable[[], None], on_gradients_ready: Callable[[], None]) -> None:
        """Call the first before each iteration's passes, the second when its gradients are complete."""
        self._on_start.append(on_start)
        self._on_gradients.append(on_gradients_ready)

    def set_action_function(self, wanted: ActionFunction) -> None:
        """Call ``wanted`` after every iteration to learn what to do (see ``signals.py``)."""
        self._wanted = wanted

    def share_weights(self, net: Net) -> None:
        """Make another net share this solver's parameter values from now on."""
        weights.share(net, self.net)

    def step(self, iterations: int) -> None:
        """Run ``iterations`` iterations, with their tests, displays and snapshots."""
        if iterations < 0:
            raise ConfigError(f"a solver cannot run {iterations} iterations; expected 0 or more")
        self._losses = LossWindow(self.param.average_loss)
        clock = _Clock(self.iter)
        stop = self.iter + iterations
        if iterations > 1 and self.is_root:  # a script that steps one by one does not say how many there are
            tell(steps_left=iterations)
        while self.iter < stop:
            self.net.clear_param_diffs()
            if self._is_test_due() and (self.iter or self.param.test_initialization):
                self.test_all()
                if self._is_stopped:
                    return
            action = self._iterate(clock)
            self.apply_update()
            self._heed(action())
            if self._is_stopped:
                return

    def solve(self, resume_file: str | os.PathLike[str] | None = None) -> None:
        """Train up to ``max_iter``, then snapshot, show the loss and test, if the settings say so."""
        param = self.param
        log.info("Solving %s", self.net.name)
        log.info("Learning Rate Policy: %s", param.lr_policy)
        self._is_stopped = False
        if param.snapshot_after_train:
            self._check_snapshot_folder()
        if resume_file is not None:
            log.info("Restoring previous solver status from %s", resume_file)
            self.restore(resume_file)
        self.step(max(0, param.max_iter - self.iter))
        if param.snapshot_after_train and not (param.snapshot and self.iter % param.snapshot == 0):
            self.snapshot()
        if self._is_stopped:
            log.info("Optimization stopped early.")
            return
        if param.display and self.iter % param.display == 0:
            self._losses.add(self.net.run_forward())
            (loss,) = self._workers.average([self._losses.mean])
            log.info("Iteration %d, loss = %g", self.iter, loss)
        if self._is_test_due():
            self.test_all()
        log.info("Optimization Done.")

    def apply_update(self) -> None:
        """Update the parameters by the gradients in the net, and count one iteration."""
        step = self._step
        rate, self._step = learning_rate(self.param, self.iter, step)
        if self.param.lr_policy == "multistep" and self._step != step:
            log.info("MultiStep Status: Iteration %d, step = %d", self.iter, self._step)
        if self._is_display_due():
            log.info("Iteration %d, lr = %g", self.iter, rate)
        self._updater.apply(rate, self.iter)
        self._workers.end_update()
        self.iter += 1

    def test_all(self) -> None:
        """Run every test net over its ``test_iter`` batches and log the mean outputs."""
        self._workers.settle()
        for number in range(len(self.test_nets)):
            self._test(number)
            if self._is_stopped:
                return

    def snapshot(self) -> None:
        """As worker 0, write parameters and state under ``snapshot_prefix`` and the iteration."""
        self._workers.settle()
        if not self._workers.is_root:
            return
        self._check_snapshot_folder()
        sources = {
            layer.name: state.SourceProgress(layer.records_read, layer.seed)
            for layer in self._data_layers()
            if layer.records_read
        }
        progress = state.SolverProgress(self.iter, self._step, sources)
        state.write_snapshot(self.net, self._updater.history, progress, self.param)

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Restore iteration, history and parameters from a state file; worker 0 reads it for all.

        Data layers of the training net go on with the records that follow.
        """
        layers = self._data_layers()
        progress = state.SolverProgress(self.iter, self._step)
        if self._workers.is_root:
            progress = state.read_snapshot(path, self.net, self._updater.history)
        blobs = [entry.blob for entry in self.net.learnable] + self._updater.history
        stored = [progress.sources.get(layer.name, state.SourceProgress(-1)) for layer in layers]
        self.iter, self._step, *numbers = self._workers.take_from_root(
            [progress.iteration, progress.step, *[number for source in stored for number in source]],
            [blob.data_tensor for blob in blobs],
        )
        # A state of Caffe's own does not say, and Caffe begins with the first record again.
        for layer, records, seed in zip(layers, numbers[::2], numbers[1::2], strict=True):
            if records >= 0:
                layer.continue_after(records, seed if seed >= 0 else layer.seed)

    def _share_seeds(self) -> None:
        """Make all workers read the same sequence of records, each its part."""
        layers = self._data_layers()
        for layer, seed in zip(layers, self._workers.take_from_root([each.seed for each in layers], []), strict=True):
            if seed != layer.seed:
                layer.continue_after(0, seed)

    def _data_layers(self) -> list[PrefetchingLayer]:
        return [layer for layer in self.net.layers if isinstance(layer, PrefetchingLayer)]

    def close(self) -> None:
        """Leave the other workers, if any, and drop all callbacks; the nets stay usable."""
        self._workers.close()
        self._workers = SoleWorker()
        # Callbacks may refer back to the solver; its data layers would then prefetch until the next collection.
        for calls in (self._on_start, self._on_gradients, self.output_listeners):
            calls.clear()

    # One iteration.

    def _iterate(self, clock: _Clock) -> ActionFunction:
        """Compute the gradients of one iteration; return a function that tells what to do after it."""
        action = self._workers.ask(self._wanted)
        for call in self._on_start:
            call()
        self.net.debug_info = self._is_display_due() and self.param.debug_info
        self._workers.begin_iteration()
        loss = 0.0
        passes: int = self.param.iter_size
        for number in range(passes):
            loss += self._pass(is_last=number == passes - 1)
        self._workers.end_iteration()
        self._losses.add(loss / passes)
        if self._is_display_due():
            self._display(clock)
        for call in self._on_gradients:
            call()
        return action

    def _pass(self, is_last: bool) -> float:
        """Compute forward and backward; return the loss."""
        replayed = self._replayed.run() if isinstance(self._workers, SoleWorker) else None
        if replayed is not None:
            return replayed
        loss = self.net.run_forward()
        self._workers.begin_backward(is_last)
        self.net.run_backward()
        return loss

    def _display(self, clock: _Clock) -> None:
        values = self._workers.average([self._losses.mean, *output_values(self.net).tolist()])
        seconds, per_second = clock.lap(self.iter)
        log.info(
            "Iteration %d (%g iter/s, %gs/%d iters), loss = %g",
            self.iter,
            per_second,
            seconds,
            self.param.display,
            values[0],
        )
        outputs = label_outputs(self.net, values[1:])
        log_outputs("Train", outputs)
        self._tell("train", outputs)

    def _heed(self, action: Action) -> None:
        is_due = self.param.snapshot and self.iter % self.param.snapshot == 0
        if is_due or action == Action.SNAPSHOT:
            self._snapshot_on_the_way()
        self._is_stopped |= action == Action.STOP

    def _snapshot_on_the_way(self) -> None:
        """Write a snapshot; a full disk ends no training, except with its last snapshot."""
        try:
            self.snapshot()
        except ConfigError as error:
            if self.iter >= self.param.max_iter or not came_of_full_disk(error):
                raise
            log.warning("Iteration %d: %s; training goes on without this snapshot", self.iter, error)

    def _test(self, number: int) -> None:
        log.info("Iteration %d, Testing net (#%d)", self.iter, number)
        net, passes = self.test_nets[number], self.param.test_iter[number]
        weights.share(net, self.net)
        loss, totals = 0.0, torch.zeros(0)
        for index in range(passes):
            action = self._workers.ask(self._wanted)
            loss += net.run_forward()
            values = output_values(net)
            totals = totals + values if index else values.clone()
            self._heed_in_test(action())
            if self._is_stopped:
                log.info("Test interrupted.")
                return
        means = self._workers.average([loss / max(passes, 1), *(totals / max(passes, 1)).tolist()])
        if self.param.test_compute_loss:
            log.info("Test loss: %g", means[0])
        outputs = label_outputs(net, means[1:]) if passes else []
        log_outputs("Test", outputs)
        self._tell(f"test {number}", outputs)

    def _heed_in_test(self, action: Action) -> None:
        if action == Action.SNAPSHOT:
            self._snapshot_on_the_way()
        self._is_stopped |= action == Action.STOP

    def _tell(self, which: str, outputs: Sequence[NetOutput]) -> None:
        for listener in self.output_listeners:
            listener(which, self.iter, outputs)

    def _is_test_due(self) -> bool:
        return bool(self.param.test_interval) and self.iter % self.param.test_interval == 0

    def _is_display_due(self) -> bool:
        return bool(self.param.display) and self.iter % self.param.display == 0

    # Building.

    def _check(self) -> None:
        param = self.param
        for name in ("average_loss", "iter_size"):
            if getattr(param, name) < 1:
                raise ConfigError(f"{name} is {getattr(param, name)}; it must be at least 1")
        counts = {name: getattr(param, name) for name in ("max_iter", "display", "snapshot", "test_interval")}
        counts |= {f"test_iter {number}": count for number, count in enumerate(param.test_iter)}
        for name, count in counts.items():
            if count < 0:
                raise ConfigError(f"{name} is {count}; it counts iterations, so it must be 0 or more")
        check_policy(param)
        if param.snapshot:
            self._check_snapshot_folder()

    def _check_snapshot_folder(self) -> None:
        folder = Path(self.param.snapshot_prefix).parent
        if _rank() == 0 and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise ConfigError(
                f"cannot write snapshots with snapshot_prefix {self.param.snapshot_prefix!r}: "
                f"make sure that the folder {str(folder)!r} exists and is writable"
            )

    def _build_train_net(self) -> Net:
        source = nets.train_source(self.param)
        joint = "specified in" if source.what == source.origin else "from"
        log.info("Creating training net %s %s", joint, source.what)
        return self._build(source)

    def _build_test_net(self, number: int, source: nets.NetSource) -> Net:
        log.info("Creating test net (#%d) specified by %s", number, source.what)
        net = self._build(source)
        net.debug_info = self.param.debug_info
        return net

    def _build(self, source: nets.NetSource) -> Net:
        try:
            net = Net.from_proto(source.param)
        except ConfigError as error:
            raise ConfigError(f"{source.origin}: {error}") from error
        for entry in self.param.weights:
            for path in entry.split(","):
                log.info("Finetuning from %s", path.strip())
                weights.load(net, path.strip())
        return net


class _Clock:
    """Counts iterations per second from one display to the next."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._began = time.perf_counter()

    def lap(self, iteration: int) -> tuple[float, float]:
        """Return seconds and iterations per second since the last lap."""
        now = time.perf_counter()
        seconds, iterations = now - self._began, iteration - self._iteration
        self._began, self._iteration = now, iteration
        return seconds, iterations / seconds if seconds else 0.0


def _no_action() -> Action:
    return Action.NONE


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _connect_default_group(solver: Solver) -> Workers:
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        from poseidon.caffe.distributed import Together

        return Together(solver.net)
    return SoleWorker()
