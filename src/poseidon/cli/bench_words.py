"""How the options of ``poseidon bench`` are written, for both of its comparisons, and how it reports progress."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from poseidon import files
from poseidon.errors import ConfigError
from poseidon.lab.spec import MAX_MACHINES


def parse_paced(word: str) -> tuple[float, float]:
    """Return forward and backward milliseconds for ``40:80``."""
    try:
        forward, backward = (float(part) for part in word.split(":"))
    except ValueError:
        raise ConfigError(f"--paced {word!r} is not understood; write FORWARD_MS:BACKWARD_MS, such as 40:80") from None
    if not (0 <= forward < math.inf and 0 <= backward < math.inf):
        raise ConfigError(f"--paced {word!r}: times must not be negative or endless")
    return forward, backward


def words_of(text: str) -> list[str]:
    """Return the words of a list with commas; there must be one."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{text!r} names nothing; give at least one, separated by commas")
    return words


def parse_count(word: str) -> int:
    """Return a number of machines."""
    if not word.isdigit() or not 2 <= int(word) <= MAX_MACHINES:
        raise ConfigError(f"--machines {word!r}: a benchmark needs 2 to {MAX_MACHINES} machines")
    return int(word)


def check_device(device: str) -> None:
    """Refuse a device that is not here: every worker would fail for it."""
    if device == "cuda" and not torch.cuda.device_count():  # asks the driver, and takes no memory of a GPU
        raise ConfigError("--device cuda: PyTorch finds no GPU on this machine; leave it out to measure on the CPU")


def place_picture(output: Path, picture: Path | None) -> Path:
    """Return where the picture goes; raise now, before hours of measuring, if the results could not be written."""
    files.check_writable(output, "results")
    picture = picture or output.with_suffix(".png")
    if picture.resolve() == output.resolve():
        raise ConfigError(
            f"--output {output} would be overwritten by the picture; give the results another name, or --picture"
        )
    return picture


def say(line: str) -> None:
    """Print a line of progress at once."""
    print(line, flush=True)


def report(tables: Sequence[str], draw: Callable[[Path], None], picture: Path) -> None:
    """Print tables, and draw them if this installation can."""
    for table in tables:
        print(f"\n{table}")
    try:
        draw(picture)
        print(f"\npicture: {picture}")
    except ConfigError as error:
        print(f"\nno picture: {error}", file=sys.stderr)
