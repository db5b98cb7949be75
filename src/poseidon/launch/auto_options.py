"""The options of ``--auto``, declared once: ``poseidon run`` takes them and passes them on to every worker. Pure."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from poseidon.planning.lossy import LOSSY

BATCHES = ("per-worker", "total")
EVALUATIONS = ("full", "first", "shard")
LOSSES = ("auto", "mean", "sum")
FILES = ("private", "python", "shared")
WRITERS = ("first", "each")
OUTERS = ("average", "nesterov")


@dataclass(frozen=True)
class AutoOption:
    """One option as argparse wants it."""

    argument: str
    help: str
    default: Any = None
    choices: tuple[str, ...] | None = None
    type: type[int] | type[float] | None = None
    metavar: str | None = None
    is_flag: bool = False

    @property
    def name(self) -> str:
        """The attribute that holds the value."""
        return self.argument.lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse._ActionsContainer, has_default: bool = False) -> None:
        """Declare the option; without a default, None or False means that it was not given."""
        if self.is_flag:
            parser.add_argument(self.argument, action="store_true", help=self.help)
            return
        more: dict[str, Any] = {"choices": self.choices, "metavar": self.metavar}
        if self.type is not None:
            more["type"] = self.type
        parser.add_argument(self.argument, default=self.default if has_default else None, help=self.help, **more)

    def is_given(self, args: argparse.Namespace) -> bool:
        """Whether the user gave the option."""
        value = getattr(args, self.name)
        return value is not None and value is not False  # 0 and 0.0 equal False, and are given

    def words(self, args: argparse.Namespace) -> list[str]:
        """Return the words that pass the option on, if it was given."""
        if not self.is_given(args):
            return []
        return [self.argument] if self.is_flag else [self.argument, str(getattr(args, self.name))]


AUTO_OPTIONS = (
    AutoOption("--scale-lr", "with --auto: multiply learning rates by the number of workers", is_flag=True),
    AutoOption("--batch", "with --auto: what the script's batch size counts", "per-worker", BATCHES),
    AutoOption("--eval", "with --auto: who computes outputs in evaluation", "full", EVALUATIONS),
    AutoOption("--loss", "with --auto: how the loss combines the samples of a batch", "auto", LOSSES),
    AutoOption("--same-loss", "with --auto: a loss that the script reads is the workers' mean", is_flag=True),
    AutoOption("--accumulate", "with --auto: exchange gradients once per step, not in every backward", is_flag=True),
    AutoOption("--local", "with --auto: let workers exchange parameters every H steps only", type=int, metavar="H"),
    AutoOption("--outer", "with --auto --local: what is done with their mean change", "average", OUTERS),
    AutoOption("--lossy", "with --auto: let gradients lose something, to send fewer bytes", choices=LOSSY),
    AutoOption("--rank", "with --lossy lowrank: columns of the factors (4)", type=int, metavar="R"),
    AutoOption("--density", "with --lossy topk: the share of values that travels (0.01)", type=float, metavar="D"),
    AutoOption("--block-size", "with --lossy int8: values that share a scale (256)", type=int, metavar="N"),
    AutoOption("--warmup-steps", "with --lossy: exact steps at the beginning (0)", type=int, metavar="N"),
    AutoOption("--seed", "with --auto: seed of a script that sets none", type=int, metavar="N"),
    AutoOption("--whole", "with --auto: loaders to leave whole, separated by commas", "", metavar="NAMES"),
    AutoOption("--deal", "with --auto: loaders to deal out, separated by commas", "", metavar="NAMES"),
    AutoOption("--files", "with --auto: how other workers' files are kept apart", "private", FILES),
    AutoOption("--output", "with --auto: whose output is shown", "first", WRITERS),
    AutoOption("--timeout", "with --auto: seconds to wait for another worker", type=float, metavar="S"),
)
