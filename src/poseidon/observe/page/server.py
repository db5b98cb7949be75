"""Serves a run's folder to a browser: the page, its state as it changes, logs, and metrics for Prometheus.

Whoever may see it has the token: in the address once, then in a cookie; or as a bearer token, for Prometheus. What the
job prints is sent as plain text or JSON and never as markup, and the browser is told to run nothing but our own files.
"""

from __future__ import annotations

import contextlib
import hmac
import http.cookies
import json
import secrets
import socket
import socketserver
import threading
import time
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError
from poseidon.observe.folder import (
    LAUNCHER_LOG,
    STATE,
    SUMMARY,
    TRACE,
    read_events,
    read_json,
    tail_lines,
    worker_logs,
)
from poseidon.observe.metrics import format_metrics

COOKIE = "poseidon_page_{port}"
"""With the port, which cookies otherwise do not know: the pages of two jobs must not turn each other out."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
LOOK_S = 0.5
"""Seconds between two looks at the folder, while somebody watches."""
STALE_S = 15.0
"""A running job whose state is older has lost its launcher."""
BEAT_S = 10.0
"""A quiet stream shows this often that it is there."""
LAST_S = 2.0
"""How long a page that closes waits for browsers to take the last news."""
_FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
_HERE = Path(__file__).parent
_LAST_PORT = 65535
_LOG_LINES = 300
_MOST_STREAMS = 32


def snapshot(folder: Path) -> dict[str, Any]:
    """Return everything that the page shows of a run."""
    state, summary = read_json(folder / STATE), read_json(folder / SUMMARY)
    age_s = time.time() - float(state.get("updated_at") or 0.0)
    return {
        "state": state,
        "summary": summary,
        "events": read_events(folder, 200),
        "is_stale": not summary and age_s > STALE_S,
        "has_trace": (folder / TRACE).exists(),
        "logs": sorted(rank for rank, _ in worker_logs(folder)),
    }


class PageServer:
    """A page in this process, on threads of its own. ``url`` holds the token."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.folder = folder
        self.token = secrets.token_urlsafe(24)
        if not 0 <= port <= _LAST_PORT:
            raise ConfigError(f"the page's port is {port}, expected a port from 1 to {_LAST_PORT}, or 0 for a free one")
        handler = _handler(self)
        try:
            self._server = _Server((host, port), handler)
        except (OSError, UnicodeError) as error:  # the latter: no name of a host looks like this
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"the page cannot be served at {host} port {port}: {reason}; choose another port, or another address "
                "of this machine"
            ) from None
        self.port = int(self._server.server_address[1])
        self.cookie = COOKIE.format(port=self.port)
        shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.url = f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/?token={self.token}"
        self.is_closing = threading.Event()
        self.streams = threading.Semaphore(_MOST_STREAMS)
        self._thread = threading.Thread(target=self._server.serve_forever, name="poseidon-page", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Serve until interrupted."""
        with contextlib.suppress(KeyboardInterrupt):
            self._thread.join()

    def close(self) -> None:
        """Stop serving, once those who watch have seen the end."""
        if self.is_closing.is_set():
            return
        self.is_closing.set()
        deadline = time.monotonic() + LAST_S
        for _ in range(_MOST_STREAMS):
            if not self.streams.acquire(timeout=max(0.0, deadline - time.monotonic())):
                break
        with contextlib.suppress(OSError):
            # Wakes the thread, which looks only twice a second whether it is to end.
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # A browser that went away is no error of ours, and its address no news for the terminal.
    block_on_close = False

    def server_bind(self) -> None:
        """Bind without asking for this machine's full name, which takes long where no name server answers."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - as in the base class
        return


def _handler(page: PageServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "Poseidon"
        sys_version = ""
        timeout = 30.0
        """For a client that connects and says nothing."""

        def log_message(self, *_: Any) -> None:
            return

        def do_GET(self) -> None:
            address = urllib.parse.urlsplit(self.path)
            query = urllib.parse.parse_qs(address.query)
            given = query.get("token", [""])[0]
            if given and _is_equal(given, page.token) and address.path == "/":
                self._admit()
                return
            if not (_is_equal(given, page.token) or self._has_token()):
                text = "Open the address that poseidon printed: it holds the token.\n"
                self._send(text.encode(), "text/plain; charset=utf-8", HTTPStatus.FORBIDDEN)
                return
            self._answer(address.path, query)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self, path: str, query: dict[str, list[str]]) -> None:
            if path in _FILES:
                name, kind = _FILES[path]
                self._send((_HERE / name).read_bytes(), kind)
            elif path == "/state":
                self._send(json.dumps(snapshot(page.folder)).encode(), "application/json")
            elif path == "/stream" and self.command == "GET":
                self._stream()
            elif path == "/metrics":
                text = format_metrics(read_json(page.folder / STATE), read_json(page.folder / SUMMARY))
                self._send(text.encode(), "text/plain; version=0.0.4; charset=utf-8")
            elif path == "/log":
                self._send_log(query.get("of", ["launcher"])[0])
            elif path == "/trace.json" and (page.folder / TRACE).exists():
                self._send((page.folder / TRACE).read_bytes(), "application/json")
            else:
                self._send(b"There is no such page.\n", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)

        def _send_log(self, which: str) -> None:
            # Names come from numbers, never from the address: no path leads out of the folder.
            name = LAUNCHER_LOG if which == "launcher" else f"worker-{int(which)}.log" if which.isdecimal() else ""
            lines = tail_lines(page.folder / name, _LOG_LINES) if name else []
            self._send("\n".join(lines).encode(errors="replace"), "text/plain; charset=utf-8")

        def _stream(self) -> None:
            if not page.streams.acquire(blocking=False):
                self._send(b"Too many open pages.\n", "text/plain; charset=utf-8", HTTPStatus.SERVICE_UNAVAILABLE)
                return
            try:
                self._head("text/event-stream; charset=utf-8", None)
                self._send_changes()
            except OSError:
                pass  # the browser has gone
            finally:
                page.streams.release()

        def _send_changes(self) -> None:
            seen: object = None
            sent_at = 0.0
            is_last = False
            while not is_last:
                # Asked first: what was written before the page closes is sent.
                is_last = page.is_closing.is_set()
                now = _stamps(page.folder)
                if now != seen:
                    seen, sent_at = now, time.monotonic()
                    self.wfile.write(b"data: " + json.dumps(snapshot(page.folder)).encode() + b"\n\n")
                elif time.monotonic() - sent_at > BEAT_S:
                    seen, sent_at = None, time.monotonic()
                    self.wfile.write(b": here\n\n")
                page.is_closing.wait(LOOK_S)

        def _admit(self) -> None:
            """Put the token into a cookie, so that it does not stay in the address bar."""
            self.send_response(HTTPStatus.SEE_OTHER)
            self.send_header("Location", "/")
            self.send_header("Set-Cookie", f"{page.cookie}={page.token}; HttpOnly; SameSite=Strict; Path=/")
            self.send_header("Content-Length", "0")
            self._harden()
            self.end_headers()

        def _has_token(self) -> bool:
            cookies = http.cookies.SimpleCookie()
            with contextlib.suppress(http.cookies.CookieError):
                cookies.load(self.headers.get("Cookie", ""))
            kept = cookies[page.cookie].value if page.cookie in cookies else ""
            kind, _, bearer = self.headers.get("Authorization", "").partition(" ")
            return _is_equal(kept, page.token) or (kind == "Bearer" and _is_equal(bearer.strip(), page.token))

        def _head(self, kind: str, length: int | None, status: HTTPStatus = HTTPStatus.OK) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if length is not None:
                self.send_header("Content-Length", str(length))
            self._harden()
            self.end_headers()

        def _harden(self) -> None:
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")

        def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
            self._head(kind, len(content), status)
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler


def _is_equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode())


def _stamps(folder: Path) -> tuple[int, ...]:
    """Return what changes when the folder does."""
    stamps = []
    for name in (STATE, SUMMARY, TRACE):
        try:
            stamps.append((folder / name).stat().st_mtime_ns)
        except OSError:
            stamps.append(0)
    return tuple(stamps)
