"""Caffe's solvers: read ``solver.py`` first.

``nets.py`` resolves which nets to build, ``policies.py`` computes learning rates, ``rules.py`` and ``updater.py`` turn
gradients into updates, ``state.py`` writes and reads snapshots, ``net_outputs.py`` logs outputs; ``signals.py`` and
``workers.py`` connect the solver to the outside.
"""

from poseidon.caffe.solver.solver import Solver
from poseidon.caffe.solver.types import (
    SOLVERS,
    AdaDeltaSolver,
    AdaGradSolver,
    AdamSolver,
    NesterovSolver,
    RMSPropSolver,
    SGDSolver,
    get_solver,
)

__all__ = [
    "SOLVERS",
    "AdaDeltaSolver",
    "AdaGradSolver",
    "AdamSolver",
    "NesterovSolver",
    "RMSPropSolver",
    "SGDSolver",
    "Solver",
    "get_solver",
]
