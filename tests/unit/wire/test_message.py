import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.errors import FrameError, WireError
from poseidon.wire import message
from poseidon.wire.message import CHECKED, SIZE, Header, Kind, check_payload, pack, unpack

headers = st.builds(
    Header,
    kind=st.sampled_from(Kind),
    sender=st.integers(0, 2**16 - 1),
    subject=st.integers(0, 2**32 - 1),
    number=st.integers(0, 2**64 - 1),
    clock=st.integers(0, 2**64 - 1),
    length=st.integers(0, 2**64 - 1),
    detail=st.integers(0, 2**8 - 1),
    flags=st.integers(0, 2**8 - 1),
    checksum=st.integers(0, 2**32 - 1),
)


@given(headers)
def test_what_is_packed_is_unpacked(header):
    data = pack(header)
    assert len(data) == SIZE
    assert unpack(data, header.length) == header
    assert unpack(memoryview(data), header.length) == header


@given(headers, st.integers(0, SIZE - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(header, place, change):
    data = bytearray(pack(header))
    data[place] ^= change
    with pytest.raises(FrameError):
        unpack(bytes(data), header.length)


@given(st.binary(max_size=2 * SIZE))
def test_random_bytes_are_refused(data):
    with pytest.raises(FrameError):
        unpack(data, 0)


@given(headers, st.integers(0, SIZE - 1))
def test_truncated_headers_are_refused(header, size):
    with pytest.raises(FrameError) as refused:
        unpack(pack(header)[:size], header.length)
    assert refused.value.reason == "header size"


def repacked(**changes):
    """A header with fields no honest sender writes, but a right checksum."""
    fields = {"magic": message.MAGIC, "version": message.VERSION, "kind": Kind.PART} | changes
    body = struct.pack("<2sBBBBHIQQQI", fields["magic"], fields["version"], fields["kind"], 0, 0, 3, 1, 2, 5, 8, 0)
    return body + struct.pack("<I", zlib.crc32(body))


@pytest.mark.parametrize(
    ("data", "reason", "says"),
    [
        (repacked(magic=b"XX"), "magic", "not Poseidon"),
        (repacked(version=9), "version", "version 9, not 4"),
        (repacked(kind=200), "kind", "rank 3 sent a message of unknown kind 200"),
        (repacked()[:-4] + b"\0\0\0\0", "header checksum", "checksum is 0x0"),
    ],
)
def test_refusals_name_what_is_wrong(data, reason, says):
    with pytest.raises(FrameError, match=says) as refused:
        unpack(data, 8)
    assert refused.value.reason == reason


def test_a_payload_of_another_length_is_refused():
    with pytest.raises(FrameError, match="rank 3 announced 8 bytes of PART payload, 7 came") as refused:
        unpack(repacked(), 7)
    assert refused.value.reason == "length"


@pytest.mark.parametrize("field", ["sender", "subject", "number", "clock", "length", "detail", "flags"])
@pytest.mark.parametrize("value", [-1, 2**64])
def test_fields_that_do_not_fit_are_named(field, value):
    fields = dict.fromkeys(["sender", "subject", "number", "clock", "length", "detail", "flags"], 0) | {field: value}
    with pytest.raises(WireError, match=f"{field}={value}"):
        pack(Header(Kind.PART, **fields))


def test_payload_checksum_is_checked_where_it_is_given():
    payload = np.arange(5, dtype=np.float32)
    checked = Header(Kind.PART, 1, 2, 3, 4, payload.nbytes, 0, CHECKED, zlib.crc32(payload))
    check_payload(checked, payload.data)
    check_payload(Header(Kind.PART, 1, 2, 3, 4, payload.nbytes), payload.data)
    with pytest.raises(FrameError, match=r"rank 1 \(subject 2, number 3, step 4\)"):
        check_payload(checked, (payload + 1).data)
