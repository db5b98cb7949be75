"""Networks of other packages; a stand-in takes the place of a package that may not be installed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from poseidon import zoo
from poseidon.errors import ConfigError


class _TinyText(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, 8)
        self.drop = nn.Dropout(config.resid_pdrop)
        self.head = nn.Linear(8, config.vocab_size)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.drop(self.embed(input_ids))))


class _Config:
    def __init__(self) -> None:
        self.vocab_size, self.max_position_embeddings = 11, 5
        self.resid_pdrop, self.summary_use_proj = 0.1, True

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def _for_model(name: str) -> _Config:
    if name != "gpt2":
        raise ValueError(name)
    return _Config()


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    package = SimpleNamespace(
        AutoConfig=SimpleNamespace(for_model=_for_model),
        AutoModelForCausalLM=SimpleNamespace(from_config=_TinyText),
    )
    monkeypatch.setitem(sys.modules, "transformers", package)


@pytest.mark.usefixtures("transformers")
def test_a_text_model_predicts_every_next_token() -> None:
    network = zoo.build("transformers/gpt2", dropout=0.0)
    inputs, targets = network.batch(3, seed=1)
    assert inputs[0].shape == (3, 5)
    logits = network.model(*inputs).logits
    by_hand = torch.stack([-logits[b, t].log_softmax(0)[targets[b, t + 1]] for b in range(3) for t in range(4)]).mean()
    torch.testing.assert_close(network.loss(network.model(*inputs), targets), by_hand)
    assert network.model.drop.p == 0.0


@pytest.mark.usefixtures("transformers")
def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="no model type 'gpt3'"):
        zoo.build("transformers/gpt3")
    with pytest.raises(ConfigError, match="as it comes"):
        zoo.build("transformers/gpt2", tiny=True)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="pip install transformers"):
        zoo.build("transformers/gpt2")
