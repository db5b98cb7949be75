"""ImageData: images named in a list, with labels."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from poseidon.caffe.blob import Shape
from poseidon.caffe.io.batches import Sample, batched
from poseidon.caffe.io.datum import image_to_values
from poseidon.caffe.io.images import read_image
from poseidon.caffe.io.lists import ImageLine, read_image_list
from poseidon.caffe.io.sharding import endless, this_worker
from poseidon.caffe.io.transform import Transform, random_stream
from poseidon.caffe.layers.data import Batches, PrefetchingLayer, skipped
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import ImageDataParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


@register("ImageData")
class ImageData(PrefetchingLayer):
    """Reads image files in the order of a list, or reshuffled in every pass."""

    def open(self) -> tuple[Sequence[Shape], Batches]:
        settings, rank = self.param.image_data_param, this_worker().rank
        batch_size = self.batch_size(settings)
        if bool(settings.new_height) != bool(settings.new_width):
            raise ConfigError(
                f"new_height is {settings.new_height} and new_width {settings.new_width}; give both or neither"
            )
        source = self.locate(settings)
        log.info("Opening file %s", source.path)
        lines = read_image_list(source.path)
        transform = Transform(self.param.transform_param, self.is_training, rank)
        if settings.shuffle:
            log.info("Shuffling data")
        log.info("A total of %d images.", len(lines))
        order = endless(len(lines), source.share, random_stream(rank) if settings.shuffle else None, source.path)
        numbers = skipped(order, settings.rand_skip, len(source.share.rows(len(lines))))
        first = _read(lines[0], settings, source.path)
        shape = transform.shape(first.values.shape, first.origin)
        samples = _samples(lines, numbers, settings, source.path)
        return [(batch_size, *shape), (batch_size,)], batched(samples, transform, batch_size)


def _samples(
    lines: list[ImageLine], numbers: Iterator[int], settings: ImageDataParameter, source: str
) -> Iterator[Sample]:
    for number in numbers:
        yield _read(lines[number], settings, source)


def _read(line: ImageLine, settings: ImageDataParameter, source: str) -> Sample:
    origin = f"{source}:{line.number}: {settings.root_folder}{line.name}"
    try:
        pixels = read_image(
            settings.root_folder + line.name,
            "color" if settings.is_color else "gray",
            settings.new_height,
            settings.new_width,
        )
    except ConfigError as error:
        raise ConfigError(f"{source}:{line.number}: {error}") from None
    return Sample(image_to_values(pixels), line.label, origin)
