import pytest
from hypothesis import given
from hypothesis import strategies as st

from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.planner import make_plan
from poseidon.planning.table import format_bytes, format_table
from poseidon.routes import standard_routes
from poseidon.units import Kind, Load, ParameterSpec, Unit

SLOW = Cluster(4, between=Link(1e8, 1e-4), flops=1e12)


def unit(name: str, kind: Kind, *shapes: tuple[int, ...]) -> Unit:
    return Unit(name, kind, tuple(ParameterSpec(f"{name}.{i}", shape, 4) for i, shape in enumerate(shapes)))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (37.74e6, "37.7 MB"), (1.5e9, "1.5 GB")]
)
def test_sizes_are_written_as_people_say_them(size: float, text: str) -> None:
    assert format_bytes(size) == text


CELLS = st.text("abcxyz0159.*", min_size=1, max_size=9)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=6))
def test_columns_are_aligned_and_nothing_is_lost(rows: list[tuple[str, ...]]) -> None:
    lines = format_table(("layer", "route", "why"), rows).splitlines()
    assert [tuple(line.split()) for line in lines[:1] + lines[2:]] == [("layer", "route", "why"), *rows]
    starts = [index for index, mark in enumerate(lines[1]) if mark == "-" and lines[1][index - 1 : index] in ("", " ")]
    for line, row in zip(lines[2:], rows, strict=True):
        assert [line[start:].split()[0] for start in starts] == list(row)


def test_a_plan_shows_routes_rows_bytes_and_reasons() -> None:
    units = [unit("conv", "dense", (8, 3, 3, 3), (8,)), unit("fc", "linear", (1000, 2000), (1000,))]
    text = str(make_plan(units, {"fc": Load(32)}, SLOW, standard_routes()))
    header, _, conv, fc, total, cluster = text.splitlines()
    assert header.split() == ["layer", "shape", "rows", "route", "bytes/step", "why"]
    assert " ".join(conv.split()) == "conv 8x3x3x3 + 8 allreduce 1.34 kB no cheaper exact form"
    assert " ".join(fc.split()) == "fc 1000x2000 + 1000 32 factors 1.15 MB 10.4x fewer bytes than allreduce"
    assert total == "one machine sends 1.15 MB per step, 10.4x less than allreduce alone (12 MB)"
    assert cluster == f"cluster: {SLOW}"


def test_a_scalar_has_a_shape_too() -> None:
    assert "temperature  1 " in str(make_plan([unit("temperature", "dense", ())], {}, SLOW, standard_routes()))


def test_a_plan_without_savings_claims_none() -> None:
    text = str(make_plan([unit("conv", "dense", (100, 100))], {}, SLOW, standard_routes()))
    assert "one machine sends 60 kB per step\n" in text
    assert "less than" not in text


def test_one_worker_exchanges_nothing() -> None:
    assert "one worker: nothing is exchanged" in str(
        make_plan([unit("conv", "dense", (9, 9))], {}, Cluster(1), standard_routes())
    )


def test_only_long_runs_of_dense_units_are_folded() -> None:
    convs = [unit(f"conv{i}", "dense", (10, 10)) for i in range(7)]
    fc = unit("fc", "linear", (100, 100))
    lines = str(make_plan([*convs[:3], fc, *convs[3:]], {"fc": Load(1)}, SLOW, standard_routes())).splitlines()[2:-2]
    assert [line.split()[0] for line in lines] == ["conv0", "conv1", "conv2", "fc", "conv3"]
    assert lines[-1].startswith("conv3 ... conv6")
    assert "4 units" in lines[-1]
    # Four gradients of 400 bytes, each of which crosses the card 2 * 3 / 4 times.
    assert "2.4 kB" in lines[-1]
