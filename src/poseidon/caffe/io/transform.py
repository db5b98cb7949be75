"""The transformations of ``transform_param``: crop, mirror, mean, scale."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.blob import Blob
from poseidon.caffe.io.datum import Values
from poseidon.caffe.io.images import Mode
from poseidon.caffe.schema import BlobProto
from poseidon.caffe.schema.files import read_binary
from poseidon.caffe.schema.messages import TransformationParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

Array = NDArray[np.float32]


class Transform:
    """Crops, mirrors, subtracts the mean and scales, in this order; random exactly where Caffe is."""

    def __init__(self, param: TransformationParameter, is_training: bool, rank: int = 0) -> None:
        if param.force_color and param.force_gray:
            raise ConfigError("transform_param sets both force_color and force_gray; choose one")
        self._crop: int = param.crop_size
        self._mirror: bool = param.mirror
        self._scale = np.float32(param.scale)
        self._mean = mean_of(param)
        self._has_mean_image = param.HasField("mean_file")
        self._crops_anywhere = is_training and self._crop > 0
        self._random = random_stream(rank) if self._mirror or self._crops_anywhere else None

    def shape(self, values_shape: tuple[int, ...], origin: str) -> tuple[int, int, int]:
        """Return the shape that values of the given shape (channels, height, width) will have."""
        channels, height, width = values_shape
        if height < self._crop or width < self._crop:
            raise ConfigError(f"{origin}: {height} x {width} (height x width) is less than crop_size {self._crop}")
        return (channels, self._crop or height, self._crop or width)

    def __call__(self, values: Values, out: Array, origin: str) -> None:
        """Write the transformed values to ``out``, which must have the shape that ``shape`` returns."""
        wanted = self.shape(values.shape, origin)
        if wanted != out.shape:
            raise ConfigError(
                f"{origin}: gives shape {wanted} (channels, height, width) in a batch whose first record gives "
                f"{out.shape}; use records of one size, crop_size, or batch_size 1"
            )
        _, height, width = values.shape
        mirrored = self._mirror and self._draw(2) == 1
        top, left = self._offsets(height, width)
        window = np.s_[:, top : top + out.shape[1], left : left + out.shape[2]]
        target = out[:, :, ::-1] if mirrored else out
        if self._mean is None:
            np.multiply(values[window], self._scale, out=target, casting="unsafe", dtype=np.float32)
            return
        np.subtract(values[window], self._mean_window(values.shape, window, origin), out=target, dtype=np.float32)
        if self._scale != 1:
            target *= self._scale

    def _offsets(self, height: int, width: int) -> tuple[int, int]:
        if not self._crop:
            return 0, 0
        if self._crops_anywhere:
            return self._draw(height - self._crop + 1), self._draw(width - self._crop + 1)
        return (height - self._crop) // 2, (width - self._crop) // 2

    def _mean_window(self, shape: tuple[int, ...], window: Any, origin: str) -> Array:
        assert self._mean is not None
        if not self._has_mean_image:
            if len(self._mean) not in (1, shape[0]):
                raise ConfigError(
                    f"{origin}: has {shape[0]} channels, transform_param gives {len(self._mean)} times mean_value; "
                    "give it once or once per channel"
                )
            return self._mean
        if self._mean.shape != shape:
            raise ConfigError(
                f"{origin}: has shape {shape} (channels, height, width), the mean in mean_file {self._mean.shape}"
            )
        part: Array = self._mean[window]
        return part

    def _draw(self, below: int) -> int:
        assert self._random is not None
        return int(self._random.integers(below))


def decode_mode(param: TransformationParameter) -> Mode:
    """Return the mode in which to decode encoded records."""
    if param.force_color:
        return "color"
    return "gray" if param.force_gray else "native"


def mean_of(param: TransformationParameter) -> Array | None:
    """Return the mean of a TransformationParameter, as (channels, height, width); (n, 1, 1) for mean_value."""
    if param.mean_file and param.mean_value:
        raise ConfigError("transform_param gives both mean_file and mean_value; choose one")
    if param.mean_value:
        return np.asarray(param.mean_value, np.float32).reshape(-1, 1, 1)
    if not param.HasField("mean_file"):
        return None
    log.info("Loading mean file from: %s", param.mean_file)
    blob = Blob()
    try:
        blob.from_proto(read_binary(param.mean_file, BlobProto))
    except ConfigError as error:
        raise ConfigError(f"mean_file {param.mean_file}: {error}") from None
    return blob.data.reshape(blob.channels, blob.height, blob.width)


def random_stream(rank: int) -> np.random.Generator:
    """Return a generator derived from the seed set for fillers, different for each worker."""
    seed = int(torch.randint(2**62, ()).item())
    return np.random.default_rng([seed, rank])
