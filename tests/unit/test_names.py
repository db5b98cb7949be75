"""One class name, one meaning, in the whole tree."""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import poseidon

ROOT = Path(poseidon.__file__).parent


def public_classes() -> Iterator[tuple[str, str]]:
    """Yield each public top-level class and its file."""
    for path in sorted(ROOT.rglob("*.py")):
        for name in re.findall(r"^class ([^\W_]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
            yield name, str(path.relative_to(ROOT))


def test_no_two_classes_share_a_name():
    files = defaultdict(list)
    for name, file in public_classes():
        files[name].append(file)
    shared = {name: found for name, found in files.items() if len(found) > 1}
    assert not shared
