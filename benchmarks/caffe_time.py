"""Time forward + backward of Caffe's LeNet and CIFAR-10 quick with ``poseidon time``, many runs, the nets in turn.

::

    python benchmarks/caffe_time.py --runs 20

The training nets of ``examples/caffe`` are used, with inputs of 100 images in place of their databases. Real Caffe 1.0
(CPU, OpenBLAS) took 46.1 ms and 244 ms on the same kind of machine.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples" / "caffe"
NETS = {
    "LeNet": (EXAMPLES / "mnist" / "lenet_train_test.prototxt", (1, 28, 28), 46.1),
    "CIFAR-10 quick": (EXAMPLES / "cifar10_quick" / "train_test.prototxt", (3, 32, 32), 244.0),
}
"""Name to the net, the shape of an image, and Caffe's ms."""
BATCH = 100


def without_database(source: Path, image: tuple[int, ...]) -> str:
    """Return the net with plain inputs instead of its data layers."""
    from google.protobuf import text_format

    from poseidon.caffe.upgrade import read_net

    net = read_net(source)
    layers = [layer for layer in net.layer if layer.type not in ("Data", "Accuracy")]
    del net.layer[:]
    for name, shape in (("data", (BATCH, *image)), ("label", (BATCH,))):
        layer = net.layer.add(name=name, type="Input", top=[name])
        layer.input_param.shape.add(dim=shape)
    net.layer.extend(layers)
    return text_format.MessageToString(net)


def time_net(path: Path, iterations: int) -> float:
    """Return the mean ms of one forward + backward."""
    command = [sys.executable, "-m", "poseidon.cli", "time", f"--model={path}", f"--iterations={iterations}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = re.search(r"Average Forward-Backward: ([\d.]+) ms", done.stderr)
    assert found is not None, done.stderr
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in NETS}
    with tempfile.TemporaryDirectory() as folder:
        for name, (source, image, _) in NETS.items():
            (Path(folder) / f"{name}.prototxt").write_text(without_database(source, image))
        for run in range(1, arguments.runs + 1):
            for name in NETS:
                times[name].append(time_net(Path(folder) / f"{name}.prototxt", arguments.iterations))
            print(f"run {run}: " + ", ".join(f"{name} {times[name][-1]:.1f} ms" for name in NETS), flush=True)
    for name, (_, _, caffe) in NETS.items():
        median = statistics.median(times[name])
        print(
            f"{name}: median {median:.1f} ms ({min(times[name]):.1f} .. {max(times[name]):.1f}), "
            f"Caffe {caffe} ms: {median / caffe:.2f} of its time"
        )
    if arguments.output:
        arguments.output.write_text(json.dumps({"batch": BATCH, "ms": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
