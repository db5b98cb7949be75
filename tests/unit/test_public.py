import inspect
import subprocess
import sys

import pytest
from torch import nn

import poseidon
from poseidon import errors
from poseidon.errors import ConfigError

NAMES = ["Checkpoint", "DistributedDataParallel", "Plan", "data", "distribute", "init", "plan", "ps"]


def test_the_public_names_are_these() -> None:
    assert sorted(poseidon.__all__) == sorted(NAMES)
    assert dir(poseidon) == sorted([*NAMES, "__version__"])
    for name in NAMES:
        assert inspect.getdoc(getattr(poseidon, name)), name


def test_another_name_is_refused_as_python_does() -> None:
    with pytest.raises(AttributeError, match="module 'poseidon' has no attribute 'Manager'"):
        _ = poseidon.Manager
    assert not hasattr(poseidon, "distribute_all")


def test_the_leading_arguments_are_torchs() -> None:
    ours = list(inspect.signature(poseidon.DistributedDataParallel).parameters)
    theirs = list(inspect.signature(nn.parallel.DistributedDataParallel).parameters)
    own = ours.index("routes")
    # torch has removed and added some over time; what both know comes in the same order.
    assert [name for name in ours[:own] if name in theirs] == [name for name in theirs if name in ours[:own]]
    assert {"module", "device_ids", "process_group", "find_unused_parameters", "static_graph"} <= set(ours[:own])


@pytest.mark.parametrize(
    "module", ["poseidon", "poseidon.planning.planner, poseidon.engine.sampling", "poseidon.cli.main"]
)
def test_the_pure_parts_need_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plan_can_be_made_and_printed_without_torch() -> None:
    code = (
        "import sys, poseidon\n"
        "sys.modules['torch'] = None\n"
        "from poseidon.planning.cluster import Cluster\n"
        "from poseidon.planning.planner import make_plan\n"
        "from poseidon.routes import standard_routes\n"
        "from poseidon.units import Load, ParameterSpec, Unit\n"
        "fc = Unit('fc', 'linear', (ParameterSpec('fc.weight', (4096, 4096), 4),))\n"
        "plan = make_plan([fc], {'fc': Load(32)}, Cluster(8), standard_routes())\n"
        "assert isinstance(plan, poseidon.Plan)\n"
        "print(plan)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "factors" in done.stdout


TREE = {
    errors.ConfigError: ValueError,
    errors.UnsupportedError: RuntimeError,
    errors.MismatchError: RuntimeError,
    errors.ServerError: RuntimeError,
    errors.WireError: RuntimeError,
    errors.FrameError: RuntimeError,
    errors.WorkerLostError: RuntimeError,
}


def test_every_error_is_ours_and_of_a_kind_that_callers_know() -> None:
    defined = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)}
    assert defined == {errors.PoseidonError, *TREE}
    for error, known in TREE.items():
        assert issubclass(error, errors.PoseidonError)
        assert issubclass(error, known)


def test_the_tree_of_errors_is_drawn_where_they_are() -> None:
    assert errors.__doc__ is not None
    for error in (errors.PoseidonError, *TREE):
        assert error.__name__ in errors.__doc__


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    error = errors.unknown_name("route", "pigeon", ("rows", "allreduce"))
    assert isinstance(error, errors.ConfigError)
    assert str(error) == "unknown route 'pigeon'; known: allreduce, rows"


def test_routes_that_are_no_mapping_are_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"routes is 'allreduce'; give a dict .*\{'\*': 'allreduce'\}"):
        poseidon.DistributedDataParallel(nn.Linear(2, 2), routes="allreduce")
