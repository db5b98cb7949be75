"""The solvers by name: one class per rule, as in pycaffe."""

from __future__ import annotations

import os

from poseidon.caffe.schema import SolverParameter
from poseidon.caffe.solver.solver import Connect, Solver
from poseidon.caffe.upgrade import read_solver
from poseidon.errors import unknown_name


class SGDSolver(Solver):
    """Stochastic gradient descent with momentum."""

    type = "SGD"


class NesterovSolver(Solver):
    """Nesterov's accelerated gradient."""

    type = "Nesterov"


class AdaGradSolver(Solver):
    """AdaGrad."""

    type = "AdaGrad"


class RMSPropSolver(Solver):
    """RMSProp."""

    type = "RMSProp"


class AdaDeltaSolver(Solver):
    """AdaDelta."""

    type = "AdaDelta"


class AdamSolver(Solver):
    """Adam."""

    type = "Adam"


SOLVERS: dict[str, type[Solver]] = {
    solver.type: solver
    for solver in (SGDSolver, NesterovSolver, AdaGradSolver, RMSPropSolver, AdaDeltaSolver, AdamSolver)
}
"""The solvers by ``type`` in a prototxt."""


def get_solver(definition: str | os.PathLike[str] | SolverParameter, connect: Connect | None = None) -> Solver:
    """Return the solver for the ``type`` of a prototxt or SolverParameter."""
    param = definition if isinstance(definition, SolverParameter) else read_solver(definition)
    if param.type not in SOLVERS:
        raise unknown_name("solver type", param.type, list(SOLVERS))
    return SOLVERS[param.type](param, connect)
