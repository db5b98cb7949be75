"""Poseidon in the place of torch's class, for programs that wrap the model themselves: Accelerate, Trainer, TRL, timm.

``poseidon run --as-ddp train.py`` and ``python -m poseidon.trainers train.py`` (under torchrun, srun, ``accelerate
launch``) put :class:`poseidon.DistributedDataParallel` where programs look for
``torch.nn.parallel.DistributedDataParallel``, before they look; :func:`replace` does so in a script of one's own. The
name is public, and torch's tests of the class hold for ours, so no library is patched. Worker 0 says which models were
wrapped, and it is an error if there were none: then another class exchanged the gradients, or nothing did.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from poseidon.api import DistributedDataParallel
from poseidon.errors import ConfigError
from poseidon.job.world import World

_TORCHS = nn.parallel.DistributedDataParallel
_HOMES = ("torch.nn.parallel", "torch.nn.parallel.distributed")

wrapped: list[str] = []
"""The models that were wrapped since :func:`replace`, in words."""


class StandIn(DistributedDataParallel):
    """Poseidon's wrapper under torch's name, for code that asks for torch's class and calls it."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module, *args, **kwargs)
        note(self)

    @classmethod
    def _get_active_ddp_module(cls) -> None:
        """Torch's compiler asks which wrapper it should cut its graphs for; ours needs none."""
        return


def note(model: DistributedDataParallel) -> None:
    """Remember a model that was wrapped, and have worker 0 say so."""
    parameters = list(model.module.parameters())
    travelling = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    total = sum(parameter.numel() for parameter in parameters)
    few = f" of {total:,}" if travelling < total else ""
    wrapped.append(f"{model.module._get_name()}, {travelling:,}{few} parameters")
    if model.process_group is not None and torch.distributed.get_rank(model.process_group) == 0:
        print(f"poseidon as DDP: {wrapped[-1]}: gradients travel by Poseidon", file=sys.stderr, flush=True)


StandIn.__name__ = _TORCHS.__name__  # and not __qualname__, by which pickle finds it here


def replace() -> None:
    """Put Poseidon's class where torch's is, now and for what is imported later. Call it before the model is wrapped.

    Modules that have taken torch's class by name get ours, too, but for torch's own: they know its insides.
    """
    if nn.parallel.DistributedDataParallel is _TORCHS:
        register_optimizer_step_pre_hook(_look_at_step)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "poseidon") and name not in _HOMES:
            continue
        names = getattr(module, "__dict__", {})
        for attribute in [key for key, value in list(names.items()) if value is _TORCHS]:
            setattr(module, attribute, StandIn)


def choose_devices() -> None:
    """Let Accelerate use several workers on machines without a GPU, as ``accelerate launch --cpu`` does.

    Without this variable each worker would train on its own.
    """
    if not torch.accelerator.is_available():
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


def check(is_asked: bool) -> None:
    """Raise if no model was wrapped although there are several workers, and the user asked for it; or else say so."""
    if wrapped or World.from_environment().size == 1:
        return
    if is_asked:
        raise ConfigError(_NOTHING)
    _tell(_NOTHING)


_NOTHING = (
    "the script has wrapped no model with torch.nn.parallel.DistributedDataParallel, so Poseidon exchanged nothing; "
    "for a script written for one device use --auto"
)
_is_told = False


def _look_at_step(*_: object) -> None:
    """Tell before the first step of an optimizer that nothing is exchanged, instead of after hours."""
    global _is_told
    if wrapped or _is_told:
        return
    _is_told = True
    if World.from_environment().size > 1:
        _tell("an optimizer steps, and no model was wrapped with torch.nn.parallel.DistributedDataParallel so far")


def _tell(text: str) -> None:
    if World.from_environment().rank == 0:
        print(f"poseidon as DDP: {text}", file=sys.stderr, flush=True)
