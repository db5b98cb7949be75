"""``poseidon status``: says in a terminal how a run is doing, or how it ended."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from poseidon.errors import ConfigError
from poseidon.launch.countdown import clock
from poseidon.observe.folder import STATE, SUMMARY, find_run, read_events, read_json
from poseidon.observe.page.server import STALE_S

LOST_STATUS = 3
"""Exit status if the launcher has gone without a word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("run", nargs="?", help="the run's folder, or its name below runs/; default: the newest")
    parser.add_argument("--json", action="store_true", help="print what is known as JSON")


def run(args: argparse.Namespace) -> int:
    """Show the run; 0: it runs or ended well, 1: it failed, 3: its launcher is gone."""
    folder = find_run(args.run)
    state, summary = read_json(folder / STATE), read_json(folder / SUMMARY)
    if not state and not summary:
        raise ConfigError(f"{folder} has no {STATE} yet: the job is starting, or never started")
    age_s = time.time() - float(state.get("updated_at") or 0.0)
    is_lost = not summary and age_s > STALE_S
    if args.json:
        state.pop("history", None)
        state.pop("timeline", None)
        facts = {"folder": str(folder), "is_running": not summary and not is_lost, "is_lost": is_lost}
        print(json.dumps({**facts, "state": state, "summary": summary}, indent=1))
    else:
        print(describe(folder, state, summary, age_s))
    return LOST_STATUS if is_lost else int(bool(summary.get("status")))


def describe(folder: Path, state: dict[str, Any], summary: dict[str, Any], age_s: float) -> str:
    """Return the run in words."""
    verdict = state.get("verdict") or {}
    lines = []
    if summary:
        how = "ended well" if not summary["status"] else f"ended with status {summary['status']}"
        lines.append(f"{folder}: {how} after {summary['seconds']:.0f} s, {summary['steps']} steps")
        lines += [f"  cause     {summary['cause']}"] if summary.get("cause") else []
        lines.append(f"  speed     {summary['steps_per_s']:.3g} steps/s, {summary['samples_per_s']:,.0f} samples/s")
        lines.append(f"  limit     {summary.get('verdict', '')}")
    else:
        how = f"no news from its launcher for {age_s:.0f} s" if age_s > STALE_S else "running"
        lines.append(f"{folder}: {how}, {state.get('elapsed_s', 0):.0f} s")
        lines.append(f"  speed     {state['steps_per_s']:.3g} steps/s, {state['samples_per_s']:,.0f} samples/s")
        if state.get("left_s") is not None:
            of = f" of {state['left_of']}" if state.get("left_of") else ""
            lines.append(f"  left      {clock(state['left_s'])}{of}")
        doubt = "" if verdict.get("is_sure") or verdict.get("cause") in ("starting", "unclear") else "probably "
        next_step = f": {verdict['next_step']}" if verdict.get("next_step") else ""
        lines.append(f"  limit     {doubt}{verdict.get('text', '')}{next_step}")
    if state.get("loss") is not None:
        lines.append(f"  loss      {float(state['loss']):.4g}")
    if state.get("slowest"):
        lines.append(f"  slowest   {state['slowest']}")
    lines += [f"  {event['event']:<9} {event.get('text', '')}" for event in read_events(folder, 3) if "text" in event]
    for one in state.get("workers") or []:
        waits = f", waits for {one['waits_for']}" if one.get("waits_for") else ""
        lines.append(
            f"  worker {one['rank']:<3} {one['host']}: step {one['step']}, {one['doing']}{waits}; a step: "
            f"{1e3 * one['forward_s']:.0f} + {1e3 * one['backward_s']:.0f} + {1e3 * one['between_s']:.0f} ms, "
            f"waits {1e3 * one['wait_s']:.0f} ms"
        )
    return "\n".join(lines)
