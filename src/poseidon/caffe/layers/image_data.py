"""ImageData: images named in a list, with labels."""

from __future__ import annotations

import logging
from functools import partial

from poseidon.caffe.io.batches import Batches, Row, Sample, batched
from poseidon.caffe.io.datum import image_to_values
from poseidon.caffe.io.images import read_image
from poseidon.caffe.io.lists import ImageLine, read_image_list
from poseidon.caffe.io.sharding import endless
from poseidon.caffe.io.transform import Transform
from poseidon.caffe.layers.data import DataStream, PrefetchingLayer, check_skip, skipped
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema.messages import ImageDataParameter
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")


@register("ImageData")
class ImageData(PrefetchingLayer):
    """Reads image files in the order of a list, or reshuffled in every pass."""

    def open(self) -> DataStream:
        settings = self.param.image_data_param
        batch_size = self.batch_size(settings)
        if bool(settings.new_height) != bool(settings.new_width):
            raise ConfigError(
                f"new_height is {settings.new_height} and new_width {settings.new_width}; give both or neither"
            )
        source = self.locate(settings)
        log.info("Opening file %s", source.path)
        lines = read_image_list(source.path)
        transform = Transform(self.param.transform_param, self.is_training)
        if settings.shuffle:
            log.info("Shuffling data")
        log.info("A total of %d images.", len(lines))
        check_skip(settings.rand_skip, len(lines))
        first = _read(lines[0], settings, source.path)
        shape = transform.shape(first.values.shape, first.origin)

        def batches(number: int, seed: int) -> Batches:
            skip = skipped(settings.rand_skip, seed)
            order = endless(len(lines), source.share, batch_size, seed if settings.shuffle else None, number, skip)
            rows = (Row(number, partial(_read, lines[index], settings, source.path)) for number, index in order)
            return batched(rows, transform, batch_size, seed)

        is_random = transform.is_random or settings.shuffle or settings.rand_skip > 0
        return DataStream([(batch_size, *shape), (batch_size,)], batches, is_random)


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
