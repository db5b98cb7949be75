"""Compares steps with and without encryption, as ``encryption.sh`` measured them in turn.

Usage: python benchmarks/encryption.py FOLDER OUTPUT, where FOLDER has the reports 0-ROUND.json and 1-ROUND.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any


def main(folder: str, output: str) -> None:
    """Print the ratio of each system's median step times, and write all of them."""
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"0": [], "1": []})
    first: dict[str, Any] = {}
    for path in sorted(Path(folder).glob("*.json")):
        encrypt = path.stem.partition("-")[0]
        report = json.loads(path.read_text())
        first = first or {name: report[name] for name in ("poseidon", "date", "command", "hardware", "settings")}
        for cell in report["cells"]:
            for name, system in cell["systems"].items():
                if system["failure"]:
                    raise SystemExit(f"{path.name}: {name} failed: {system['failure']}")
                times[name][encrypt] += [one["step_ms"] for one in system["repetitions"]]
    found = {}
    print(f"{'system':<24}{'plain ms':>10}{'encrypted':>11}{'ratio':>8}   ratios of rounds")
    for name, both in times.items():
        plain, encrypted = (statistics.median(both[encrypt]) for encrypt in ("0", "1"))
        ratios = sorted(after / before for before, after in zip(both["0"], both["1"], strict=True))
        found[name] = {"plain_ms": both["0"], "encrypted_ms": both["1"], "ratio": encrypted / plain}
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f}"
        print(f"{name:<24}{plain:>10.1f}{encrypted:>11.1f}{encrypted / plain:>8.3f}   {spread}")
    Path(output).write_text(json.dumps(first | {"systems": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
