"""``--balance``, ``--balance-max`` and ``--fixed-batch``: how they reach the workers, and what the user hears. Pure.

The workers do it (``data/balancing.py``); the launcher only hears their shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from poseidon.errors import ConfigError
from poseidon.job.settings import BALANCE, BALANCE_MAX, BATCHES, COUNT, FIXED_BATCH, PER_WORKER

NOTHING = (
    "--balance has nothing to balance: the program's batches do not come from poseidon.data.ElasticSampler "
    "(sampler.over(loader)), so they stay as the program deals them"
)
_LATE_STEP = 3
"""A worker in this step would have told its shares."""


def add_balance_options(parser: argparse._ActionsContainer) -> None:
    """Declare the options."""
    parser.add_argument(
        "--balance", action="store_true", help="let the workers' shares of each batch follow their measured speeds"
    )
    parser.add_argument(
        "--balance-max", type=COUNT.read_argument, metavar="N", help="with --balance: the largest share, in samples"
    )
    parser.add_argument(
        "--fixed-batch",
        choices=BATCHES,
        help="what the batch size of ElasticSampler counts, and what stays when workers come and go (default total)",
    )


def balance_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables that pass the options on to the workers."""
    if args.balance_max is not None and not args.balance:
        raise ConfigError("--balance-max needs --balance")
    if args.balance and args.fixed_batch == PER_WORKER:
        raise ConfigError("--balance lets shares follow speed, --fixed-batch per-worker keeps them; choose one")
    if (args.balance or args.fixed_batch) and (args.auto or args.as_caffe):
        given = "--balance" if args.balance else "--fixed-batch"
        raise ConfigError(
            f"{given} is for programs that use poseidon.data.ElasticSampler; --auto and --as-caffe deal batches in "
            "their own way: leave it out"
        )
    found = {BALANCE.name: "1" if args.balance else "", FIXED_BATCH.name: args.fixed_batch or ""}
    found[BALANCE_MAX.name] = "" if args.balance_max is None else str(args.balance_max)
    return {name: text for name, text in found.items() if text}


class BalanceNews:
    """What the workers tell of their shares, for the user."""

    def __init__(self, is_asked: bool) -> None:
        self._is_asked = is_asked
        self._told: set[int] = set()
        self._shares: Sequence[int] = ()
        self._is_said = False

    def hear(self, rank: int, facts: Mapping[str, Any]) -> str:
        """Take a worker's report; return a line for the user, if there is one."""
        if isinstance(facts.get("shares"), list):
            self._told.add(rank)
            self._shares = [int(share) for share in facts["shares"]]
        is_late = isinstance(facts.get("step"), int) and facts["step"] >= _LATE_STEP
        return self._nothing() if is_late and rank not in self._told else ""

    def end(self) -> str:
        """Return the last line."""
        if self._shares:
            return f"shares of the batch at the end, by rank: {' '.join(map(str, self._shares))}" * self._is_asked
        return self._nothing()

    def _nothing(self) -> str:
        if self._is_said or not self._is_asked:
            return ""
        self._is_said = True
        return NOTHING
