"""What a PART and a SUM must look like. Pure; nothing that came from the network is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from poseidon.errors import ServerError
from poseidon.sums.chunks import Chunk
from poseidon.sums.encodings import Encoded, Encoding, Layout
from poseidon.wire.message import Header, Kind

Layouts = Mapping[int, Layout]
"""The layouts that chunks of a slot may have, by encoding."""


def make_header(kind: Kind, sender: int, chunk: Chunk, clock: int, encoded: Encoded) -> Header:
    """Return the header of a PART or SUM."""
    return Header(kind, sender, chunk.slot, chunk.index, clock, encoded.payload.nbytes, encoded.encoding)


def all_sizes(chunks: Iterable[Chunk], layouts: Layouts) -> dict[tuple[int, int], range]:
    """Return the sizes in bytes that messages about ``chunks`` can have, by index and encoding."""
    return {
        (chunk.index, encoding): layout.sizes(chunk.length) for chunk in chunks for encoding, layout in layouts.items()
    }


def wrong_size(header: Header, chunk: Chunk, layouts: Layouts) -> ServerError:
    """Return the error for a message whose encoding, or size, ``chunk`` cannot have."""
    layout = layouts.get(header.detail)
    if layout is None:
        known = ", ".join(Encoding(encoding).name for encoding in layouts)
        return ServerError(f"rank {header.sender} sent {chunk} in encoding {header.detail}; the slot allows {known}")
    sizes = layout.sizes(chunk.length)
    allowed = str(sizes.start) if len(sizes) == 1 else f"from {sizes.start} to {sizes.stop - 1}"
    return ServerError(
        f"rank {header.sender} sent {header.length} bytes for {chunk}; "
        f"in encoding {Encoding(header.detail).name} its {chunk.length} values take {allowed}"
    )


def wrong_content(header: Header, chunk: Chunk, implied_bytes: int) -> ServerError:
    """Return the error for a chunk whose content implies another size than it has."""
    return ServerError(
        f"rank {header.sender} sent {header.length} bytes for {chunk}, "
        f"but their content makes it {implied_bytes} bytes long"
    )
