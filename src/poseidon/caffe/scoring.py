"""Run a net without training it: score its outputs over some batches, or time its layers."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import torch

from poseidon.caffe.net import BuiltNet
from poseidon.caffe.solver.net_outputs import label_outputs, output_values

log = logging.getLogger("poseidon.caffe")


def score(net: BuiltNet, iterations: int) -> None:
    """Run ``iterations`` batches forward; log the outputs of each, then their means."""
    log.info("Running for %d iterations.", iterations)
    loss, totals = 0.0, torch.zeros(0)
    for number in range(iterations):
        loss += net.run_forward()
        values = output_values(net)
        totals = totals + values if number else values.clone()
        for output in label_outputs(net, values.tolist()):
            log.info("Batch %d, %s = %g", number, output.name, output.value)
    log.info("Loss: %g", loss / iterations)
    for output in label_outputs(net, (totals / iterations).tolist()):
        log.info("%s = %g%s", output.name, output.value, output.loss_note)


@dataclass
class LayerTimes:
    """Milliseconds spent in each layer, summed over iterations."""

    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    total_forward: float = 0.0
    total_backward: float = 0.0
    total: float = 0.0


def benchmark(net: BuiltNet, iterations: int) -> LayerTimes:
    """Time forward and backward of every layer over ``iterations`` passes and log Caffe's report.

    As in Caffe, every layer goes backward, also where no loss asks for it, as in a net for deployment: it then computes
    the gradients of its parameters from gradients of zero.
    """
    for layer in net.layers:
        layer.needs_backward = layer.needs_backward or any(layer.param_propagate_down)
    log.info("Performing Forward")
    # Warm up first: the first pass allocates memory and lets libraries choose their algorithms.
    log.info("Initial loss: %g", net.run_forward())
    log.info("Performing Backward")
    _fill_gradients(net)
    net.run_backward()
    log.info("*** Benchmark begins ***")
    log.info("Testing for %d iterations.", iterations)
    times = LayerTimes([0.0] * len(net.layers), [0.0] * len(net.layers))
    began = _now()
    for number in range(1, iterations + 1):
        start = _now()
        _time_pass(net, times)
        log.info("Iteration: %d forward-backward time: %g ms.", number, _now() - start)
    times.total = _now() - began
    _log_report(net, times, iterations)
    return times


def _time_pass(net: BuiltNet, times: LayerTimes) -> None:
    start = mark = _now()
    for index in range(len(net.layers)):
        net.run_forward(index, index)
        times.forward[index] += -mark + (mark := _now())
    middle = mark
    times.total_forward += middle - start
    _fill_gradients(net)
    mark = middle = _now()
    for index in reversed(range(len(net.layers))):
        net.run_backward(index, index)
        times.backward[index] += -mark + (mark := _now())
    times.total_backward += mark - middle


def _fill_gradients(net: BuiltNet) -> None:
    """Write zeros where nobody writes gradients: a layer skips what nobody has written."""
    for index, layer in enumerate(net.layers):
        for top in net.tops_of(index) if layer.needs_backward else ():
            if not top.has_diff:
                top.put_diff(torch.zeros_like(top.data_tensor))


def _log_report(net: BuiltNet, times: LayerTimes, iterations: int) -> None:
    log.info("Average time per layer: ")
    for layer, forward, backward in zip(net.layers, times.forward, times.backward, strict=True):
        log.info("%10s\tforward: %g ms.", layer.name, forward / iterations)
        log.info("%10s\tbackward: %g ms.", layer.name, backward / iterations)
    log.info("Average Forward pass: %g ms.", times.total_forward / iterations)
    log.info("Average Backward pass: %g ms.", times.total_backward / iterations)
    log.info("Average Forward-Backward: %g ms.", times.total / iterations)
    log.info("Total Time: %g ms.", times.total)
    log.info("*** Benchmark ends ***")


def _now() -> float:
    """Return the time in milliseconds after the device has finished its queued work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() * 1000
