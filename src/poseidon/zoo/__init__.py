"""Networks for benchmarks and tests: published architectures in plain PyTorch, with data and loss.

::

    network = poseidon.zoo.build("vgg19")
    inputs, targets = network.batch(32)
    network.loss(network.model(*inputs), targets).backward()

A network's own module is imported when it is built. Networks of torchvision and transformers, where these are
installed, are built as they come: ``torchvision/vit_b_16``, ``transformers/gpt2``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib import import_module

from poseidon.errors import ConfigError, unknown_name
from poseidon.zoo.network import Network, Sizes, Task

__all__ = ["Network", "Task", "build", "is_borrowed", "names"]


@dataclass(frozen=True)
class _Entry:
    """Where a network is defined, and its two sizes."""

    module: str
    """Module of this package that defines it."""
    function: str
    """Function there that takes the sizes and returns the model and its task."""
    full: Sizes
    """As published."""
    tiny: Sizes
    """The same layers with at most about 200 000 parameters."""
    smallest_image: int = 1
    """Smaller images would shrink to nothing on the way through the layers."""


_ZOO = {
    "lenet": _Entry(
        "cnn_small",
        "lenet",
        Sizes(1.0, image_size=28, classes=10),
        Sizes(0.25, image_size=28, classes=10),
        smallest_image=13,
    ),
    "cifar10-quick": _Entry(
        "cnn_small",
        "cifar10_quick",
        Sizes(1.0, image_size=32, classes=10),
        Sizes(0.25, image_size=32, classes=10),
        smallest_image=8,
    ),
    "alexnet": _Entry(
        "alexnet",
        "alexnet",
        Sizes(1.0, 0.5, image_size=224, classes=1000),
        Sizes(1 / 24, 0.5, image_size=64, classes=10),
        smallest_image=63,
    ),
    "googlenet": _Entry(
        "googlenet",
        "googlenet",
        Sizes(1.0, 0.2, image_size=224, classes=1000),
        Sizes(1 / 8, 0.2, image_size=64, classes=10),
        smallest_image=15,
    ),
    "inception-v3": _Entry(
        "inception",
        "inception_v3",
        Sizes(1.0, 0.5, image_size=299, classes=1000),
        Sizes(1 / 16, 0.5, image_size=107, classes=10),
        smallest_image=75,
    ),
    "vgg19": _Entry(
        "vgg",
        "vgg19",
        Sizes(1.0, 0.5, image_size=224, classes=1000),
        Sizes(1 / 32, 0.5, image_size=32, classes=10),
        smallest_image=32,
    ),
    "vgg19-22k": _Entry(
        "vgg",
        "vgg19",
        Sizes(1.0, 0.5, image_size=224, classes=21841),
        Sizes(1 / 32, 0.5, image_size=32, classes=220),
        smallest_image=32,
    ),
    "resnet18": _Entry(
        "resnet",
        "resnet18",
        Sizes(1.0, image_size=224, classes=1000),
        Sizes(1 / 8, image_size=64, classes=10),
    ),
    "resnet50": _Entry(
        "resnet",
        "resnet50",
        Sizes(1.0, image_size=224, classes=1000),
        Sizes(1 / 16, image_size=64, classes=10),
    ),
    "resnet152": _Entry(
        "resnet",
        "resnet152",
        Sizes(1.0, image_size=224, classes=1000),
        Sizes(1 / 32, image_size=64, classes=10),
    ),
    "gpt2": _Entry("transformer", "gpt2", Sizes(1.0, 0.1), Sizes(1 / 32, 0.1)),
    "dlrm": _Entry("recommender", "dlrm", Sizes(1.0), Sizes(0.05)),
    "ladder": _Entry("ladder", "ladder", Sizes(1.0), Sizes(0.04)),
}


_PACKAGES = ("torchvision", "transformers")


def names() -> tuple[str, ...]:
    """Return the name of every network of the zoo's own."""
    return tuple(_ZOO)


def is_borrowed(name: str) -> bool:
    """Return whether a name means a network of another package."""
    return name.partition("/")[0] in _PACKAGES


def build(
    name: str,
    *,
    tiny: bool = False,
    width: float | None = None,
    image_size: int | None = None,
    classes: int | None = None,
    dropout: float | None = None,
) -> Network:
    """Return the network called ``name`` as published, or its tiny twin, changed where an argument is given.

    The tiny twin has the same layers with fewer channels and smaller inputs, and runs in milliseconds. Every
    argument left at None keeps its published (or tiny) value; ``dropout=0.0`` makes training deterministic.
    Under ``with torch.device("meta")`` a network costs no memory.
    """
    if is_borrowed(name):
        return _borrow(name, tiny or width is not None or classes is not None, image_size, dropout)
    entry = _ZOO.get(name)
    if entry is None:
        raise unknown_name("network", name, names())
    sizes = entry.tiny if tiny else entry.full
    sizes = _with_width(sizes, width)
    sizes = _with_dropout(name, sizes, dropout)
    sizes = _with_count(name, sizes, "image_size", image_size, entry.smallest_image)
    sizes = _with_count(name, sizes, "classes", classes, 2)
    make = getattr(import_module(f"{__name__}.{entry.module}"), entry.function)
    model, task = make(sizes)
    return Network(name, model, task)


def _borrow(name: str, is_changed: bool, image_size: int | None, dropout: float | None) -> Network:
    if is_changed:
        raise ConfigError(f"{name} is built as it comes; of all sizes only its image size can be changed")
    from poseidon.zoo.borrowed import borrow

    package, _, model = name.partition("/")
    return Network(name, *borrow(package, model, image_size, dropout))


def _with_width(sizes: Sizes, width: float | None) -> Sizes:
    if width is None:
        return sizes
    if not 0.0 < width < math.inf:
        raise ConfigError(f"width={width!r}: expected a positive number, 1.0 being the published network")
    return replace(sizes, width=width)


def _with_dropout(name: str, sizes: Sizes, dropout: float | None) -> Sizes:
    if dropout is None:
        return sizes
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout={dropout!r}: expected a probability from 0.0 up to, but not, 1.0")
    if dropout > 0.0 and sizes.dropout == 0.0:
        raise ConfigError(f"dropout={dropout!r}: {name} has no dropout layers; leave it out or give 0.0")
    return replace(sizes, dropout=dropout)


def _with_count(name: str, sizes: Sizes, field: str, value: int | None, smallest: int) -> Sizes:
    """Return the sizes with ``image_size`` or ``classes`` replaced, if a value is given and makes sense."""
    if value is None:
        return sizes
    if getattr(sizes, field) == 0:
        raise ConfigError(f"{field}={value!r}: {name} reads no images and has no classes; leave it out")
    if value < smallest:
        raise ConfigError(f"{field}={value!r}: {name} needs at least {smallest}")
    return replace(sizes, **{field: value})
