"""Images per second of a Caffe data layer: an encoded LMDB, cropped and mirrored at random, and a raw one.

::

    python benchmarks/caffe_input.py [--images 4000] [--seconds 5]

Beside it, in the same run and in turns: OpenCV decoding alone on one core (times the cores: what is possible), and a
plain torch DataLoader with 2 workers that decodes with OpenCV, or with Pillow, from the same records. The last lines
say where the processor's time goes, stage by stage, measured on one thread. Needs a quiet machine, except for those.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import poseidon.caffe as caffe
from poseidon.caffe.io.batches import BatchBuffers, Row, Sample, SampleBatch
from poseidon.caffe.io.database import new_database, open_database
from poseidon.caffe.io.datum import datum_values, encoded_datum, image_datum, read_datum
from poseidon.caffe.io.draws import Draws
from poseidon.caffe.io.images import decode_image, encode_image
from poseidon.caffe.io.transform import Transform
from poseidon.caffe.schema.messages import TransformationParameter

SIZE, CROP, BATCH = 256, 227, 128
CORES = len(os.sched_getaffinity(0))


def pictures(count: int) -> Iterator[np.ndarray]:
    """Yield images that compress about as well as photographs."""
    random = np.random.default_rng(1)
    for _ in range(count):
        coarse = cv2.resize(random.integers(0, 256, (24, 24, 3)).astype(np.uint8), (SIZE, SIZE), interpolation=2)
        grain = random.integers(-6, 7, coarse.shape)
        yield np.clip(coarse + grain, 0, 255).astype(np.uint8)


def make(folder: Path, count: int) -> tuple[str, str, list[bytes]]:
    """Write the encoded and the raw database; return their paths and the JPEGs."""
    encoded, raw = str(folder / "encoded"), str(folder / "raw")
    distinct = list(pictures(64))
    jpegs = [encode_image(one, "jpg") for one in distinct]
    with new_database("lmdb", encoded) as writer:
        for number in range(count):
            datum = encoded_datum(jpegs[number % len(jpegs)], number % 1000)
            writer.put(b"%08d" % number, datum.SerializeToString())
    with new_database("lmdb", raw) as writer:
        for number in range(count // 2):
            datum = image_datum(distinct[number % len(distinct)], number % 1000)
            writer.put(b"%08d" % number, datum.SerializeToString())
    return encoded, raw, jpegs


def layer_rate(source: str, seconds: float) -> float:
    """Return the images per second that a net finds."""
    net = net_of(source)
    return rate(lambda: net.forward() and BATCH, seconds, warm=6)


def paced(source: str, images_per_s: float, steps: int = 15, rounds: int = 3) -> float:
    """Return how much longer training from a source takes than from memory where another device computes, here a pause.

    The two nets take turns, a round each; while one does, the other has read ahead and waits.
    """
    pause = BATCH / images_per_s
    nets = {"source": net_of(source), "memory": net_in_memory()}
    taken: dict[str, list[float]] = {name: [] for name in nets}
    for number in range(rounds + 1):
        for name, net in nets.items():
            # What was read ahead during the other's turn is no part of the rate.
            for _ in range(8):
                net.forward()
            began = time.perf_counter()
            for _ in range(steps):
                net.forward()
                time.sleep(pause)
            if number:
                taken[name].append(time.perf_counter() - began)
    return statistics.median(taken["source"]) / statistics.median(taken["memory"]) - 1


def net_in_memory() -> Any:
    """Return a net whose images are there before it starts."""
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(
            'layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param { '
            f"shape {{ dim: {BATCH} dim: 3 dim: {CROP} dim: {CROP} }} shape {{ dim: {BATCH} }} }} }}"
        )
        file.flush()
        return caffe.Net(file.name, caffe.TRAIN)


def net_of(source: str) -> Any:
    """Return a net of the data layer alone."""
    with tempfile.NamedTemporaryFile("w", suffix=".prototxt") as file:
        file.write(
            'layer { name: "data" type: "Data" top: "data" top: "label" '
            f"transform_param {{ crop_size: {CROP} mirror: true mean_value: 104 mean_value: 117 mean_value: 123 }} "
            f'data_param {{ source: "{source}" backend: LMDB batch_size: {BATCH} }} }}'
        )
        file.flush()
        return caffe.Net(file.name, caffe.TRAIN)


def rate(step: Callable[[], int], seconds: float, warm: int = 1) -> float:
    """Return how many a second ``step`` does, which says how many it did."""
    for _ in range(warm):
        step()
    done, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        done += step()
    return done / passed


class Encoded(Dataset[torch.Tensor]):
    """JPEGs, decoded, cropped, mirrored and normalised as people write it."""

    def __init__(self, jpegs: list[bytes], count: int, with_opencv: bool) -> None:
        self.jpegs, self.count, self.with_opencv = jpegs, count, with_opencv
        self.mean = torch.tensor([104.0, 117.0, 123.0]).view(3, 1, 1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        content = self.jpegs[index % len(self.jpegs)]
        if self.with_opencv:
            pixels = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
        else:
            pixels = np.array(Image.open(io.BytesIO(content)))
        top, left = torch.randint(SIZE - CROP + 1, (2,)).tolist()
        values = torch.from_numpy(pixels[top : top + CROP, left : left + CROP]).permute(2, 0, 1).float() - self.mean
        return values.flip(2) if torch.rand(()) < 0.5 else values.contiguous()


def loader_rate(jpegs: list[bytes], with_opencv: bool, seconds: float) -> float:
    """Return the images per second of a torch DataLoader with 2 workers."""
    loader = DataLoader(Encoded(jpegs, 1_000_000, with_opencv), batch_size=BATCH, num_workers=2, prefetch_factor=4)
    batches = iter(loader)
    return rate(lambda: len(next(batches)), seconds, warm=8)


def opencv_rate(jpegs: list[bytes], seconds: float) -> float:
    """Return the images per second that OpenCV decodes on one core, into memory and nothing else."""
    arrays = [np.frombuffer(one, np.uint8) for one in jpegs]
    return rate(lambda: len([cv2.imdecode(one, cv2.IMREAD_COLOR) for one in arrays]), seconds)


def stages(encoded: str, raw: str, jpegs: list[bytes]) -> dict[str, float]:
    """Return microseconds of processor time for each image and stage, on one thread."""
    param = TransformationParameter(crop_size=CROP, mirror=True, mean_value=[104, 117, 123])
    transform = Transform(param, True)
    out = np.empty((3, CROP, CROP), np.float32)
    pixels = decode_image(jpegs[0], "native").transpose(2, 0, 1)
    arrays = [np.frombuffer(one, np.uint8) for one in jpegs]
    times = {"OpenCV's decoding alone": spent_each(lambda: (cv2.imdecode(one, cv2.IMREAD_COLOR) for one in arrays * 4))}
    for name, source in (("encoded", encoded), ("raw", raw)):
        database = open_database("lmdb", source)
        times[f"{name}: read"] = spent_each(database.records)
        value = bytes(next(database.records())[1])
        times[f"{name}: parse"] = spent(lambda value=value: read_datum(value, ""))
        datum = read_datum(value, "")
        records = [
            read_datum(bytes(value), "") for value, _ in zip((v for _, v in database.records()), jpegs, strict=False)
        ]
        times[f"{name}: decode"] = spent_each(
            lambda records=records: (datum_values(one, "native", "") for one in records)
        )
        values = pixels if name == "encoded" else datum_values(datum, "native", "")
        times[f"{name}: transform"] = spent(lambda values=values: transform(values, out, "", Draws(1, 1)))
        buffers = BatchBuffers()
        times[f"{name}: all"] = spent_each(lambda given=(database, transform, buffers): filled(*given))
    return times


def filled(database: Any, transform: Transform, buffers: BatchBuffers) -> Iterator[None]:
    """Make batches of a database on this thread alone; yield once for each image."""
    records = enumerate(database.records())

    def rows() -> Iterator[Row]:
        for number, (_, value) in records:
            yield Row(number, lambda value=value: loaded(value))

    source = rows()
    for _ in range(database.count // BATCH):
        batch = SampleBatch(source, transform, BATCH, buffers)
        for part in batch.parts():
            part()
        yield from [None] * BATCH


def loaded(value: bytes) -> Sample:
    """Return a record's sample."""
    datum = read_datum(value, "")
    return Sample(datum_values(datum, "native", ""), datum.label, "")


def spent(step: Callable[[], Any], times: int = 400) -> float:
    """Return the processor time of one ``step`` in microseconds."""
    step()
    began = time.thread_time()
    for _ in range(times):
        step()
    return (time.thread_time() - began) / times * 1e6


def spent_each(items: Callable[[], Iterator[Any]]) -> float:
    """Return the processor time of one item in microseconds; the first pass brings the files into memory."""
    for _ in items():
        pass
    began = time.thread_time()
    count = sum(1 for _ in items())
    return (time.thread_time() - began) / max(1, count) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each system runs in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stages-only", action="store_true", help="processor times only: for a busy machine")
    args = parser.parse_args()
    cv2.setNumThreads(1)
    caffe.set_mode_cpu()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        encoded, raw, jpegs = make(Path(folder), args.images)
        print(f"{CORES} cores, OpenCV {cv2.__version__}, JPEGs of {sum(map(len, jpegs)) // len(jpegs)} bytes")
        rates: dict[str, list[float]] = {}
        for _ in range(0 if args.stages_only else args.rounds):
            for name, measure in (
                ("OpenCV alone, one core", lambda: opencv_rate(jpegs, args.seconds)),
                ("data layer, encoded", lambda: layer_rate(encoded, args.seconds)),
                ("data layer, raw", lambda: layer_rate(raw, args.seconds)),
                ("DataLoader, 2 workers, OpenCV", lambda: loader_rate(jpegs, True, args.seconds)),
                ("DataLoader, 2 workers, Pillow", lambda: loader_rate(jpegs, False, args.seconds)),
            ):
                rates.setdefault(name, []).append(measure())
        best = {name: max(values) for name, values in rates.items()}
        for name, value in best.items():
            print(f"{name:32s} {value:8.0f} images/s")
        if best:
            possible = best["OpenCV alone, one core"] * CORES
            print(f"encoded: {best['data layer, encoded'] / possible:.2f} of cores x OpenCV's rate ({possible:.0f})")
            for share in (0.25, 0.5, 0.75, 0.9):
                pace = best["data layer, encoded"] * share
                longer = paced(encoded, pace)
                print(f"a net that computes {pace:.0f} images/s takes {longer:+.1%} longer than with images in memory")
        times = stages(encoded, raw, jpegs)
        for name, value in times.items():
            print(f"{name:32s} {value:8.1f} us of processor time per image")
        print(json.dumps({"cores": CORES, "images_per_s": best, "stage_us": times}))


if __name__ == "__main__":
    main()
