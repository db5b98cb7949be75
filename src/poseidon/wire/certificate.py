"""The job's certificate, made from 32 bytes that only the job's workers know. Pure.

Python's ``ssl`` can use a key and a certificate but make neither, and one more dependency for two hundred bytes is too
many. So this computes what RFC 8032 defines: an Ed25519 key's public half and its signature of a certificate. All other
cryptography is OpenSSL's, which also computes the public half from the key and refuses a certificate that has another.
Nothing here takes constant time; it runs once in a process, on the machine that holds the secret.
"""

from __future__ import annotations

import base64
import hashlib
from typing import NamedTuple

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P


class _Point(NamedTuple):
    """A point (x, y) of the curve as (X, Y, Z, T), with x = X/Z, y = Y/Z, xy = T/Z."""

    x: int
    y: int
    z: int
    t: int


_BASE_Y = 4 * pow(5, -1, _P) % _P
_BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_BASE = _Point(_BASE_X, _BASE_Y, 1, _BASE_X * _BASE_Y % _P)


def _add(one: _Point, two: _Point) -> _Point:
    a, b = (one.y - one.x) * (two.y - two.x) % _P, (one.y + one.x) * (two.y + two.x) % _P
    c, d = 2 * one.t * two.t * _D % _P, 2 * one.z * two.z % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return _Point(e * f % _P, g * h % _P, f * g % _P, e * h % _P)


def _times_base(factor: int) -> bytes:
    """Return the encoding of the base point added to itself ``factor`` times."""
    total, power = _Point(0, 1, 1, 0), _BASE
    while factor:
        if factor & 1:
            total = _add(total, power)
        power = _add(power, power)
        factor >>= 1
    inverse = pow(total.z, -1, _P)
    x, y = total.x * inverse % _P, total.y * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _expand(key: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(key).digest()
    scalar = int.from_bytes(digest[:32], "little")
    return scalar & ((1 << 254) - 8) | 1 << 254, digest[32:]


def public_half(key: bytes) -> bytes:
    """Return the public key of an Ed25519 key of 32 bytes."""
    return _times_base(_expand(key)[0])


def sign(key: bytes, message: bytes) -> bytes:
    """Return the Ed25519 signature of a message."""
    scalar, prefix = _expand(key)
    nonce = int.from_bytes(hashlib.sha512(prefix + message).digest(), "little") % _ORDER
    commitment = _times_base(nonce)
    hashed = hashlib.sha512(commitment + _times_base(scalar) + message).digest()
    answer = (nonce + int.from_bytes(hashed, "little") * scalar) % _ORDER
    return commitment + answer.to_bytes(32, "little")


# DER, as far as a certificate and a private key need it.

_INTEGER, _BITS, _OCTETS, _OID, _UTF8, _UTC, _TIME, _SEQUENCE, _SET = 2, 3, 4, 6, 12, 23, 24, 48, 49
_EXPLICIT_0 = 0xA0


def _der(tag: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    if len(body) < 128:
        return bytes([tag, len(body)]) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 128 | len(size)]) + size + body


_ED25519 = _der(_SEQUENCE, _der(_OID, bytes([43, 101, 112])))
_COMMON_NAME = _der(_OID, bytes([85, 4, 3]))


def make_certificate(key: bytes, name: str) -> bytes:
    """Return a certificate of an Ed25519 key for ``name``, signed by itself, in DER; equal for equal arguments."""
    subject = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, name.encode()))))
    # It is as old and lasts as long as the key: a job's clocks may differ, and its end is the certificate's.
    validity = _der(_SEQUENCE, _der(_UTC, b"700101000000Z"), _der(_TIME, b"99991231235959Z"))
    public = public_half(key)
    serial = hashlib.sha256(public).digest()[:15]
    content = _der(
        _SEQUENCE,
        _der(_EXPLICIT_0, _der(_INTEGER, b"\2")),  # version 3
        _der(_INTEGER, b"\1" + serial),
        _ED25519,
        subject,
        validity,
        subject,
        _der(_SEQUENCE, _ED25519, _der(_BITS, b"\0", public)),
    )
    return _der(_SEQUENCE, content, _ED25519, _der(_BITS, b"\0", sign(key, content)))


def private_key(key: bytes) -> bytes:
    """Return an Ed25519 key as PKCS #8, in DER."""
    return _der(_SEQUENCE, _der(_INTEGER, b"\0"), _ED25519, _der(_OCTETS, _der(_OCTETS, key)))


def armour(kind: str, data: bytes) -> bytes:
    """Return DER in the form of a PEM file: ``kind`` is CERTIFICATE or PRIVATE KEY."""
    text = base64.encodebytes(data).decode()
    return f"-----BEGIN {kind}-----\n{text}-----END {kind}-----\n".encode()
