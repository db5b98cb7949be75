"""Every error Poseidon raises on purpose.

::

    PoseidonError
    ├── ConfigError        an argument, option, file or environment variable is wrong
    ├── UnsupportedError   the request is understood but cannot be done exactly
    ├── MismatchError      workers disagree about the model, the plan or the replicas
    ├── ServerError        a request names something a parameter server does not hold, or repeats one
    ├── WireError          a message cannot be sent, or a peer cannot be reached
    │   └── FrameError     received bytes are not a valid message
    └── WorkerLostError    a worker died, hung or went away while others waited for it

An error's text says who (rank, layer, peer), what, the value seen, the value expected and what to try.
"""

from __future__ import annotations

import difflib


class PoseidonError(Exception):
    """Base of all errors raised on purpose; catch this to catch them all."""

    exit_status = 1
    """Of a command that ends because of it."""


class ConfigError(PoseidonError, ValueError):
    """An argument, option, file or environment variable has a value that cannot work."""


class UnsupportedError(PoseidonError, RuntimeError):
    """The request is understood, but there is no exact way to fulfil it."""


class MismatchError(PoseidonError, RuntimeError):
    """Workers disagree where they must agree: model, shapes, plan, or replica contents."""


class ServerError(PoseidonError, RuntimeError):
    """A request names something a parameter server does not hold, or comes twice or out of turn."""


class WireError(PoseidonError, RuntimeError):
    """A message cannot be sent, or a peer cannot be reached."""

    peer: int | None = None
    """The rank that cannot be reached."""


class FrameError(WireError):
    """Received bytes are not a valid message; ``reason`` is the short name they are counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class WorkerLostError(PoseidonError, RuntimeError):
    """A worker died, hung or became unreachable while others waited for it."""

    exit_status = 75
    """"Try again" in the sysexits convention. It tells launchers that the cause is another worker."""


def unknown_name(what: str, seen: str, known: list[str] | tuple[str, ...]) -> ConfigError:
    """Return the error for a name that is not one of ``known``, with the one that is probably meant, and all others."""
    near = [name for name in known if name.startswith(seen)] or difflib.get_close_matches(seen, known, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ";"
    return ConfigError(f"unknown {what} {seen!r}{meant} known: {', '.join(sorted(known))}")


EXTRAS = {
    "pyroute2": ("pyroute2", "lab"),
    "matplotlib": ("matplotlib", "lab"),
    "google": ("protobuf", "caffe"),
    "lmdb": ("lmdb", "caffe"),
    "h5py": ("h5py", "caffe"),
    "cv2": ("opencv-python-headless", "caffe"),
    "PIL": ("pillow", "caffe"),
    "scipy": ("scipy", "caffe"),
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "keras": ("keras", "tensorflow"),
    "jax": ("jax", "jax"),
    "lightning": ("lightning", "trainers"),
    "accelerate": ("accelerate", "trainers"),
    "mlxtend": ("mlxtend", "examples"),
    "sklearn": ("scikit-learn", "examples"),
}
"""Modules of optional packages: the package, and the extra that brings it."""


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """Return the error for a module of an optional package; None if the module is none of these."""
    found = EXTRAS.get((error.name or "").partition(".")[0])
    if found is None:
        return None
    package, extra = found
    return ConfigError(
        f"this needs the package {package}, which is not installed; the extra {extra!r} brings it: "
        f"pip install '.[{extra}]' in the checkout, or pip install {package}"
    )


def describe(error: BaseException) -> str:
    """Return an error's text; with its kind, unless it was raised on purpose."""
    return str(error) if isinstance(error, PoseidonError) else f"{type(error).__name__}: {error}"
