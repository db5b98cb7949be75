"""The options of ``--auto`` and what they mean. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from poseidon.errors import ConfigError, unknown_name
from poseidon.job.limits import time_limit
from poseidon.launch.auto_options import AUTO_OPTIONS, BATCHES, EVALUATIONS, FILES, LOSSES, OUTERS, WRITERS
from poseidon.planning.lossy import LossyChoice, read_lossy

USAGE = "python -m poseidon.auto [options] script.py [arguments] | -m module [arguments]"


@dataclass(frozen=True)
class AutoOptions:
    """The user's choices of how an unmodified script is distributed."""

    batch: Literal["per-worker", "total"] = "per-worker"
    """What a batch size in the script counts: the samples of one worker, or of all workers together."""
    evaluation: Literal["full", "first", "shard"] = "full"
    """Who computes a model's outputs in evaluation: every worker all of them, worker 0 for all, or each a part."""
    loss: Literal["auto", "mean", "sum"] = "auto"
    """How the script's loss combines the samples of a batch; auto: read from its graph, with ``batch="total"``."""
    same_loss: bool = False
    """Give the script the mean over workers of a training loss that it reads."""
    scale_lr: bool = False
    """Multiply the optimizers' learning rates by the number of workers."""
    accumulate: bool = False
    """Gradients of several backwards are exchanged once per step; the script looks at none of them in between."""
    local: int | None = None
    """Steps between two exchanges of parameters; None: gradients are exchanged in every backward."""
    outer: Literal["average", "nesterov"] = "average"
    """With ``local``: whether parameters are averaged, or stepped by their mean change with Nesterov momentum."""
    seed: int | None = None
    """The seed of a script that sets none; None: worker 0 draws one."""
    files: Literal["private", "python", "shared"] = "private"
    """How files of workers other than worker 0 are kept from its own: by the kernel, by Python, or not at all."""
    output: Literal["first", "each"] = "first"
    """Whose output is shown."""
    whole: tuple[str, ...] = ()
    """Names of loaders that every worker reads as a whole."""
    deal: tuple[str, ...] = ()
    """Names of loaders that are dealt out whenever gradients are on."""
    lossy: LossyChoice | None = None
    """How much the gradients of PyTorch models may lose; None: nothing."""
    timeout_s: float | None = None
    """How long to wait for another worker; None: ``POSEIDON_TIMEOUT``."""

    def __post_init__(self) -> None:
        for what, value, known in (
            ("--batch", self.batch, BATCHES),
            ("--eval", self.evaluation, EVALUATIONS),
            ("--loss", self.loss, LOSSES),
            ("--files", self.files, FILES),
            ("--output", self.output, WRITERS),
            ("--outer", self.outer, OUTERS),
        ):
            if value not in known:
                raise unknown_name(what, value, known)
        if twice := sorted(set(self.whole) & set(self.deal)):
            raise ConfigError(f"{twice[0]} is in both --whole and --deal; name it in one of them")
        self._check_local()
        if self.timeout_s is not None:
            time_limit(self.timeout_s, "--timeout")
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; it must not be negative")

    def _check_local(self) -> None:
        if self.local is None:
            if self.outer != "average":
                raise ConfigError(f"--outer {self.outer} needs --local H: only then there are outer steps")
            return
        if self.local < 1:
            raise ConfigError(f"--local is {self.local}; expected at least 1 step between two exchanges")
        if self.accumulate:
            raise ConfigError("--local with --accumulate: gradients do not travel; leave --accumulate out")
        if self.lossy is not None:
            raise ConfigError("--local with --lossy: gradients do not travel; leave one of them out")
        if self.batch == "total":
            raise ConfigError(
                "--local with --batch total: each worker trains on its own batches, and that is never what one machine "
                "computes; leave one of them out"
            )


@dataclass(frozen=True)
class ScriptTarget:
    """What to run: a script's path or a module's name, and its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]


def add_auto_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``--auto`` to a parser."""
    for option in AUTO_OPTIONS:
        option.add_to(parser, has_default=True)


def parse(arguments: Sequence[str]) -> tuple[AutoOptions, ScriptTarget]:
    """Split a command line into our options, the script or module, and its own arguments."""
    parser = argparse.ArgumentParser(prog="poseidon run --auto", usage=USAGE, allow_abbrev=False)
    add_auto_arguments(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module instead of a script")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    known = parser.parse_args(arguments)
    words = known.module if known.module is not None else known.script
    if not words:
        raise ConfigError(f"there is no script to run; usage: {USAGE}")
    return options_of(known), ScriptTarget(words[0], known.module is not None, tuple(words[1:]))


def options_of(known: argparse.Namespace) -> AutoOptions:
    """Return the options read by a parser with :func:`add_auto_arguments`."""
    if known.local is not None and known.warmup_steps is not None and known.lossy is None:
        raise ConfigError(
            f"--local with --warmup-steps {known.warmup_steps}: scripts take local steps from the first one on; leave "
            "--warmup-steps out"
        )
    return AutoOptions(
        batch=known.batch,
        evaluation=known.eval,
        loss=known.loss,
        same_loss=known.same_loss,
        scale_lr=known.scale_lr,
        accumulate=known.accumulate,
        local=known.local,
        outer=known.outer,
        seed=known.seed,
        files=known.files,
        output=known.output,
        whole=_names(known.whole),
        deal=_names(known.deal),
        lossy=read_lossy(known.lossy, known.rank, known.density, known.block_size, known.warmup_steps),
        timeout_s=known.timeout,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
