"""What a PART and a SUM must look like. Pure; nothing that came from the network is trusted."""

from __future__ import annotations

from collections.abc import Mapping

from poseidon.errors import ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Encoding, Layout
from poseidon.wire.message import Header, Kind

Layouts = Mapping[int, Layout]
"""The layouts that chunks of a slot may have, by encoding."""


def make_header(kind: Kind, sender: int, chunk: Chunk, clock: int, encoded: Encoded) -> Header:
    """Return the header of a PART or SUM."""
    return Header(kind, sender, chunk.slot, chunk.index, clock, encoded.payload.nbytes, encoded.encoding)


def check_size(header: Header, chunk: Chunk, layouts: Layouts) -> None:
    """Raise ``ServerError`` unless a message about ``chunk`` can have this encoding and size."""
    layout = layouts.get(header.detail)
    if layout is None:
        known = ", ".join(Encoding(encoding).name for encoding in layouts)
        raise ServerError(f"rank {header.sender} sent {chunk} in encoding {header.detail}; the slot allows {known}")
    sizes = layout.sizes(chunk.length)
    if header.length not in sizes:
        allowed = str(sizes[0]) if len(sizes) == 1 else f"from {sizes.start} to {sizes.stop - 1}"
        raise ServerError(
            f"rank {header.sender} sent {header.length} bytes for {chunk}; "
            f"in encoding {Encoding(header.detail).name} its {chunk.length} values take {allowed}"
        )


def check_content(header: Header, chunk: Chunk, layouts: Layouts, payload: memoryview) -> None:
    """Raise ``ServerError`` unless a chunk is as long as its content says: whoever decodes it relies on that."""
    implied = layouts[header.detail].measure(payload, chunk.length)
    if implied != header.length:
        raise ServerError(
            f"rank {header.sender} sent {header.length} bytes for {chunk}, "
            f"but their content makes it {implied} bytes long"
        )
