"""Hashes of the packages that Poseidon needs at run time: writes ``requirements.lock``.

    python scripts/lock.py [--index URL]...

takes the versions from ``constraints.txt`` and, for each, the SHA-256 of every file that the package indexes offer: by
default those that pip is configured to use. Hashes of the same version that are in the file already stay, so that
machines with other indexes can add theirs. A test compares versions with ``constraints.txt`` and ``pyproject.toml``.

PyTorch is not in it: each kind of device has a build of its own, on an index of its own, under one version number.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXTRAS = ("caffe", "encryption")
"""Besides the engine's own: what reads and writes users' files, and what encrypts."""
NEEDED_BY_THEM = ("cffi", "pycparser")
"""What these packages need themselves."""
LEFT_OUT = ("torch",)
HEAD = """\
# Made by scripts/lock.py. With PyTorch installed:
#     pip install --require-hashes --no-deps -r requirements.lock && pip install --no-deps .
"""
_FILE_END = re.compile(r"\.(whl|tar\.gz|zip)$")


def normalized(name: str) -> str:
    """Return a package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted() -> list[str]:
    """Return the packages to lock: the dependencies of ``pyproject.toml``."""
    # By hand: Python 3.10 has no TOML reader.
    text = (ROOT / "pyproject.toml").read_text()
    lines = [re.search(rf"^{name} = \[(.*)\]$", text, re.MULTILINE) for name in ("dependencies", *EXTRAS)]
    words = [word for line in lines if line is not None for word in re.findall(r'"([A-Za-z0-9_.-]+)', line[1])]
    return sorted(normalized(word) for word in (*words, *NEEDED_BY_THEM) if word not in LEFT_OUT)


def pinned() -> dict[str, str]:
    """Return the versions in ``constraints.txt``."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {normalized(name): version for name, version in found}


def locked() -> dict[str, tuple[str, set[str]]]:
    """Return version and hashes of each package in ``requirements.lock``."""
    text = LOCK.read_text() if LOCK.exists() else ""
    blocks = re.findall(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    return {name: (version, set(re.findall(r"[0-9a-f]{64}", hashes))) for name, version, hashes in blocks}


def draw(packages: dict[str, tuple[str, set[str]]]) -> str:
    """Return the content of ``requirements.lock``."""
    parts = [
        f"{name}=={version}" + "".join(f" \\\n    --hash=sha256:{one}" for one in sorted(hashes))
        for name, (version, hashes) in sorted(packages.items())
    ]
    return HEAD + "\n".join(parts) + "\n"


class _Page(HTMLParser):
    """Collects the names and hashes of the files that an index lists for one package."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        link = urllib.parse.urlsplit(dict(attrs).get("href") or "") if tag == "a" else None
        match = re.fullmatch(r"sha256=([0-9a-f]{64})", link.fragment) if link else None
        if link and match:
            self.files[urllib.parse.unquote(link.path.rpartition("/")[2])] = match[1]


def version_of(file: str, name: str) -> str | None:
    """Return the version that a file's name states; None if it is not one of this package. Pure."""
    stem = _FILE_END.sub("", file)
    parts = stem.split("-")
    if file.endswith(".whl"):
        return parts[1] if len(parts) >= 5 and normalized(parts[0]) == name else None
    return parts[-1] if len(parts) >= 2 and normalized("-".join(parts[:-1])) == name else None


def offered(index: str, name: str, version: str) -> set[str]:
    """Return the hashes of all files of a version on one index."""
    url = f"{index.rstrip('/')}/{name}/"
    if url.startswith("file:"):
        url += "index.html"
    page = _Page()
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            page.feed(answer.read().decode())
    except urllib.error.URLError as error:
        print(f"lock: {name}: {index} does not answer ({error.reason})", file=sys.stderr)
    return {digest for file, digest in page.files.items() if version_of(file, name) == version}


def configured() -> list[str]:
    """Return the indexes that pip uses here."""
    from pip._internal.models.index import PyPI

    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = dict(re.findall(r"^\S+\.((?:extra-)?index-url)='(.*)'$", told.stdout, re.MULTILINE))
    return [found.get("index-url", PyPI.simple_url), *found.get("extra-index-url", "").replace("\\n", " ").split()]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", action="append", metavar="URL", help="an index in the simple form; repeatable")
    indexes = parser.parse_args().index or configured()
    versions, before = pinned(), locked()
    packages = {}
    for name in wanted():
        hashes = set().union(*(offered(index, name, versions[name]) for index in indexes))
        old_version, old_hashes = before.get(name, ("", set()))
        hashes |= old_hashes if old_version == versions[name] else set()
        if not hashes:
            sys.exit(f"lock: no index offers a file of {name} {versions[name]} with its SHA-256")
        packages[name] = (versions[name], hashes)
        print(f"{name} {versions[name]}: {len(hashes)} files")
    LOCK.write_text(draw(packages))


if __name__ == "__main__":
    main()
