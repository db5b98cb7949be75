"""TLS 1.3 between the workers of a job, who trust nobody but each other.

The key and the certificate come from the job's secret, so whoever has the secret needs nothing else. Both ends present
the certificate, and accept exactly this one. Session keys are drawn anew for every connection: the secret, if it leaks
later, opens no recorded traffic. The ends also agree, as TLS lets them (ALPN), on whether large payloads are sealed
beside it (``sealing.py``).
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from pathlib import Path

from poseidon.errors import ConfigError, FrameError
from poseidon.wire.certificate import armour, make_certificate, private_key
from poseidon.wire.sealing import BLOCK_BYTES, BLOCKS_PER_KEY, SEALED_BYTES, Seal, find_cipher
from poseidon.wire.secret import JobSecret

RECORD_BYTES = 16 << 10
"""The most that one record of TLS holds."""
_PLAIN, _SEALED = "poseidon", f"poseidon-sealed-{SEALED_BYTES}-{BLOCK_BYTES}-{BLOCKS_PER_KEY}"
"""What the ends agree on; versions that would cut payloads differently must not."""
_OP_ENABLE_KTLS = 8
"""Python 3.12 has a name for it."""


class TlsSocket(ssl.SSLSocket):
    """An encrypted connection; large payloads are sealed if both ends can."""

    sealing: Seal | None = None
    """For what leaves."""
    opening: Seal | None = None
    """For what comes."""

    def seal(self, outgoing: bytes, incoming: bytes) -> None:
        """Seal large payloads from now on, with a key for each direction, if that was agreed on."""
        if self.selected_alpn_protocol() == _SEALED:
            self.sealing, self.opening = Seal(outgoing), Seal(incoming)


class Tls:
    """Encrypts new connections of one job."""

    def __init__(self, secret: JobSecret) -> None:
        key = secret.derive("tls key")
        certificate = make_certificate(key, "poseidon job")
        files = armour("CERTIFICATE", certificate) + armour("PRIVATE KEY", private_key(key))
        self._listening = _make_context(ssl.PROTOCOL_TLS_SERVER, certificate, files)
        # A ticket is for a second connection, and nothing would read it: to close a connection with something unread
        # resets it, and what was sent last is lost.
        self._listening.num_tickets = 0
        self._connecting = _make_context(ssl.PROTOCOL_TLS_CLIENT, certificate, files)

    def wrap(self, connection: socket.socket, is_listener: bool) -> TlsSocket:
        """Return a connection that will be encrypted after :meth:`shake_hands`. Does not block."""
        context = self._listening if is_listener else self._connecting
        wrapped = context.wrap_socket(connection, server_side=is_listener, do_handshake_on_connect=False)
        assert isinstance(wrapped, TlsSocket)
        return wrapped

    @staticmethod
    def shake_hands(connection: ssl.SSLSocket, who: str, deadline: float) -> None:
        """Agree on keys with ``who`` is at the other end; ``FrameError`` if that is not of this job."""
        try:
            # A socket's limit holds for the whole handshake, however the bytes come.
            connection.settimeout(max(0.01, deadline - time.monotonic()))
            connection.do_handshake()
        except ssl.SSLError as error:
            raise explain(error, who) from None


def _make_context(protocol: int, certificate: bytes, files: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.sslsocket_class = TlsSocket
    # The system's settings may ask for it. Then the kernel would take sealed payloads for records, or make them such.
    context.options &= ~_OP_ENABLE_KTLS
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([_PLAIN] if find_cipher() is None else [_SEALED, _PLAIN])
    # Whoever has the job's key may be at any address.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    # OpenSSL reads the key from a file only; this one is never on a disk and has no name.
    handle = os.memfd_create("poseidon-tls")
    try:
        os.write(handle, files)
        context.load_cert_chain(Path(f"/proc/self/fd/{handle}"))
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"this machine's OpenSSL ({ssl.OPENSSL_VERSION}) refuses the job's key: {error}") from None
    finally:
        os.close(handle)
    return context


def is_damage(error: OSError) -> bool:
    """Return whether an error of a read means that wrong bytes came, and not that the other end complains of ours."""
    return isinstance(error, ssl.SSLError) and "ALERT" not in (error.reason or "")


def explain(error: ssl.SSLError, who: str) -> FrameError:
    """Return what an error of a handshake with ``who`` means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return FrameError("wrong secret", f"{who} has the certificate of another secret")
    reason = error.reason or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE"):
        return FrameError("not encrypted", f"{who} does not speak TLS 1.3 ({reason})")
    if "UNKNOWN_CA" in reason or "CERTIFICATE" in reason:
        return FrameError("wrong secret", f"{who} refused our certificate: it has another secret ({reason})")
    return FrameError("handshake", f"{who} broke off the TLS handshake ({reason})")
