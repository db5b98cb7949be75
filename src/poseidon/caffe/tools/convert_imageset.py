"""Write the images of a list to a database."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass

from poseidon.caffe.io.database import new_database
from poseidon.caffe.io.datum import encoded_datum, image_datum
from poseidon.caffe.io.images import Image, decode_image, encode_image, read_bytes, resized
from poseidon.caffe.io.lists import ImageLine, read_image_list
from poseidon.caffe.schema import Datum
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_REPORT_EVERY = 1000


@dataclass(frozen=True)
class Conversion:
    """How images become records."""

    is_gray: bool = False
    resize_height: int = 0
    resize_width: int = 0
    encoded: bool = False
    """Store image files instead of pixels."""
    encode_type: str = ""
    """The kind of file ("png", "jpg"); empty: by each image's own extension."""
    check_size: bool = False
    """Stop at an image whose size differs from the first."""

    def datum(self, path: str, label: int) -> tuple[Datum, Image]:
        """Return the record for an image file, and its pixels."""
        content = read_bytes(path)
        pixels = decode_image(content, "gray" if self.is_gray else "color", path)
        pixels = resized(pixels, max(0, self.resize_height), max(0, self.resize_width))
        own_type = path.rpartition(".")[2].lower()
        wanted = self.encode_type or (own_type if self.encoded else "")
        if not wanted:
            return image_datum(pixels, label), pixels
        is_own = own_type == wanted.lower() or (wanted.lower(), own_type) == ("jpg", "jpeg")
        if is_own and self.resize_height <= 0 and self.resize_width <= 0:
            return encoded_datum(content, label), pixels
        return encoded_datum(encode_image(pixels, wanted), label), pixels


def convert_imageset(
    root_folder: str, list_file: str, database: str, backend: str, conversion: Conversion, shuffle: bool = False
) -> int:
    """Write all readable images, keyed by position in the list and name; return how many.

    An unreadable image is reported and skipped, as in Caffe.
    """
    lines = read_image_list(list_file)
    if shuffle:
        log.info("Shuffling data")
        random.shuffle(lines)
    log.info("A total of %d images.", len(lines))
    if conversion.encode_type and not conversion.encoded:
        log.info("encode_type specified, assuming encoded=true.")
    count, first = 0, None
    with new_database(backend, database) as writer:
        for number, line in enumerate(lines):
            try:
                datum, pixels = conversion.datum(root_folder + line.name, line.label)
            except ConfigError as error:
                log.error("%s:%d: %s", list_file, line.number, error)
                continue
            first = first or (line, pixels.shape)
            if conversion.check_size and pixels.shape != first[1]:
                raise _wrong_size(list_file, line, pixels, *first)
            writer.put(f"{number:08d}_{line.name}".encode(), datum.SerializeToString())
            count += 1
            if count % _REPORT_EVERY == 0:
                log.info("Processed %d files.", count)
        if not count:
            raise ConfigError(f"{list_file}: none of its {len(lines)} images could be read under {root_folder!r}")
    if count % _REPORT_EVERY:
        log.info("Processed %d files.", count)
    return count


def _wrong_size(
    list_file: str, line: ImageLine, pixels: Image, first_line: ImageLine, first_shape: tuple[int, ...]
) -> ConfigError:
    return ConfigError(
        f"{list_file}:{line.number}: {line.name} has shape {pixels.shape} (height, width, channels), "
        f"{first_line.name} has {first_shape}; use --resize_height and --resize_width to make them equal"
    )
