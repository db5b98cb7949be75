"""How systems of a benchmark are named, and what a name says about one. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from poseidon.errors import ConfigError

POWERSGD_RANK = 4
SHORT = {
    **{kind: f"poseidon-distribute:lossy={kind}" for kind in ("bf16", "int8", "topk")},
    "lowrank": f"poseidon-distribute:lossy=lowrank:rank={POWERSGD_RANK}",
    "local": "poseidon-distribute:consistency=local:sync_every=20",
    "ssp": "poseidon-distribute:consistency=ssp:staleness=auto",
}
"""Short names of Poseidon's modes that are not exact; further options replace those given here."""


@dataclass(frozen=True)
class SystemTraits:
    """What a comparison must know of a system before it runs."""

    is_exact: bool
    """Every step uses the mean of all workers' gradients."""
    is_drifting: bool
    """Workers may be at different steps, so the loss depends on time."""
    period: int
    """Steps after which its traffic repeats."""
    warms_up: bool
    """Its first steps are exact, and take another time than the later ones."""


def read_system(text: str) -> tuple[str, dict[str, Any]]:
    """Return the system and its options from ``SYSTEM[:OPTION=VALUE...]``, such as ``poseidon:bucket_cap_mb=8``."""
    name, *words = text.split(":")
    if name in SHORT:
        name, *usual = SHORT[name].split(":")
        words = usual + words
    options: dict[str, Any] = {}
    for word in words:
        key, is_given, value = word.partition("=")
        if not is_given:
            raise ConfigError(f"{text}: {word!r} is not understood; write OPTION=VALUE, such as bucket_cap_mb=8")
        if key == "routes":
            options[key] = {"*": value}
            continue
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return name, options


def traits_of(text: str) -> SystemTraits:
    """Return what a system's name and options say about it."""
    name, options = read_system(text)
    consistency = options.get("consistency", "bsp")
    is_lossy = name in ("ddp-bf16", "ddp-powersgd") or bool(options.get("lossy"))
    period = options.get("sync_every", 1) if consistency == "local" else 1
    is_exact, is_drifting = not is_lossy and consistency == "bsp", consistency in ("ssp", "asp")
    return SystemTraits(is_exact, is_drifting, int(period), bool(options.get("warmup_steps")))
