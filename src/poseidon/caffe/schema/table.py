"""Turn the schema's tables into protobuf descriptors; no protoc is needed on anybody's machine.

A table is plain text. ``message Name`` opens a message; each indented line below it is a field,
``number name type [= default]``, where the type carries a mark: ``*`` repeated, ``+`` repeated and packed,
``!`` required, none for optional. ``enum Name A=0 B=1`` is inside its message, or before the first one
when it belongs to the file.
"""

from __future__ import annotations

from google.protobuf import descriptor_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("int32", "int64", "uint32", "float", "double", "bool", "string", "bytes")
}
_LABELS = {"*": _Field.LABEL_REPEATED, "+": _Field.LABEL_REPEATED, "!": _Field.LABEL_REQUIRED}


def build_file(name: str, package: str, tables: list[str]) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of one proto2 file holding every message of the tables."""
    file = descriptor_pb2.FileDescriptorProto(name=name, package=package, syntax="proto2")
    message: descriptor_pb2.DescriptorProto | None = None
    for line in "\n".join(tables).splitlines():
        words = line.split()
        if not words:
            continue
        if words[0] == "message":
            message = file.message_type.add(name=words[1])
        elif words[0] == "enum":
            _add_enum(file if message is None or not line.startswith(" ") else message, words)
        else:
            assert message is not None, f"field before the first message: {line}"
            _add_field(message, words)
    _resolve_types(file)
    return file


def _add_enum(owner: descriptor_pb2.FileDescriptorProto | descriptor_pb2.DescriptorProto, words: list[str]) -> None:
    enum = owner.enum_type.add(name=words[1])
    for word in words[2:]:
        key, number = word.split("=")
        enum.value.add(name=key, number=int(number))


def _add_field(message: descriptor_pb2.DescriptorProto, words: list[str]) -> None:
    number, name, marked_type = words[:3]
    mark = marked_type[0] if marked_type[0] in _LABELS else ""
    field = message.field.add(name=name, number=int(number), type_name=marked_type[len(mark) :])
    field.label = _LABELS.get(mark, _Field.LABEL_OPTIONAL)
    if mark == "+":
        field.options.packed = True
    if len(words) > 3:
        assert words[3] == "=", f"default of {message.name}.{name}"
        field.default_value = words[4]


def _resolve_types(file: descriptor_pb2.FileDescriptorProto) -> None:
    """Replace each field's written type by a scalar type or the full name of a message or enum."""
    messages = {message.name for message in file.message_type}
    file_enums = {enum.name for enum in file.enum_type}
    for message in file.message_type:
        own_enums = {enum.name for enum in message.enum_type}
        for field in message.field:
            written = field.type_name
            if written in _SCALARS:
                field.type = _SCALARS[written]
                field.ClearField("type_name")
            elif written in own_enums:
                field.type, field.type_name = _Field.TYPE_ENUM, f".{file.package}.{message.name}.{written}"
            elif written in file_enums:
                field.type, field.type_name = _Field.TYPE_ENUM, f".{file.package}.{written}"
            else:
                assert written in messages, f"unknown type {written} of {message.name}.{field.name}"
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".{file.package}.{written}"
