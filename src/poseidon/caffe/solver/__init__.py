"""Caffe's solvers: read ``solver.py`` first.

``nets.py`` finds out which nets to build, ``policies.py`` gives learning rates, ``rules.py`` and ``updater.py`` turn
gradients into updates, ``state.py`` holds the files of a snapshot's state, ``report.py`` the log's words,
``signals.py`` and ``workers.py`` the world outside.
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
