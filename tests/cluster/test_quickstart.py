"""The end of the quickstart: DDP beside Poseidon on emulated machines."""

from __future__ import annotations

import pytest

from poseidon.cli.quickstart import compare_systems

pytestmark = pytest.mark.cluster


def test_both_systems_reach_the_same_loss_and_poseidon_sends_less() -> None:
    table = compare_systems(machines=2, steps=2)
    _, _, linear, ddp, ours = (line.split() for line in table.splitlines()[:5])
    assert "fully connected net" in table
    assert linear[-1] == "-"
    assert ddp[-1] == ours[-1]
    assert float(ours[-3]) < float(ddp[-3]) / 5
