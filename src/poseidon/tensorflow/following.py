"""A TensorFlow 1 script under ``--auto``: everything that is installed when it imports TensorFlow."""

from __future__ import annotations

from poseidon.following.options import AutoOptions
from poseidon.following.patches import Patches
from poseidon.following.script_report import ScriptReport
from poseidon.team.team import Team
from poseidon.tensorflow.batch_moments import BatchMoments, is_asked_for
from poseidon.tensorflow.datasets import Datasets
from poseidon.tensorflow.files import Files
from poseidon.tensorflow.gradients import GraphGradients
from poseidon.tensorflow.seeds import Seeds
from poseidon.tensorflow.sessions import Sessions
from poseidon.tensorflow.waiting import WaitingCalls


class Following:
    """The hooks in TensorFlow, and the checks at the end."""

    def __init__(self, team: Team, options: AutoOptions, seed: int, report: ScriptReport) -> None:
        gradients = GraphGradients(team, report, float(team.size) if options.scale_lr else 1.0)
        calls = WaitingCalls()
        self.datasets = Datasets(team.rank, team.size, options, report)
        self._sessions = Sessions(team, gradients, self.datasets, calls, report)
        self._parts = (
            gradients,
            BatchMoments(team, calls, report, sync_batchnorm=is_asked_for()),
            self._sessions,
            Files(team, self._sessions, report) if options.files != "shared" else None,
            self.datasets,
            Seeds(team.rank, seed),
        )

    @property
    def has_trained(self) -> bool:
        """Whether the workers have taken any step together."""
        return self._sessions.has_trained

    def install(self, patches: Patches) -> None:
        """Install the hooks."""
        for part in self._parts:
            if part is not None:
                part.install(patches)

    def conclude(self) -> None:
        """Check at the end that the workers hold the same. Collective."""
        self._sessions.verify()
