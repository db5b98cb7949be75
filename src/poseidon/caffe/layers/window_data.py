"""WindowData: random windows of images, a fixed part of each batch showing objects."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from poseidon.caffe.io.batches import Batches, Tensors
from poseidon.caffe.io.draws import Draws
from poseidon.caffe.io.images import Image, decode_image, read_bytes
from poseidon.caffe.io.prefetch import Part
from poseidon.caffe.io.sharding import Share, this_worker
from poseidon.caffe.io.transform import mean_of
from poseidon.caffe.io.windows import ImageWindow, WindowCrop, WindowFile, read_windows
from poseidon.caffe.layers.data import DataStream, PrefetchingLayer
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import TransformationParameter, WindowDataParameter
from poseidon.errors import ConfigError, unknown_name

log = logging.getLogger("poseidon.caffe")

Array = NDArray[np.float32]
_CROP_MODES = ("square", "warp")
_CHANNELS = 3


@register("WindowData")
class WindowData(PrefetchingLayer):
    """Samples background windows (label 0), then foreground windows, cut out and scaled to ``crop_size``.

    Windows are sampled from the whole file, so workers share it without dividing it.
    """

    def open(self) -> DataStream:
        settings, transform = self.param.window_data_param, self.param.transform_param
        batch_size = self.batch_size(settings)
        crop = _crop_of(settings, transform.crop_size)
        source = self.locate(settings).path
        file = read_windows(source)
        if file.channels != _CHANNELS:
            raise ConfigError(f"{source}: states {file.channels} channels; images are read in colour, with 3")
        background, foreground = _sorted_windows(file, settings, source)
        files = _ImageFiles(settings.root_folder, file.images, settings.cache_images)
        mean = _mean_for(transform, crop.size)
        sampler = _Sampler(
            files,
            background,
            foreground,
            crop,
            np.float32(settings.scale),
            mean,
            transform.mirror,
            source,
            batch_size,
            int(np.float32(batch_size) * np.float32(settings.fg_fraction)),
            Share(this_worker().rank, this_worker().size),
        )
        return DataStream([(batch_size, _CHANNELS, crop.size, crop.size), (batch_size,)], sampler.batches, True)


def _crop_of(settings: WindowDataParameter, crop_size: int) -> WindowCrop:
    if settings.crop_mode not in _CROP_MODES:
        raise unknown_name("crop_mode", settings.crop_mode, _CROP_MODES)
    if crop_size <= 2 * settings.context_pad:
        raise ConfigError(
            f"transform_param's crop_size is {crop_size}; it must be positive and more than twice "
            f"context_pad {settings.context_pad}"
        )
    return WindowCrop(crop_size, settings.context_pad, settings.crop_mode == "square")


def _sorted_windows(
    file: WindowFile, settings: WindowDataParameter, source: str
) -> tuple[list[ImageWindow], list[ImageWindow]]:
    """Return the background and the foreground windows; those between the thresholds are dropped."""
    foreground = [window for window in file.windows if window.overlap >= settings.fg_threshold]
    background = [
        window._replace(label=0)
        for window in file.windows
        if window.overlap < settings.fg_threshold and window.overlap < settings.bg_threshold
    ]
    for window in foreground:
        if window.label <= 0:
            raise ConfigError(f"{source}: foreground window {tuple(window)} has label {window.label}; expected above 0")
    if not foreground or not background:
        raise ConfigError(
            f"{source}: {len(foreground)} foreground and {len(background)} background windows with thresholds "
            f"{settings.fg_threshold:g} and {settings.bg_threshold:g}; at least one of each is needed"
        )
    log.info("Number of images: %d", len(file.images))
    for label, count in sorted(Counter(window.label for window in (*background, *foreground)).items()):
        log.info("class %d has %d samples", label, count)
    log.info("Amount of context padding: %d", settings.context_pad)
    log.info("Crop mode: %s", settings.crop_mode)
    return background, foreground


def _mean_for(transform: TransformationParameter, size: int) -> Array | None:
    """Return the mean for each pixel of the result (from the middle of a mean image), or for each channel."""
    mean = mean_of(transform)
    if mean is None or not transform.HasField("mean_file"):
        if mean is not None and len(mean) not in (1, _CHANNELS):
            raise ConfigError(f"mean_value is given {len(mean)} times; give it once or {_CHANNELS} times")
        return mean
    start = (mean.shape[2] - size) // 2
    if mean.shape[0] != _CHANNELS or min(mean.shape[1] - start, mean.shape[2] - start) < size or start < 0:
        raise ConfigError(f"the mean in mean_file has shape {mean.shape}, too small for crop_size {size}")
    return mean[:, start : start + size, start : start + size]


class _ImageFiles:
    """The images of a window file, read when needed or kept in memory as files."""

    def __init__(self, root_folder: str, names: Sequence[str], keeps: bool) -> None:
        self._paths = [root_folder + name for name in names]
        self._kept = [read_bytes(path) for path in self._paths] if keeps else None

    def read(self, number: int) -> Image:
        content = read_bytes(self._paths[number]) if self._kept is None else self._kept[number]
        return decode_image(content, "color", self._paths[number])


@dataclass(frozen=True)
class _Sampler:
    """The batch maker, independent of the layer."""

    files: _ImageFiles
    background: list[ImageWindow]
    foreground: list[ImageWindow]
    crop: WindowCrop
    scale: np.float32
    mean: Array | None
    mirror: bool
    source: str
    batch_size: int
    foreground_count: int
    share: Share

    def batches(self, number: int, seed: int) -> Batches:
        for first in itertools.count(number, self.batch_size):
            yield _WindowBatch(self, first, seed)

    def fill(self, place: int, draws: Draws, out: Array) -> int:
        """Cut a random window into row ``place`` of a batch."""
        group = self.background if place < self.batch_size - self.foreground_count else self.foreground
        window = group[draws.below(len(group))]
        self._cut(out, window, self.mirror and draws.below(2) == 1)
        return window.label

    def _cut(self, out: Array, window: ImageWindow, mirrored: bool) -> None:
        """Crop the window into ``out``; pixels outside the image stay zero."""
        try:
            pixels = self.files.read(window.image)
            place = self.crop.place(window, pixels.shape[0], pixels.shape[1], mirrored)
            region = place.cut(pixels, mirrored)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{self.source}: window {tuple(window[3:])} of image {window.image}: {error}") from None
        area = np.s_[:, place.top : place.top + place.height, place.left : place.left + place.width]
        values = region.transpose(2, 0, 1).astype(np.float32)
        if self.mean is not None:
            values -= self.mean if self.mean.shape[1:] == (1, 1) else self.mean[area]
        out[area] = values * self.scale


class _WindowBatch:
    """A batch in the making; each row is a part."""

    def __init__(self, sampler: _Sampler, first: int, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self._first = first
        # Not a buffer that was used before: around windows, it must be zero.
        self._data = np.zeros((sampler.batch_size, _CHANNELS, sampler.crop.size, sampler.crop.size), np.float32)
        self._labels = np.empty(sampler.batch_size, np.float32)

    def parts(self) -> Iterator[Part]:
        for place in range(self._sampler.batch_size):
            yield partial(self._fill, place)

    def _fill(self, place: int) -> None:
        number = self._sampler.share.position(self._first + place, self._sampler.batch_size)
        self._labels[place] = self._sampler.fill(place, Draws(self._seed, number), self._data[place])

    def finish(self) -> Tensors:
        return torch.from_numpy(self._data), torch.from_numpy(self._labels)
