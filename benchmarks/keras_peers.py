"""A VGG-like Keras model on emulated machines: ``poseidon.keras`` beside ``tf.distribute.MultiWorkerMirroredStrategy``.

Usage: python benchmarks/keras_peers.py [--machines 4] [--rate 1gbit] [--steps 10] [--repetitions 3] [--output FILE]

Both systems train the same model (convolutions and a head of three large Dense layers) on the same batches, one worker
per machine, in turns. A step's time is that of the slowest machine; bytes are those that a machine's interface has sent
during the measured steps. Needs root, for the machines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from poseidon.lab import Job, Lab
from poseidon.lab.job import JobOptions

SYSTEMS = ("poseidon.keras", "MultiWorkerMirroredStrategy")
WARM_UP = 4
PORT = 23456
MARK = "figures "

Marks = list[tuple[float, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--batch", type=int, default=32, help="samples of one worker")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("keras_peers.json"))
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    return compare(options)


def compare(options: argparse.Namespace) -> int:
    runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    with Lab(machines=options.machines, rate=options.rate) as lab:
        for _ in range(options.repetitions):
            for system in SYSTEMS:
                figures = measure(lab, system, options)
                runs[system].append(figures)
                step, sent = figures["step_s"], figures["sent_bytes"]
                print(f"{system:<28} {step * 1e3:8.0f} ms a step, {sent / 1e6:8.2f} MB sent by a machine", flush=True)
    medians = {s: {k: statistics.median(run[k] for run in runs[s]) for k in ("step_s", "sent_bytes")} for s in SYSTEMS}
    ours, theirs = (medians[system] for system in SYSTEMS)
    result = {
        "what": "VGG-like Keras model, per step; medians over the repetitions in `runs`",
        "command": f"python benchmarks/keras_peers.py --machines {options.machines} --rate {options.rate} "
        f"--batch {options.batch} --steps {options.steps} --repetitions {options.repetitions}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, {options.machines} machines at {options.rate}",
        "batch_per_worker": options.batch,
        "medians": medians,
        "fewer_bytes": theirs["sent_bytes"] / ours["sent_bytes"],
        "faster": theirs["step_s"] / ours["step_s"],
        "runs": runs,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['fewer_bytes']:.1f} times fewer bytes, {result['faster']:.1f} times as fast")
    return 0


def measure(lab: Lab, system: str, options: argparse.Namespace) -> dict[str, float]:
    """Run one system on all machines and return the figures of the slowest."""
    addresses = [lab.address(machine) for machine in range(options.machines)]
    command = [sys.executable, __file__, "--worker", system, "--batch", str(options.batch), "--steps"]
    command += [str(options.steps), "--addresses", *addresses]
    found: list[dict[str, float]] = []
    lines: list[str] = []

    def show(_: Any, line: str) -> None:
        lines.append(line)
        if line.startswith(MARK):
            found.append(json.loads(line.removeprefix(MARK)))

    env = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    outcome = Job(lab, command, JobOptions(timeout_s=600), env, show).run()
    if outcome.status or len(found) != options.machines:
        raise SystemExit("\n".join([f"{system}: {outcome.reason}", *lines[-40:]]))
    return {key: max(figures[key] for figures in found) for key in found[0]}


def work(options: argparse.Namespace) -> None:
    """Train as one worker and print the figures."""
    train = train_ours if options.worker == SYSTEMS[0] else train_theirs
    marks = train(options, int(os.environ["RANK"]))
    seconds, sent = np.subtract(marks[-1], marks[WARM_UP - 1])
    print(MARK + json.dumps({"step_s": seconds / options.steps, "sent_bytes": sent / options.steps}), flush=True)
    # Without the ceremonies of interpreters whose peers are leaving too.
    os._exit(0)


def train_ours(options: argparse.Namespace, rank: int) -> Marks:
    import keras

    import poseidon.keras

    model = build(keras)
    distributed = poseidon.keras.distribute(model, data="own")
    marks = fit(keras, model, make_data(rank, options.batch), options.steps)
    if rank == 0:
        print(distributed.summary())
    return marks


def train_theirs(options: argparse.Namespace, rank: int) -> Marks:
    workers = [f"{address}:{PORT}" for address in options.addresses]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build(keras)
    # A loop of its own, as TensorFlow's guide has it: fit() of Keras 3 fails under this strategy.
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def train_step(images: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.nn.compute_average_loss(losses(labels, model(images, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    run = tf.function(lambda batch: strategy.run(train_step, args=batch))
    # Each worker reads its own batches.
    data = iter(strategy.distribute_datasets_from_function(lambda _: make_data(rank, options.batch)))
    marks = []
    for _ in range(WARM_UP + options.steps):
        run(next(data))
        marks.append((time.perf_counter(), sent_bytes()))
    return marks


def make_data(seed: int, count: int) -> Any:
    import tensorflow as tf

    generator = np.random.default_rng(seed)
    images = generator.normal(size=(count, 56, 56, 3)).astype("float32")
    return tf.data.Dataset.from_tensors((images, generator.integers(0, 1000, count))).repeat()


def fit(keras: Any, model: Any, data: Any, steps: int) -> Marks:
    """Train and return, after each step, the time and the bytes that have been sent."""
    clock = make_clock(keras)
    model.fit(data, steps_per_epoch=WARM_UP + steps, verbose=0, callbacks=[clock])
    marks: Marks = clock.marks
    return marks


def make_clock(keras: Any) -> Any:
    class Clock(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.marks: Marks = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.marks.append((time.perf_counter(), sent_bytes()))

    return Clock()


def build(keras: Any) -> Any:
    layers = keras.layers
    model = keras.Sequential([keras.Input((56, 56, 3))])
    for width in (16, 32, 128):
        model.add(layers.Conv2D(width, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(2048, activation="relu"))
    model.add(layers.Dense(2048, activation="relu"))
    model.add(layers.Dense(1000))
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def sent_bytes() -> float:
    """Return what this machine's interfaces have sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counters = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
    return float(sum(int(fields[8]) for name, fields in counters.items() if name != "lo"))


if __name__ == "__main__":
    sys.exit(main())
