"""Learning rates and seeds of Keras, in Keras scripts and in TensorFlow loops."""

from __future__ import annotations

from typing import Any

import keras

from poseidon.following.script_report import ScriptReport

SEED_STRIDE = 7919
"""Distance between the random states of two workers' dropout layers."""


def scale_rate(optimizer: Any, factor: float, report: ScriptReport) -> None:
    """Multiply an optimizer's learning rate, unless it comes from a schedule."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)  # of one that scales the loss
    if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        report.say(f"{optimizer.name}: its learning rate comes from a schedule and stays as it is")
    else:
        optimizer.learning_rate = float(optimizer.learning_rate) * factor
