"""Tables that travel together: each has the bits that it has alone, for a constant number of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from poseidon.engine.discover import find_units
from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.schedule import Item
from poseidon.routes import table_groups
from poseidon.routes.base import Brought, LiveItem, LiveUnit
from poseidon.routes.parcels import Parcel, join_opened, open_message, write_message
from poseidon.routes.rows import RowsExchanger
from poseidon.routes.table_groups import Repeats, TableGroup, group_tables

SIZE = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
FAST, SLOW = 1e10, 1e7
# Torch 2.11 warns of sparse tensors even where their check is declined.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Desk:
    """Messages between workers that take turns in one thread; delivers once all have sent."""

    def __init__(self) -> None:
        self._rank = 0
        self._waiting: dict[int, list[tuple[Parcel, Future[Any]]]] = {}
        self._later: list[Any] = []
        """Called at the end of a worker's turn."""

    def start(self, parcel: Parcel, future: Future[Any]) -> Future[Any]:
        self._waiting.setdefault(self._rank, []).append((parcel, future))
        return future

    def call_later(self, work: Any) -> None:
        self._later.append(work)

    def end_turn(self) -> None:
        for work in self._later:
            work()
        self._later.clear()
        self._rank += 1
        if self._rank < SIZE:
            return
        parcels = [[parcel for parcel, _ in self._waiting[rank]] for rank in range(SIZE)]
        assert all(parcel.shipment in ((), tuple(other.unit for other in mine)) for mine in parcels for parcel in mine)
        messages = [write_message(mine) for mine in parcels]
        for rank in range(SIZE):
            opened = [open_message(message, parcels[rank], rank, peer) for peer, message in enumerate(messages)]
            gathered = join_opened(opened, parcels[rank], rank)
            for (parcel, future), one in zip(self._waiting[rank], gathered, strict=True):
                if parcel.meanwhile is not None and rank != 1:  # the time for that need not come
                    parcel.meanwhile()
                future.set_result(one)


class Worker:
    """One worker's tables and exchanger."""

    def __init__(self, tables: list[nn.Module], desk: Desk, bytes_per_s: float, aside: bool) -> None:
        self.units: list[LiveUnit] = list(find_units(copy.deepcopy(nn.ModuleList(tables))))
        team = SimpleNamespace(size=SIZE, result=lambda future, *_, **__: future.result(0))
        cluster = Cluster(machines=SIZE, between=Link(8 * bytes_per_s, 1e-6))
        context: Any = SimpleNamespace(team=team, pairs=desk, cluster=cluster, is_cuda=aside)
        self._exchanger = RowsExchanger(context)
        shipment = tuple(unit.index for unit in self.units) if len(self.units) > 1 else ()
        self._items = [
            LiveItem(
                Item(n, "rows", unit.name, (n,), (n,), (unit.spec,), unit.weight.numel(), 4, shipment=shipment),
                (unit,),
                unit.parameters,
                None,
            )
            for n, unit in enumerate(self.units)
        ]
        self._exchanger.prepare(self._items)
        self.brought = [Brought() for _ in self.units]

    def start(self, gradients: list[Tensor | None]) -> None:
        for unit, gradient in zip(self.units, gradients, strict=True):
            unit.weight.grad = gradient
        self._exchanges = [
            self._exchanger.start(item, [brought], 1)
            for item, brought in reversed(list(zip(self._items, self.brought, strict=True)))
        ][::-1]

    def finish(self, unused: tuple[int, ...] = ()) -> list[Tensor | None]:
        for number, exchange in enumerate(self._exchanges):
            exchange.finish(number not in unused)
        del self._exchanges
        return [unit.weight.grad for unit in self.units]


def _table(rows: int, width: int, kind: str = "table", dtype: torch.dtype = torch.float32) -> nn.Module:
    made: type[Any] = nn.EmbeddingBag if kind == "bag" else nn.Embedding
    return made(rows, width, sparse=kind == "sparse", dtype=dtype)  # type: ignore[no-any-return]


MIXED = [
    *((9, 4), (30, 4), (9, 6), (1, 4), (50, 3), (7, 6)),
    *((9, 4, "sparse"), (8, 4, "sparse"), (20, 5, "sparse")),
    *((40, 4, "bag"), (30, 4, "bag"), (11, 3, "bag", torch.float64)),
    *((9, 4, "table", torch.bfloat16), (13, 4, "table", torch.bfloat16), (9, 3, "table", torch.float16)),
]


def _gradient(table: nn.Module, seed: int) -> Tensor | None:
    """Return a sparse gradient whose rows repeat; by seed none, an empty one, or one that is summed already."""
    weight: Any = table.weight
    generator = torch.Generator().manual_seed(seed)
    if seed % 7 == 3:
        return None
    count = 0 if seed % 7 == 5 else 24
    indices = torch.randint(0, weight.shape[0], (1, count), generator=generator)
    few = torch.randn(6, weight.shape[1], generator=generator).to(weight.dtype)
    values = few.repeat(count // 6, 1).to(weight.device)
    gradient = torch.sparse_coo_tensor(indices.to(weight.device), values, weight.shape, check_invariants=False)
    return gradient.coalesce() if seed % 7 == 1 else gradient


def _mean(weight: Tensor, gradients: list[Tensor | None], is_sparse: bool, kept: Tensor | None) -> Tensor:
    """Return the mean of one table's gradients, by itself."""
    parts = [one.coalesce() for one in gradients if one is not None]
    if is_sparse:
        indices = torch.cat(
            [torch.empty(1, 0, dtype=torch.long, device=weight.device), *(part.indices() for part in parts)], 1
        )
        values = torch.cat([weight.new_empty(0, weight.shape[1]), *(part.values() for part in parts)]) / SIZE
        return torch.sparse_coo_tensor(indices, values, weight.shape, check_invariants=False).coalesce()
    total = torch.zeros_like(weight) if kept is None else kept.clone()
    if weight.dtype.itemsize < 4:
        wide = torch.zeros_like(weight, dtype=torch.float32)
        for part in parts:
            wide.index_add_(0, part.indices()[0], part.values().float())
        return total.add_((wide / SIZE).to(weight.dtype))
    for part in parts:
        total.index_add_(0, part.indices()[0], part.values(), alpha=1 / SIZE)
    return total


def _bits(tensor: Tensor) -> list[Any]:
    if tensor.is_sparse:
        assert tensor.is_coalesced()
        return [tensor.indices().tolist(), _bits(tensor.values())]
    return [tuple(tensor.shape), tensor.contiguous().view(torch.uint8).tolist()]


def _same(mean: Tensor, expected: Tensor) -> None:
    assert _bits(mean) == _bits(expected)


def _close(mean: Tensor, expected: Tensor) -> None:
    """Compare but for the order in which duplicates are added in host memory."""
    if mean.is_sparse:
        assert torch.equal(mean.indices(), expected.indices())
    tolerance = 2e-2 if mean.dtype.itemsize < 4 else 1e-5
    torch.testing.assert_close(mean.to_dense(), expected.to_dense(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum the duplicates of all tables in one call."""
    monkeypatch.setattr(TableGroup, "_sums_together", True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("aside", [False, True], ids=["at once", "on another thread"])
@pytest.mark.parametrize("bytes_per_s", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("keeps", [(), (1,), range(len(MIXED))], ids=["fresh", "one kept", "all kept"])
def test_tables_that_travel_together_have_the_bits_of_each_alone(
    keeps: Any, bytes_per_s: float, aside: bool, device: str
) -> None:
    _compare(keeps, bytes_per_s, aside, _same, device)


@pytest.mark.usefixtures("as_on_cuda")
def test_duplicates_of_all_tables_can_be_summed_in_one_call() -> None:
    _compare((), FAST, True, _close)


def _compare(
    keeps: Any, bytes_per_s: float, aside: bool, compare: Callable[[Tensor, Tensor], None], device: str = "cpu"
) -> None:
    tables = [_table(*spec).to(device) for spec in MIXED]  # type: ignore[arg-type]
    unused = (0, 3)
    desk = Desk()
    workers = [Worker(tables, desk, bytes_per_s, aside) for _ in range(SIZE)]
    weights = [unit.weight.detach() for unit in workers[0].units]
    sparse = [unit.spec.is_sparse for unit in workers[0].units]
    kept = [
        torch.randn(weight.shape).to(weight) if number in keeps and not sparse[number] else None
        for number, weight in enumerate(weights)
    ]
    gradients = [[_gradient(table, 31 * rank + place) for place, table in enumerate(tables)] for rank in range(SIZE)]
    for worker, mine in zip(workers, gradients, strict=True):
        for brought, tensor in zip(worker.brought, kept, strict=True):
            brought.kept = None if tensor is None else tensor.clone()
        worker.start([None if gradient is None else gradient.clone() for gradient in mine])
        desk.end_turn()
    for worker in workers:
        for number, mean in enumerate(worker.finish(unused)):
            if number in unused and not sparse[number]:
                before = kept[number]
                assert mean is before is None or torch.equal(mean, before)  # type: ignore[arg-type]
                continue
            column = [mine[number] for mine in gradients]
            expected = _mean(weights[number], column, sparse[number], kept[number])
            assert mean is not None
            compare(mean, expected)


class _Counted(TorchDispatchMode):
    """Counts operations that compute or copy; views cost a device nothing."""

    _VIEWS = ("view", "slice", "select", "detach", "alias", "as_strided", "split", "_indices", "_values", "empty")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in self._VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("as_on_cuda")
@pytest.mark.parametrize("kind", ["table", "sparse"])
def test_the_number_of_operations_does_not_grow_with_the_number_of_tables(kind: str) -> None:
    def count(amount: int) -> tuple[int, int]:
        tables = [_table(20, 4, kind) for _ in range(amount)]
        desk = Desk()
        workers = [Worker(tables, desk, FAST, aside=False) for _ in range(SIZE)]
        starting = _Counted()
        for rank, worker in enumerate(workers):
            gradients = [_gradient(table, 7 * rank) for table in tables]
            with starting:
                worker.start(gradients)
            desk.end_turn()
        with _Counted() as landing:
            workers[0].finish()
        return len(starting.names), len(landing.names)

    starting, landing = count(2)
    more_starting, more_landing = count(16)
    made_sparse = 14 if kind == "sparse" else 0  # one object for each table
    assert more_starting <= starting + 2, (starting, more_starting)
    assert more_landing <= landing + 2 + made_sparse, (landing, more_landing)


def test_means_share_memory_and_can_be_changed_one_by_one() -> None:
    tables = [_table(20, 4) for _ in range(3)]
    desk = Desk()
    workers = [Worker(tables, desk, FAST, aside=False) for _ in range(SIZE)]
    for worker in workers:
        worker.start([_gradient(table, 2 + place) for place, table in enumerate(tables)])
        desk.end_turn()
    means = workers[0].finish()
    assert len({mean.untyped_storage().data_ptr() for mean in means if mean is not None}) == 1
    first, second, _ = means
    assert first is not None
    assert second is not None
    assert not first._is_view()
    before, version = second.clone(), second._version
    first.zero_()
    torch._foreach_add_([first], 1.0)
    assert torch.equal(second, before)
    assert second._version == version
    # In place, as an optimizer, clipping and zero_grad(set_to_none=False) do it.
    optimizer = torch.optim.SGD([unit.weight for unit in workers[0].units], lr=0.1, momentum=0.9, foreach=True)
    torch.nn.utils.clip_grad_norm_([unit.weight for unit in workers[0].units], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert all(not unit.weight.grad.any() for unit in workers[0].units if unit.weight.grad is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_only_row_of_a_table_of_width_one_may_be_a_view_of_any_stride(dtype: torch.dtype) -> None:
    desk = Desk()
    workers = [Worker([_table(5, 1, dtype=dtype)], desk, SLOW, aside=False) for _ in range(SIZE)]
    for rank, worker in enumerate(workers):
        weight = worker.units[0].weight
        F.embedding(torch.tensor([[rank]]), weight, sparse=True).sum(1).sum().backward()
        gradient = weight.grad
        assert gradient is not None
        assert gradient._values().stride() == (0, 0)
        worker.start([gradient])
        desk.end_turn()
    for worker in workers:
        (mean,) = worker.finish()
        torch.testing.assert_close(mean, torch.tensor([1, 1, 1, 0, 0], dtype=dtype).view(5, 1) / SIZE)


def test_groups_have_one_width_type_and_form_and_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    units = list(find_units(nn.ModuleList([_table(*spec) for spec in MIXED])))  # type: ignore[arg-type]
    groups = group_tables(units, is_slow=False)
    assert sorted(unit.index for group in groups for unit in group.units) == list(range(len(MIXED)))
    assert max(len(group.units) for group in groups) == 5
    monkeypatch.setattr("poseidon.routes.table_groups._LARGEST_BYTES", 9 * 4 * 4)
    smaller = group_tables(units, is_slow=False)
    assert [unit.index for group in smaller for unit in group.units if unit.weight.nbytes > 144]
    assert all(len(group.units) == 1 or sum(u.weight.nbytes for u in group.units) <= 144 for group in smaller)


def test_repeated_rows_are_looked_for_less_and_less_often_while_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Tensor] = []
    answers: list[Any] = [None]

    def find(values: Tensor) -> Any:
        looks.append(values)
        return answers[-1]

    def looks_in(steps: int) -> list[int]:
        """Return the steps in which rows were looked at."""
        counts = []
        for _ in range(steps):
            repeats.find(torch.ones(4, 2))
            counts.append(len(looks))
        return [step for step, count in enumerate(counts) if count > (counts[step - 1] if step else 0)]

    monkeypatch.setattr(table_groups, "find_repeats", find)
    repeats = Repeats()
    assert looks_in(600) == [0, 2, 6, 14, 30, 62, 126, 254, 510]
    looks.clear()
    answers.append((torch.ones(1, 2), torch.zeros(4)))
    first, *others = looks_in(260)
    assert others == list(range(first + 1, 260))


def test_few_bytes_are_not_worth_a_look_on_a_device() -> None:
    rows = torch.ones(100, 8)
    assert Repeats(rows.nbytes + 1).find(rows) is None
    assert Repeats(rows.nbytes).find(rows) is not None


@pytest.mark.parametrize("device", DEVICES)
def test_a_device_looks_for_repeats_on_fast_links_too(device: str) -> None:
    tables = nn.ModuleList([_table(9, 4, "bag"), _table(9, 4)]).to(device)
    groups = group_tables(list(find_units(tables)), is_slow=False, least_on_device=0.0)
    assert [group.repeats is not None for group in groups] == ([False] if device == "cpu" else [True, False])
