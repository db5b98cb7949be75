"""Write the images of a list to a database."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

from poseidon.caffe.io.database import Begun, continued_database
from poseidon.caffe.io.datum import encoded_datum, image_datum
from poseidon.caffe.io.images import Image, decode_image, encode_image, read_bytes, resized
from poseidon.caffe.io.lists import ImageLine, read_image_list
from poseidon.caffe.io.prefetch import Part, Prefetcher
from poseidon.caffe.schema import Datum
from poseidon.caffe.tools.pace import Pace
from poseidon.errors import ConfigError

log = logging.getLogger("poseidon.caffe")

_REPORT_EVERY = 1000
_GROUP, _GROUPS_AHEAD = 64, 4
_DIGITS = 8


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


class Converted(NamedTuple):
    """What became of an image."""

    number: int
    """Its place in the list, which may be shuffled."""
    line: ImageLine
    content: bytes
    shape: tuple[int, ...]
    error: ConfigError | None = None


class _Lines:
    """Some images of the list, converted by whichever threads are free."""

    def __init__(self, lines: Sequence[tuple[int, ImageLine]], root_folder: str, conversion: Conversion) -> None:
        self._lines = lines
        self._root_folder = root_folder
        self._conversion = conversion
        self._done: list[Converted | None] = [None] * len(lines)

    def parts(self) -> Iterator[Part]:
        for place in range(len(self._lines)):
            yield partial(self._convert, place)

    def _convert(self, place: int) -> None:
        number, line = self._lines[place]
        try:
            datum, pixels = self._conversion.datum(self._root_folder + line.name, line.label)
            self._done[place] = Converted(number, line, datum.SerializeToString(), pixels.shape)
        except ConfigError as error:
            self._done[place] = Converted(number, line, b"", (), error)

    def finish(self) -> list[Converted]:
        return [one for one in self._done if one is not None]


def convert_imageset(
    root_folder: str, list_file: str, database: str, backend: str, conversion: Conversion, shuffle: bool = False
) -> int:
    """Write all readable images, keyed by position in the list and name; return how many.

    An unreadable image is reported and skipped, as in Caffe. All cores convert. After an interruption the same call
    goes on where the last one ended, with an LMDB.
    """
    lines = read_image_list(list_file)
    digest = hashlib.sha256(repr(lines).encode()).hexdigest()
    about = {
        "list of images": digest,
        "root folder": root_folder,
        "conversion": asdict(conversion),
        "shuffle": shuffle,
        "seed": random.randrange(2**62),
    }
    if conversion.encode_type and not conversion.encoded:
        log.info("encode_type specified, assuming encoded=true.")
    compared = [name for name in about if name != "seed"]
    with continued_database(backend, database, about, compared) as begun:
        if shuffle:
            log.info("Shuffling data")
            random.Random(begun.about["seed"]).shuffle(lines)
        log.info("A total of %d images.", len(lines))
        start = 0 if begun.last_key is None else int(begun.last_key[:_DIGITS]) + 1
        if start:
            log.info("Continuing after %d images, of which %d were read.", start, begun.written)
        count = _convert(lines, start, begun, root_folder, list_file, conversion)
        if not count:
            raise ConfigError(f"{list_file}: none of its {len(lines)} images could be read under {root_folder!r}")
    if count % _REPORT_EVERY:
        log.info("Processed %d files.", count)
    return count


def _convert(
    lines: list[ImageLine], start: int, begun: Begun, root_folder: str, list_file: str, conversion: Conversion
) -> int:
    """Write the images from ``start`` on; return how many the database has then."""
    rest = list(enumerate(lines))[start:]
    groups = (_Lines(rest[at : at + _GROUP], root_folder, conversion) for at in range(0, len(rest), _GROUP))
    converted = Prefetcher(groups, _GROUPS_AHEAD, "conversion")
    # To compare sizes with the first image after an interruption too.
    first = next(_readable(lines, root_folder, conversion), None) if start and conversion.check_size else None
    pace = Pace(len(rest))
    count = begun.written
    for _ in range(0, len(rest), _GROUP):
        for one in next(converted):
            if one.error is not None:
                log.error("%s:%d: %s", list_file, one.line.number, one.error)
                continue
            first = first or one
            if conversion.check_size and one.shape != first.shape:
                raise _wrong_size(list_file, one, first)
            begun.writer.put(f"{one.number:0{_DIGITS}d}_{one.line.name}".encode(), one.content)
            count += 1
            if count % _REPORT_EVERY == 0:
                log.info("Processed %d files.", count)
            if (said := pace.count()) is not None:
                log.info("%s", said)
    return count


def _readable(lines: list[ImageLine], root_folder: str, conversion: Conversion) -> Iterator[Converted]:
    for number, line in enumerate(lines):
        for one in _converted(_Lines([(number, line)], root_folder, conversion)):
            if one.error is None:
                yield one


def _converted(group: _Lines) -> list[Converted]:
    for part in group.parts():
        part()
    return group.finish()


def _wrong_size(list_file: str, one: Converted, first: Converted) -> ConfigError:
    return ConfigError(
        f"{list_file}:{one.line.number}: {one.line.name} has shape {one.shape} (height, width, channels), "
        f"{first.line.name} has {first.shape}; use --resize_height and --resize_width to make them equal"
    )
