"""A run's state in Prometheus' text format. Pure.

Written by hand: the format is a line per value, and a library of its own would be one more thing to install.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def format_metrics(state: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """Return the metrics of a run."""
    verdict = state.get("verdict") or {}
    workers = state.get("workers") or []
    blocks = [
        _block("poseidon_up", "Whether the job runs.", "gauge", [({}, float(bool(state) and not summary))]),
        _block("poseidon_steps_per_second", "Steps in a second.", "gauge", [({}, state.get("steps_per_s"))]),
        _block("poseidon_samples_per_second", "Samples of all workers.", "gauge", [({}, state.get("samples_per_s"))]),
        _block("poseidon_loss", "The last loss that was told or printed.", "gauge", [({}, _number(state.get("loss")))]),
        _block(
            "poseidon_left_seconds",
            "Seconds until the training ends, or what the label says, where that is known.",
            "gauge",
            [({"of": str(state.get("left_of") or "training")}, state.get("left_s"))],
        ),
        _block("poseidon_restarts_total", "Restarts of the job.", "counter", [({}, state.get("restart"))]),
        _block(
            "poseidon_limited",
            "What limits the job; 1 if the verdict is sure, 0.5 if not.",
            "gauge",
            [
                (
                    {"cause": verdict.get("cause", ""), "host": verdict.get("host", "")},
                    1.0 if verdict.get("is_sure") else 0.5,
                )
            ]
            if verdict
            else [],
        ),
    ]
    for name, key, text in (
        ("poseidon_step", "step", "The step that a worker is in."),
        ("poseidon_memory_bytes", "memory_bytes", "Resident memory of a worker."),
        ("poseidon_device_memory_bytes", "device_bytes", "Memory that a worker has taken on its GPU."),
        ("poseidon_cores_used", "cpu", "Processors that a worker keeps busy."),
        ("poseidon_queued_messages", "queued", "Messages that waited in a worker's queues, at most."),
        ("poseidon_queued_bytes", "queued_bytes", "Bytes that waited in a worker's queues, at most."),
        ("poseidon_unsent_bytes", "unsent_bytes", "Bytes in the kernel's buffers of a worker, not sent yet."),
        ("poseidon_silent_seconds", "silent_s", "Time since a worker's last record."),
    ):
        blocks.append(_block(name, text, "gauge", ((_who(one), one.get(key)) for one in workers)))
    blocks.append(
        _block(
            "poseidon_waited_seconds_total",
            "What a worker has waited for others.",
            "counter",
            ((_who(one), one.get("waited_s")) for one in workers),
        )
    )
    parts = ("forward", "backward", "between", "wait")
    blocks.append(
        _block(
            "poseidon_step_seconds",
            "Where the time of a step goes, by worker and part.",
            "gauge",
            (({**_who(one), "part": part}, one.get(f"{part}_s")) for one in workers for part in parts),
        )
    )
    blocks.append(
        _block(
            "poseidon_route_bytes_total",
            "Bytes that all workers sent, by route.",
            "counter",
            (({"route": str(one.get("route", ""))}, one.get("bytes")) for one in state.get("routes") or []),
        )
    )
    links = [({"from": one.get("from", ""), "to": one.get("to", "")}, one) for one in state.get("links") or []]
    blocks += [
        _block(
            "poseidon_link_bytes_total",
            "Bytes from one machine to another.",
            "counter",
            ((labels, one.get("bytes")) for labels, one in links),
        ),
        _block(
            "poseidon_link_bits_per_second",
            "What a link carries while in use.",
            "gauge",
            ((labels, 1e6 * float(one.get("mbit_per_s") or 0)) for labels, one in links),
        ),
        _block(
            "poseidon_link_resent_bytes_total",
            "Bytes that were sent again.",
            "counter",
            ((labels, one.get("resent_bytes")) for labels, one in links),
        ),
    ]
    return "".join(blocks)


def _number(value: object) -> object:
    """Return a number that JSON could only hold as a word: ``nan`` or ``inf``."""
    return float(value) if value in ("nan", "inf", "-inf") else value


def _who(worker: Mapping[str, Any]) -> dict[str, str]:
    return {"worker": str(worker.get("rank", "")), "host": str(worker.get("host", ""))}


def _block(name: str, text: str, kind: str, values: Iterable[tuple[Mapping[str, str], object]]) -> str:
    lines = [f"{name}{_labels(labels)} {value}" for labels, value in values if isinstance(value, int | float)]
    if not lines:
        return ""
    return "\n".join([f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines, ""])


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (
        f'{name}="{value}"'
        for name, text in labels.items()
        for value in [str(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")]
    )
    return "{" + ",".join(escaped) + "}"
