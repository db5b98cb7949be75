"""A run's folder as a job would leave it, made up: for tests of the page, with words that want to be markup."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from poseidon.observe.folder import EVENTS, LAUNCHER_LOG, STATE, TRACE

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def make_run(folder: Path, workers: int = 4) -> Path:
    """Write a folder of a job that runs."""
    folder.mkdir(parents=True)
    (folder / STATE).write_text(json.dumps(make_state(workers)))
    events = [
        {"at": time.time() - 60, "event": "start", "command": "train.py", "hosts": ["node0"]},
        {"at": time.time() - 30, "event": "verdict", "text": f"limited by {EVIL}"},
        {"at": time.time() - 10, "event": EVIL, "worker": EVIL},
    ]
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / LAUNCHER_LOG).write_text(f"2026-11-17 02:00:00 started\n2026-11-17 02:00:01 {EVIL}\n")
    for rank in range(workers):
        (folder / f"worker-{rank}.log").write_text(f"step 1 loss 0.5\n{EVIL}\nlast words of worker {rank}\n")
    (folder / TRACE).write_text('{"traceEvents": []}')
    return folder


def make_state(workers: int) -> dict[str, Any]:
    """Return the state of a job whose fourth machine has a slow link."""
    hosts = [f"node{rank}" for rank in range(workers)]
    spans = [["phase", "in forward", 0.0, 0.03], ["phase", "in backward", 0.03, 0.08], ["wait", "fc6", 0.08, 0.1]]
    spans += [["phase", "between steps", 0.08, 0.105], ["item", "sharded fc7", 0.04, 0.09], ["item", EVIL, 0.05, 0.1]]
    points = 40
    return {
        "command": f"train.py {EVIL}",
        "began_at": time.time() - 60,
        "updated_at": time.time(),
        "elapsed_s": 60.0,
        "is_running": True,
        "restart": 0,
        "steps_per_s": 9.5,
        "samples_per_s": 1216.0,
        "loss": 0.41,
        "verdict": {
            "cause": "link",
            "text": "limited by the wire: fc6 waits 41 ms a step on node3's link (312 of the 940 Mbit/s of the others)",
            "next_step": "check the cable, the switch port and the card of node3",
            "host": "node3",
            "rank": 3,
            "is_sure": True,
        },
        "slowest": "",
        "workers": [
            {
                "rank": rank,
                "host": host,
                "step": 570,
                "doing": "in backward",
                "doing_s": 0.01,
                "waits_for": EVIL if rank == 1 else "",
                "where": "",
                "silent_s": 0.2,
                "forward_s": 0.03,
                "backward_s": 0.05,
                "between_s": 0.004,
                "wait_s": 0.021,
                "step_s": 0.105,
                "waits_s": {"fc6": 0.02},
                "memory_bytes": 437 << 20,
                "device_bytes": 0,
                "device_busy": -1.0,
                "cpu": 0.98,
                "delay": 0.01,
                "queued": 3 * rank,
                "queued_bytes": 900_000 * rank,
                "unsent_bytes": 65_536,
                "waited_s": 12.0,
                "stack": [],
            }
            for rank, host in enumerate(hosts)
        ],
        "links": [
            {
                "from": a,
                "to": b,
                "bytes": 10**9,
                "resent_bytes": 0,
                "mbit_per_s": 312.0 if "node3" in (a, b) else 940.0,
                "rtt_ms": 0.4,
            }
            for a in hosts
            for b in hosts
            if a != b
        ],
        "routes": [
            {"route": "sharded", "bytes": 3 * 10**9, "step_bytes": 5 * 10**6},
            {"route": EVIL, "bytes": 10**9, "step_bytes": 10**6},
        ],
        "plan": {
            "name": "layer by layer",
            "step": 3,
            "items": [
                {"route": "sharded", "name": EVIL, "bytes": 4e6, "predicted_s": 0.03, "measured_s": 0.05},
                {"route": "factors", "name": "fc6", "bytes": 1e6, "predicted_s": 0.01, "measured_s": None},
            ],
        },
        "timeline": [{"rank": rank, "step": 568, "spans": spans} for rank in range(workers)],
        "history": {
            "width_s": 1.5,
            "steps": [14.0] * points,
            "samples": [1800] * points,
            "loss": [2.0 / (at + 1) for at in range(points)],
            "memory_bytes": [[437 << 20] * points] * workers,
        },
    }  # fmt: skip
