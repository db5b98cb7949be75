"""What the first backward of a static graph showed, which all others must repeat."""

from __future__ import annotations

from poseidon.engine.step import Step


class StaticGraph:
    """Empty until a first backward has settled."""

    def __init__(self) -> None:
        self.used: tuple[bool, ...] = ()
        """By parameter: whether any worker uses it."""
        self.additions: tuple[int, ...] | None = None
        """By parameter: how often its gradient accumulates here. None before this worker's first backward."""

    def learn(self, step: Step) -> None:
        """Record what a settled backward showed."""
        assert step.verdict is not None
        self.used = step.verdict.used
        if self.additions is None and not step.call.is_joined:
            self.additions = tuple(step.additions[number] for number in range(len(step.schedule.model.parameters)))
