"""The Markdown files of the repository: links lead somewhere, files they name exist, and the reference is whole."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = {"build", "dist", "runs"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part in SKIPPED or part.startswith(".") for part in path.relative_to(ROOT).parts)
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
CODE_PATH = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|sh|md|json|yaml|toml))`")
HISTORY = ROOT / "docs" / "decisions"
"""Notes of their day: the files they name may have moved."""


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MkDocs make them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(re.sub(r"\s+", "-", words))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize(
    "page", [page for page in PAGES if HISTORY not in page.parents], ids=lambda page: str(page.relative_to(ROOT))
)
def test_files_that_are_named_exist(page: Path) -> None:
    places = (ROOT, ROOT / "src", ROOT / "src" / "poseidon", page.parent)
    missing = [name for name in CODE_PATH.findall(prose(page)) if not any((place / name).exists() for place in places)]
    assert not missing


def test_every_picture_is_shown() -> None:
    shown = "".join(page.read_text() for page in PAGES)
    unused = [path.name for path in (ROOT / "docs" / "pictures").glob("*.png") if path.name not in shown]
    assert not unused


ENTRY = re.compile(r"^::: (\S+)((?:\n +.*)*)", flags=re.MULTILINE)
REFERENCE = dict(ENTRY.findall((ROOT / "docs" / "reference.md").read_text()))
OTHER_FRAMEWORKS = ("poseidon.keras", "poseidon.jax", "poseidon.trainers", "poseidon.caffe")
"""They take seconds to import."""


@pytest.mark.parametrize("name", [name for name in REFERENCE if not name.startswith(OTHER_FRAMEWORKS)])
def test_the_reference_shows_what_it_names(name: str) -> None:
    shown, options = pkgutil.resolve_name(name), REFERENCE[name]
    members = re.findall(r"members: \[(.*)\]", options)
    for member in members[0].split(", ") if members else ():
        # A member may also be an attribute that the constructor sets.
        owners = [kind for kind in shown.__mro__ if member in vars(kind) or f"self.{member} =" in source_of(kind)]
        assert owners, f"{name} has no {member}"
        assert shown in owners or "inherited_members: true" in options, f"the site leaves {name}.{member} out"


def source_of(kind: type) -> str:
    """Return a class's source, if it is one of ours."""
    return inspect.getsource(kind) if kind.__module__.startswith("poseidon") else ""


@pytest.mark.parametrize("package", ["poseidon", "poseidon.data", "poseidon.ps", "poseidon.routes", "poseidon.lab"])
def test_the_reference_has_all_public_names(package: str) -> None:
    names = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    missing = {
        name for name in names if name not in REFERENCE and not any(one.startswith(f"{name}.") for one in REFERENCE)
    }
    assert not missing
