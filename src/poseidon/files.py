"""Files on disk: read within a bound, written whole or not at all.

A reader trusts nothing that a file says about itself: sizes are compared with the file's own before memory is
allocated. A writer leaves either the old content or all of the new one, also if the disk is full or the process is
killed. Both name the file and the reason in one :class:`ConfigError`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from poseidon import failpoints
from poseidon.errors import ConfigError

StrPath = str | os.PathLike[str]

TEXT_BYTES = 256 << 20
"""The longest text that is read: more than any list of hosts, profile or prototxt needs."""
BINARY_BYTES = (2 << 30) - 1
"""The longest binary message that is read: protocol buffers end there."""
_LONGEST_NAME = 255
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ADVICE = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "free some of your quota or write to another disk",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f) or write elsewhere",
    errno.EACCES: "check who may write there",
    errno.EROFS: "write to another disk",
    errno.ENOENT: "create the folder first",
    errno.EIO: "check the disk",
}


# Reading.


def read_bytes(path: StrPath, what: str, limit: int = BINARY_BYTES) -> bytes:
    """Return a file's content; ``what`` names its kind in the error. Endless and giant files are refused."""
    try:
        with Path(path).open("rb") as stream:
            status = os.fstat(stream.fileno())
            size = status.st_size
            # Memory for all that is asked for is taken at once. A device or pipe has no size to ask for.
            asked = size if stat.S_ISREG(status.st_mode) and size else limit
            content = b"" if size > limit else stream.read(asked + 1)
    except OSError as error:
        raise cannot("read", what, path, error) from None
    except ValueError as error:  # a zero byte in the name
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}") from None
    if size > limit or len(content) > limit:
        seen = f"{size} bytes" if size > limit else "more"
        raise ConfigError(f"cannot read {what} {path}: it has {seen}, expected at most {limit}; is it the right file?")
    return content


def read_start(path: StrPath, what: str, count: int) -> bytes:
    """Return the first bytes of a file, by which its kind is known."""
    try:
        with Path(path).open("rb") as stream:
            return stream.read(count)
    except OSError as error:
        raise cannot("read", what, path, error) from None
    except ValueError as error:
        raise ConfigError(f"cannot read {what} {str(path)!r}: {error}") from None


def read_text(path: StrPath, what: str, limit: int = TEXT_BYTES) -> str:
    """Return the text in a UTF-8 file."""
    try:
        return read_bytes(path, what, limit).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {what} {path}: byte {error.start} is not text (UTF-8)") from None


def read_json(path: StrPath, what: str) -> Any:
    """Return the data in a JSON file."""
    return parse_json(read_text(path, what), f"{what} {path}")


def parse_json(text: str | bytes, what: str) -> Any:
    """Return the data that a JSON text stands for; ``what`` names it in the error."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ConfigError(f"{what} is not usable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{what} is not JSON: {error}") from None


class BoundedFile:
    """A file opened for reading at any place; nothing beyond its end is read or allocated.

    It is not mapped into memory: one that becomes shorter would end the process with a bus error. Closed when the
    object goes.
    """

    def __init__(self, path: StrPath, what: str) -> None:
        self.path = path
        self._what = what
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise cannot("read", what, path, error) from None
        except ValueError as error:
            raise ConfigError(f"cannot read {what} {str(path)!r}: {error}") from None

    def read(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset``; ``ValueError`` if the file does not have them."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise ValueError(f"bytes {offset} to {offset + count} are named, but it has {self.size}")
        try:
            content = os.pread(self._descriptor, count, offset)
            while len(content) < count and (
                more := os.pread(self._descriptor, count - len(content), offset + len(content))
            ):
                content += more
        except OSError as error:
            raise cannot("read", self._what, self.path, error) from None
        if len(content) < count:
            raise ValueError(f"it has become shorter: {offset + len(content)} bytes instead of {self.size}")
        return content


def memory_bytes() -> int:
    """Return how much memory this machine has: nothing larger can be loaded or allocated."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Writing.


def write_text(path: StrPath, text: str, what: str) -> None:
    """Write a text file, whole or not at all."""
    write_bytes(path, text.encode(), what)


def write_json(path: StrPath, data: Any, what: str, indent: int | None = 1) -> None:
    """Write plain data as JSON, whole or not at all."""
    write_text(path, json.dumps(data, indent=indent) + "\n", what)


def write_bytes(path: StrPath, content: bytes | memoryview, what: str) -> None:
    """Write a file, whole or not at all."""
    with replacing(path, what) as temporary, temporary.open("wb") as stream:
        stream.write(content)


@contextlib.contextmanager
def replacing(path: StrPath, what: str) -> Iterator[Path]:
    """Yield the path of an empty file that takes the place of ``path`` when the block ends without error.

    Its name cannot be guessed, and it is gone after any error. What the block writes is on the disk before the old file
    is given up. A device or pipe is not replaced: the block then writes to it.
    """
    try:
        # A link stays: what it points to is replaced.
        target = Path(os.path.realpath(path))
        if target.exists() and not target.is_file():
            yield target
            return
        with _beside(target) as temporary:
            yield temporary
            _keep(temporary, target)
    except OSError as error:
        raise cannot("write", what, path, error) from error
    except ValueError as error:
        if isinstance(error, ConfigError) or "null" not in str(error):
            raise
        raise ConfigError(f"cannot write {what} {str(path)!r}: {error}") from None


def check_writable(path: StrPath, what: str) -> None:
    """Raise what writing a file would raise, as far as that is known now: before the work whose results it is to hold.

    Makes the folder that it lies in.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() or not target.exists():
            with _beside(target):
                pass
    except OSError as error:
        raise cannot("write", what, path, error) from error


@contextlib.contextmanager
def replacing_folder(path: StrPath, what: str) -> Iterator[Path]:
    """Yield an empty folder that becomes ``path``, which must not exist, when the block ends without error."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(_hidden_name(target))
    try:
        try:
            temporary.mkdir()
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            _sync_folder(temporary)
            temporary.rename(target)
            _sync_folder(target.parent)
        finally:
            _remove_folder(temporary)
    except OSError as error:
        raise cannot("write", what, path, error) from error


def is_full(error: OSError) -> bool:
    """Whether a file could not be written for want of space: a log or cache is then done without."""
    return error.errno in _FULL


def came_of_full_disk(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, is for want of space."""
    while error is not None and not (isinstance(error, OSError) and is_full(error)):
        error = error.__cause__ or error.__context__
    return error is not None


def write_whole(stream: IO[bytes], content: bytes) -> None:
    """Write all of ``content`` to an unbuffered file; one write may take a part only, as the last one on a disk."""
    rest = memoryview(content)
    while rest:
        rest = rest[stream.write(rest) :]


def cannot(verb: str, what: str, path: StrPath, error: OSError) -> ConfigError:
    """Return the error for a file that the system refuses to read or write."""
    if error.errno == errno.EISDIR:
        return ConfigError(f"cannot {verb} {what} {path}: it is a folder, expected a file")
    reason = f"cannot {verb} {what} {path}: {error.strerror or error}"
    advice = _ADVICE.get(error.errno or 0) if verb == "write" else None
    return ConfigError(f"{reason}; {advice}" if advice else reason)


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """Yield a new file in the folder of ``target``, with its permissions; nothing is left of it unless it is moved."""
    temporary = target.with_name(_hidden_name(target))
    try:
        mode = stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        mode = None
    # By Python's own functions, here and below: `--auto` redirects them for all workers but the first.
    temporary.open("xb").close()
    try:
        if mode is not None:
            temporary.chmod(mode)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _hidden_name(target: Path) -> str:
    """Return a name beside ``target``'s that nobody can guess, so nobody can put a link in its place."""
    end = f".{secrets.token_hex(8)}.tmp"
    # In bytes, as the file system counts.
    return os.fsdecode(os.fsencode(f".{target.name}")[: _LONGEST_NAME - len(end)]) + end


def _keep(temporary: Path, target: Path) -> None:
    """Put a complete file in its place, such that a crash of the machine cannot lose both."""
    if failpoints.ARMED:
        failpoints.hit("disk.write")
    _sync(temporary)
    temporary.replace(target)
    _sync_folder(target.parent)


def _sync(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder, and a redirected one is elsewhere; the rename holds all the same.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOENT):
            raise


def _remove_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            file.unlink(missing_ok=True)
        folder.rmdir()
