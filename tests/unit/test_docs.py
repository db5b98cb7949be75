"""The Markdown files of the repository: every link leads somewhere, and every file they name exists."""

from __future__ import annotations

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
