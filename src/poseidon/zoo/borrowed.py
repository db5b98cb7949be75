"""Networks of other packages as they come: ``torchvision/resnet50``, ``transformers/gpt2``.

Weights are random and nothing is downloaded. The packages are imported when a network is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from poseidon.errors import ConfigError
from poseidon.zoo.network import Task

IMAGE_SIZE, CLASSES = 224, 1000
TOKENS = 512
"""Longest text in a sample; shorter for models with fewer positions."""


def borrow(package: str, name: str, image_size: int | None, dropout: float | None) -> tuple[nn.Module, Task]:
    """Return a model of another package and its task; ``dropout`` replaces the probability of all dropout."""
    source = _import(package)
    if package == "torchvision":
        model: nn.Module = _image_model(source, name)
        task: Task = PictureTask(image_size or IMAGE_SIZE, CLASSES)
    else:
        model, task = _text_model(source, name, dropout)
    if dropout is not None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
    return model.train(), task


def _import(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise ConfigError(f"{package} cannot be imported ({error}); install it with pip install {package}") from None


def _image_model(torchvision: Any, name: str) -> nn.Module:
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise ConfigError(f"torchvision has no image classifier {name!r}; see torchvision.models.list_models()")
    # Some models draw their weights so carefully that it takes a minute; how they are drawn does not matter here.
    fast = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, **fast)
    return model


def _text_model(transformers: Any, name: str, dropout: float | None) -> tuple[nn.Module, Task]:
    try:
        config = transformers.AutoConfig.for_model(name)
    except (KeyError, ValueError):
        raise ConfigError(f"transformers has no model type {name!r}; gpt2, llama and opt are some it has") from None
    if dropout is not None:
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(config, key, dropout)
    try:
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise ConfigError(f"transformers/{name} is not a language model ({str(error).splitlines()[0]})") from None
    positions = getattr(config, "max_position_embeddings", TOKENS)
    return model, TextTask(config.vocab_size, min(TOKENS, positions))


@dataclass(frozen=True)
class PictureTask:
    """Images of random pixels and one of ``classes`` labels for each."""

    image_size: int
    classes: int

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return random images and labels."""
        random = torch.Generator().manual_seed(seed)
        images = torch.randn(size, 3, self.image_size, self.image_size, generator=random)
        return (images,), torch.randint(self.classes, (size,), generator=random)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross-entropy of the main output."""
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        return F.cross_entropy(logits, targets)


@dataclass(frozen=True)
class TextTask:
    """Random texts of ``length`` tokens; every token is to be predicted from those before it."""

    vocabulary: int
    length: int

    def sample(self, size: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return random texts, which are their own targets."""
        random = torch.Generator().manual_seed(seed)
        texts = torch.randint(self.vocabulary, (size, self.length), generator=random)
        return (texts,), texts

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the cross-entropy of the next tokens, in float32 whatever the model computes in."""
        logits = outputs.logits[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
