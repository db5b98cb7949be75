"""Where a process finds its job's secret: in the environment, in a file, or in the user's own file.

``poseidon run`` draws a secret for every start and gives it to its workers. Under other launchers the user may give one
to all workers. Without any, the workers of one user share a file in the user's home, made when it is first needed: on
one machine, or where the home is shared, that is enough. No secret is ever sent over the network to a worker that has
none.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from poseidon.errors import ConfigError
from poseidon.job.settings import SECRET, SECRET_FILE

MOST_BYTES = 4096
SHORTEST_SECRET = 16


def find_secret(environ: Mapping[str, str] | None = None) -> bytes:
    """Return this job's secret; ``ConfigError`` if it cannot be used."""
    given = SECRET.read(environ)
    if given:
        return check_secret(given.encode(), SECRET.name)
    path = SECRET_FILE.read(environ)
    if path:
        return read_secret(Path(path))
    return _users_own(os.environ if environ is None else environ)


def check_secret(secret: bytes, origin: str) -> bytes:
    """Return a secret that is long enough."""
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(
            f"the job's secret ({origin}) has {len(secret)} bytes; at least {SHORTEST_SECRET} are needed "
            "(`openssl rand -hex 32` makes a good one)"
        )
    return secret


def read_secret(path: Path) -> bytes:
    """Return the secret in a file that nobody but its owner, who must be this user, can read or change."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            # Root's file is as good: Kubernetes and Slurm hand secrets over that way.
            if not stat.S_ISREG(state.st_mode) or state.st_uid not in (os.getuid(), 0):
                raise ConfigError(f"{path} must be a file of user {os.getuid()}, but belongs to user {state.st_uid}")
            if state.st_mode & 0o077:
                raise ConfigError(
                    f"{path} holds the job's secret, but others may open it (mode {stat.S_IMODE(state.st_mode):o}): "
                    f"chmod 600 {path}"
                )
            return check_secret(file.read(MOST_BYTES).strip(), str(path))
    except OSError as error:
        raise ConfigError(f"the job's secret cannot be read: {error}") from None


def _users_own(environ: Mapping[str, str]) -> bytes:
    """Return the secret of this user, in the home or, where that cannot be written, in the temporary folder."""
    problem: OSError | None = None
    for folder in _folders(environ):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.stat()
            if state.st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to user {state.st_uid}")
            path = folder / "secret"
            if not path.exists():
                _write_once(path)
        except OSError as error:
            problem = error
            continue
        return read_secret(path)
    raise ConfigError(
        f"this worker has no secret, and none can be kept for its user ({problem}); set {SECRET.name} or "
        f"{SECRET_FILE.name} alike on all workers"
    )


def _folders(environ: Mapping[str, str]) -> list[Path]:
    temporary = Path(tempfile.gettempdir(), f"poseidon-{os.getuid()}")
    home = environ.get("XDG_CONFIG_HOME") or (f"{environ['HOME']}/.config" if environ.get("HOME") else "")
    return [Path(home, "poseidon"), temporary] if home else [temporary]


def _write_once(path: Path) -> None:
    """Put a new secret at ``path``, whole, unless another worker is faster."""
    handle, name = tempfile.mkstemp(dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        Path(name).unlink()
