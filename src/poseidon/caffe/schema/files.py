"""Read and write messages as text (prototxt) and binary files; errors name file, line and column."""

from __future__ import annotations

import difflib
import os
import re
from typing import TypeVar

from google.protobuf import text_format
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

from poseidon import files
from poseidon.caffe.schema import Message
from poseidon.caffe.schema.pool import FILE, message
from poseidon.errors import ConfigError

M = TypeVar("M", bound=Message)

_NUMBERS_ONLY = "BlobProto"
"""Not looked into for texts: it has none, and many numbers."""
_NO_BRACES = re.compile(r"""(["'])(?:\\.|(?!\1)[^\\])*\1|\#.*""")
"""Texts and comments, in which braces are no braces."""
_NO_FIELD = re.compile(r'Message type "caffe\.(?P<message>[\w.]+)" has no field named "(?P<field>[^"]+)"')
_NO_VALUE = re.compile(r'Enum type "caffe\.(?P<enum>[\w.]+)" has no value (?:named|with number) "?(?P<value>[^".]+)')


def parse_text(text: str, kind: type[M], origin: str = "<text>") -> M:
    """Parse a prototxt; ``origin`` names the file in errors, which give line and column."""
    result = kind()
    try:
        text_format.Parse(text, result)
    except text_format.ParseError as error:
        raise ConfigError(_explain(error, origin, text)) from None
    except (RecursionError, ValueError, OverflowError) as error:
        # protobuf lets some of Python's own errors through: names that are no UTF-8, endless numbers.
        raise ConfigError(f"{origin}: not a {kind.DESCRIPTOR.name} in text form: {error}") from None
    if not result.IsInitialized():
        missing = result.FindInitializationErrors()  # type: ignore[attr-defined]  # not in the stubs
        raise ConfigError(f"{origin}: required fields are missing: {', '.join(missing)}")
    return result


def read_text(path: str | os.PathLike[str], kind: type[M]) -> M:
    """Read a prototxt file."""
    return parse_text(files.read_text(path, "prototxt"), kind, str(path))


def read_binary(path: str | os.PathLike[str], kind: type[M]) -> M:
    """Read a binary message (.caffemodel, .solverstate, .binaryproto)."""
    name = kind.DESCRIPTOR.name
    content = files.read_bytes(path, f"binary {name}")
    if not content:
        # An empty message is valid to protobuf, but nobody writes one to a file.
        raise ConfigError(f"{path} is empty, expected a binary {name}; was the disk full when it was written?")
    return parse_binary(content, kind, str(path))


def parse_binary(content: bytes, kind: type[M], origin: str = "<bytes>") -> M:
    """Parse a serialised message; a truncated or foreign one raises an error that names ``origin``."""
    result = kind()
    try:
        result.ParseFromString(content)
    except DecodeError:
        raise ConfigError(
            f"{origin}: not a complete binary {kind.DESCRIPTOR.name} ({len(content)} bytes); "
            "the file is truncated, damaged or of another kind"
        ) from None
    _check_texts(result, origin)
    return result


def _check_texts(proto: Message, origin: str) -> None:
    """Refuse names that are not UTF-8: protobuf hands them over as bytes, which nobody expects."""
    if proto.DESCRIPTOR.name == _NUMBERS_ONLY:
        return
    for field, value in proto.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for each in [value] if isinstance(value, ProtoMessage) else value:
                _check_texts(each, origin)
        elif field.type == field.TYPE_STRING:
            for each in [value] if isinstance(value, str | bytes) else value:
                if not isinstance(each, str):
                    raise ConfigError(f"{origin}: {field.name} is {each!r}, expected text (UTF-8); the file is damaged")


def write_binary(path: str | os.PathLike[str], proto: Message) -> None:
    """Write a message atomically: ``path`` holds the old content or all of the new."""
    try:
        content = proto.SerializeToString()
    except ValueError as error:
        raise ConfigError(f"cannot write {proto.DESCRIPTOR.name} {path}: {error}; use HDF5 for large nets") from None
    files.write_bytes(path, content, proto.DESCRIPTOR.name)


def write_text(path: str | os.PathLike[str], proto: Message) -> None:
    """Write a message as prototxt, atomically."""
    files.write_text(path, text_format.MessageToString(proto), proto.DESCRIPTOR.name)


def _explain(error: text_format.ParseError, origin: str, text: str) -> str:
    """Return one line: file, line, column, what is wrong, and the nearest known names."""
    line, column = error.GetLine(), error.GetColumn()
    where = f"{origin}:{line}:{column}" if line is not None else origin
    what = re.sub(r"^\d+:\d+ : ", "", str(error))
    what = re.sub(r"^'(?P<source>.*?)': ", "", what, flags=re.DOTALL)
    unknown = _NO_FIELD.search(what)
    if unknown:
        if line is not None and missing_brace(text) and (opened := _open_braces(text, line - 1)):
            return (
                f"{where}: {unknown['field']!r} is inside what line {opened[-1]} opens, which has no such field: a }} "
                "is missing before it"
            )
        known = list(message(unknown["message"]).DESCRIPTOR.fields_by_name)
        return f"{where}: {unknown['message']} has no field {unknown['field']!r}{_near(unknown['field'], known)}"
    value = _NO_VALUE.search(what)
    if value:
        known = _enum_values(value["enum"])
        return f"{where}: {value['enum']} has no value {value['value']!r}; known: {', '.join(known)}"
    if what.startswith(("Expected", "Couldn't parse")) and (brace := missing_brace(text)):
        return f"{origin}:{brace}"
    source = text.splitlines()[line - 1].strip() if line and line <= len(text.splitlines()) else ""
    return f"{where}: {what}" + (f" (in: {source})" if source else "")


def missing_brace(text: str) -> str | None:
    """Return the line of a brace that nobody closes, or that nobody opened, and say so; None if there is none. Pure."""
    lines = text.splitlines()
    opened = _open_braces(text, len(lines))
    if not opened:
        return None
    number = abs(opened[-1])
    what = "a brace is closed that was never opened" if opened[-1] < 0 else "this brace is never closed: a } is missing"
    return f"{number}: {what} (in: {lines[number - 1].strip()})"


def _open_braces(text: str, lines: int) -> list[int]:
    """Return the lines whose braces are open after that many lines, outermost first; negative: closed without one."""
    opened: list[int] = []
    for number, line in enumerate(text.splitlines()[:lines], 1):
        for brace in re.findall(r"[{}]", _NO_BRACES.sub("", line)):
            if brace == "{":
                opened.append(number)
            elif not opened:
                return [-number]
            else:
                opened.pop()
    return opened


def _near(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else f"; known: {', '.join(sorted(known))}"


def _enum_values(full_name: str) -> list[str]:
    owner, _, enum = full_name.rpartition(".")
    enums = message(owner).DESCRIPTOR.enum_types_by_name if owner else FILE.enum_types_by_name
    return [value.name for value in enums[enum].values]
