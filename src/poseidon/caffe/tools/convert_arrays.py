"""Write MNIST and CIFAR-10, as their authors publish them, to databases."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from pathlib import Path

from poseidon import files
from poseidon.caffe.io.database import new_database
from poseidon.caffe.schema import Datum
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_MNIST_IMAGES, _MNIST_LABELS = 2051, 2049
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_CIFAR_TEST = ("test_batch.bin",)


def convert_mnist(image_file: str, label_file: str, database: str, backend: str) -> int:
    """Write the digits of an image file and a label file, both unpacked; return how many."""
    images = files.read_bytes(image_file, "MNIST images")
    labels = files.read_bytes(label_file, "MNIST labels")
    count, rows, columns = _header(images, _MNIST_IMAGES, "IIII", image_file)
    (label_count,) = _header(labels, _MNIST_LABELS, "II", label_file)
    if count != label_count:
        raise ConfigError(
            f"{image_file} holds {count} images, {label_file} {label_count} labels; do they belong together?"
        )
    _check_size(image_file, images, 16 + count * rows * columns)
    _check_size(label_file, labels, 8 + count)
    log.info("A total of %d items.", count)
    log.info("Rows: %d Cols: %d", rows, columns)
    size = rows * columns
    with new_database(backend, database) as writer:
        for number in range(count):
            start = 16 + number * size
            datum = Datum(
                channels=1, height=rows, width=columns, data=images[start : start + size], label=labels[8 + number]
            )
            writer.put(b"%08d" % number, datum.SerializeToString())
    log.info("Processed %d files.", count)
    return count


def convert_cifar(folder: str, output_folder: str, backend: str) -> tuple[int, int]:
    """Write CIFAR-10's binary version as ``cifar10_train_BACKEND`` and ``cifar10_test_BACKEND``; return their sizes."""
    counts = []
    for name, sources in (("train", _CIFAR_TRAIN), ("test", _CIFAR_TEST)):
        log.info("Writing %s data", "Training" if name == "train" else "Testing")
        count = 0
        with new_database(backend, str(Path(output_folder) / f"cifar10_{name}_{backend}")) as writer:
            for record in _cifar_records(Path(folder), sources):
                channels, height, width = _CIFAR_SHAPE
                datum = Datum(channels=channels, height=height, width=width, data=record[1:], label=record[0])
                writer.put(b"%05d" % count, datum.SerializeToString())
                count += 1
        counts.append(count)
    return counts[0], counts[1]


def _cifar_records(folder: Path, names: tuple[str, ...]) -> Iterator[bytes]:
    for name in names:
        content = files.read_bytes(folder / name, "CIFAR-10 batch")
        if not content or len(content) % _CIFAR_RECORD:
            raise ConfigError(
                f"{folder / name}: has {len(content)} bytes, expected a multiple of {_CIFAR_RECORD}: records of a "
                "label and 32 x 32 pixels in 3 colours, from CIFAR-10's binary version"
            )
        for start in range(0, len(content), _CIFAR_RECORD):
            yield content[start : start + _CIFAR_RECORD]


def _header(content: bytes, magic: int, form: str, path: str) -> tuple[int, ...]:
    found = int.from_bytes(content[:4], "big")
    if found != magic or len(content) < struct.calcsize(f">{form}"):
        advice = "; unpack it with gunzip first" if content[:2] == b"\x1f\x8b" else ""
        raise ConfigError(
            f"{path}: begins with {found} and has {len(content)} bytes, "
            f"expected {magic}: a file of MNIST's form{advice}"
        )
    return tuple(struct.unpack_from(f">{form}", content)[1:])


def _check_size(path: str, content: bytes, expected: int) -> None:
    if len(content) != expected:
        raise ConfigError(f"{path}: has {len(content)} bytes, and by what it states should have {expected}; truncated?")
