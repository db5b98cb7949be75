"""The transformations of ``transform_param``: crop, mirror, mean, scale."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poseidon.caffe.blob import Blob
from poseidon.caffe.io.datum import Values
from poseidon.caffe.io.draws import Draws
from poseidon.caffe.io.images import Mode, opencv
from poseidon.caffe.schema import BlobProto
from poseidon.caffe.schema.files import read_binary
from poseidon.caffe.schema.messages import TransformationParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

Array = NDArray[np.float32]

_MOST_CHANNELS = 4
"""More are not an image's."""


class Transform:
    """Crops, mirrors, subtracts the mean and scales, in this order; random exactly where Caffe is. Threads share it."""

    def __init__(self, param: TransformationParameter, is_training: bool) -> None:
        if param.force_color and param.force_gray:
            raise ConfigError("transform_param sets both force_color and force_gray; choose one")
        self._crop: int = param.crop_size
        self._mirror: bool = param.mirror
        self._scale = np.float32(param.scale)
        self._mean = mean_of(param)
        self._has_mean_image = param.HasField("mean_file")
        self._crops_anywhere = is_training and self._crop > 0

    @property
    def is_random(self) -> bool:
        """Whether the result depends on the draws."""
        return self._mirror or self._crops_anywhere

    def shape(self, values_shape: tuple[int, ...], origin: str) -> tuple[int, int, int]:
        """Return the shape that values of the given shape (channels, height, width) will have."""
        channels, height, width = values_shape
        if height < self._crop or width < self._crop:
            raise ConfigError(f"{origin}: {height} x {width} (height x width) is less than crop_size {self._crop}")
        return (channels, self._crop or height, self._crop or width)

    def __call__(self, values: Values, out: Array, origin: str, draws: Draws) -> None:
        """Write the transformed values to ``out``, which must have the shape that ``shape`` returns.

        ``draws`` decide about crop and mirroring.
        """
        _, height, width = values.shape
        is_mirrored = self._mirror and draws.below(2) == 1
        if self._crops_anywhere:
            top, left = draws.below(height - self._crop + 1), draws.below(width - self._crop + 1)
        elif self._crop:
            top, left = (height - self._crop) // 2, (width - self._crop) // 2
        else:
            top = left = 0
        window = np.s_[:, top : top + out.shape[1], left : left + out.shape[2]]
        if values.dtype == np.uint8:
            # Bytes are put in order before they become floats, which take four times as long to move.
            np.copyto(out, arranged(values[window], is_mirrored, _SCRATCH))
        else:
            np.copyto(out, _reversed(values[window]) if is_mirrored else values[window], casting="unsafe")
        if self._mean is not None:
            np.subtract(out, self._mean_window(values.shape, window, origin, is_mirrored), out=out)
        if self._scale != 1:
            np.multiply(out, self._scale, out=out)

    def _mean_window(self, shape: tuple[int, ...], window: Any, origin: str, is_mirrored: bool) -> Array:
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
        # Caffe subtracts the mean where the crop was before it is mirrored.
        part: Array = self._mean[window]
        return _reversed(part) if is_mirrored else part


class ThreadMemory(threading.local):
    """Memory of a thread for bytes on their way: new memory would be cold, and old is at hand in the cache."""

    def __init__(self) -> None:
        self._planes = self._flipped = np.empty((0, 0, 0), np.uint8)

    def planes(self, shape: tuple[int, ...]) -> Values:
        """Return an array with any content, which lasts until this thread asks again."""
        if self._planes.shape != shape:
            self._planes = np.empty(shape, np.uint8)
        return self._planes

    def flipped(self, shape: tuple[int, ...]) -> Values:
        """Return another one."""
        if self._flipped.shape != shape:
            self._flipped = np.empty(shape, np.uint8)
        return self._flipped


_SCRATCH = ThreadMemory()


def arranged(values: Values, is_mirrored: bool, scratch: ThreadMemory) -> Values:
    """Return bytes (channels, height, width) in this order in memory too, mirrored if wanted.

    They may be a view of an image with its channels last. OpenCV is several times faster here than NumPy. The result
    may be in the scratch memory.
    """
    channels, height, width = values.shape
    pixels = values.transpose(1, 2, 0)
    is_image = 1 < channels <= _MOST_CHANNELS and pixels.strides[1:] == (channels, 1)
    if not values.size or not (is_image or is_mirrored):
        return values
    cv2 = opencv()
    result = scratch.planes((channels, height, width))
    if is_image:
        cv2.split(cv2.flip(pixels, 1, dst=scratch.flipped(pixels.shape)) if is_mirrored else pixels, list(result))
    else:
        for plane, target in zip(values, result, strict=True):
            cv2.flip(plane, 1, dst=target)
    return result


def _reversed(values: NDArray[Any]) -> NDArray[Any]:
    return values[:, :, ::-1]


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
