import itertools

from hypothesis import given
from hypothesis import strategies as st

from poseidon.units import Load, ParameterSpec, Unit

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8])), max_size=4))
def test_a_unit_is_as_large_as_its_parameters(parameters: list[tuple[tuple[int, ...], int]]) -> None:
    unit = Unit("layer", "dense", tuple(ParameterSpec("p", shape, itemsize) for shape, itemsize in parameters))
    places = [len(list(itertools.product(*map(range, shape)))) for shape, _ in parameters]
    assert [spec.numel for spec in unit.parameters] == places
    assert unit.numel == sum(places)
    assert unit.size_bytes == sum(count * itemsize for count, (_, itemsize) in zip(places, parameters, strict=True))


def test_a_scalar_is_one_value() -> None:
    assert ParameterSpec("temperature", (), 4).numel == 1


def test_the_weight_comes_first_and_the_bias_second() -> None:
    weight, bias = ParameterSpec("fc.weight", (10, 784), 4), ParameterSpec("fc.bias", (10,), 4)
    assert Unit("fc", "linear", (weight, bias)).matrix == (10, 784)


def test_units_are_compared_by_what_they_say() -> None:
    weight = ParameterSpec("fc.weight", (2, 3), 4)
    assert Unit("fc", "linear", (weight,)) == Unit("fc", "linear", (ParameterSpec("fc.weight", (2, 3), 4),))
    assert Unit("fc", "linear", (weight,)) != Unit("fc", "dense", (weight,))
    assert len({Load(32), Load(32, 4), Load(32, 2)}) == 2
