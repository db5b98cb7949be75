"""MkDocs hook: brings pages from outside ``docs/`` into the site and makes every link fit it.

README, changelog and their like stay where people look for them in a repository. Their links, and links to them, are
written for the repository; here they are rewritten for the site. A link to a file that the site does not hold, such as
an example, becomes that file's path.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "benchmarks/notebook.md": "benchmarks/notebook.md",
    "benchmarks/predictions.md": "benchmarks/predictions.md",
}
"""Pages outside ``docs/``, and where they are in the site."""

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):<code>~?([^<]*)</code>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside."""
    for source, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Rewrite the links of a page for the site."""
    uri = page.file.src_uri
    source = next((path for path, inside in OUTSIDE.items() if inside == uri), f"docs/{uri}")
    return "".join(
        part if part.startswith("```") else _LINK.sub(lambda link: _rewrite(link, source, uri, files), part)
        for part in re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    )


def on_page_content(html: str, **_: Any) -> str:
    """Show the cross-references of docstrings as plain names."""
    return _ROLE.sub(r"<code>\1</code>", html).replace("<p>::</p>", "").replace("::</p>", ":</p>")


def _rewrite(link: re.Match[str], source: str, uri: str, files: Files) -> str:
    mark, text, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return link[0]
    wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    inside = OUTSIDE.get(wanted, wanted.removeprefix("docs/") if wanted.startswith("docs/") else "")
    if (ROOT / "docs" / inside / "README.md").exists():
        inside = f"{inside}/README.md" if inside else "index.md"
    if inside and files.get_file_from_path(inside) is not None:
        shown = os.path.relpath(inside, posixpath.dirname(uri) or ".")
        return f"{mark}[{text}]({shown}{'#' + anchor if anchor else ''})"
    if not (ROOT / wanted).exists():
        return link[0]  # MkDocs reports it
    return f"`{wanted}`" if text in (wanted, posixpath.basename(wanted)) else f"{text} (`{wanted}`)"
