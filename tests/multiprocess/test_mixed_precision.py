"""Mixed precision in every surrounding: autocast in bfloat16 and float16, and parameters in short types.

Each cell trains one small network in one way, with torch's DistributedDataParallel, with Poseidon's and with
``distribute``, in one group of workers; with the route ``sharded``, also where the server takes the step. Full
gradients have torch's bits, with two workers; factors are more exact than torch's gradients, which are rounded to the
short type. Wrapper and ``distribute`` always have the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nightly
import poseidon
from ranks import run_ranks
from twins import slow_cluster

WORDS, WIDTH = 40, 16
STEPS = 4

ROUTES: dict[str, dict[str, Any]] = {
    "allreduce": {"routes": {"*": "allreduce"}},
    "sharded": {"routes": {"*": "sharded"}},
    "factors": {"routes": {"*": "factors"}},
    "gathered": {"routes": {"*": "factors"}, "gather_factors": True},
    "cheapest": {},
}


@functools.cache
def own_function(device: str) -> Any:
    """Return a user's own function that wants float32 whatever surrounds it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type=device, cast_inputs=torch.float32)
        def forward(_: Any, x: Tensor) -> Tensor:
            assert x.dtype is torch.float32
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type=device)
        def backward(_: Any, g: Tensor) -> Tensor:
            return g * 2

    return Twice.apply


class Conv1D(nn.Module):
    """As in transformers, which need not be installed: a linear layer whose weight is inputs x outputs."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.2)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


Conv1D.__module__ = "transformers.pytorch_utils"


class Net(nn.Module):
    """An embedding, linear layers with and without a bias, and a norm."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.part = part
        self.words = nn.Embedding(WORDS, WIDTH)
        self.rise = Conv1D(24, WIDTH) if part == "Conv1D" else nn.Linear(WIDTH, 24)
        self.norm = nn.LayerNorm(24)
        self.middle = nn.Linear(24, 24, bias=False)
        self.spare = nn.Linear(24, 24)
        self.fall = nn.Linear(24, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if part == "tied":
            self.head.weight = self.words.weight
        if part == "mixed types":
            self.to(torch.bfloat16)
            self.norm.float()
            self.fall.bias.data = self.fall.bias.data.float()

    def forward(self, tokens: Tensor, uses_spare: bool = True) -> Tensor:
        x = self.words(tokens)
        x = self._block(self._up, x)
        x = self._block(self._mix, x)
        if uses_spare:
            x = x + self.spare(x)
        return self.head(self._down(x))

    def _block(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.part == "re-entrant checkpoints":
            return checkpoint(run, x, use_reentrant=True)
        if self.part == "checkpoints":
            return checkpoint(run, x, use_reentrant=False)
        return run(x)

    def _up(self, x: Tensor) -> Tensor:
        with self._amp("autocast in parts", True), self._amp("float32 islands", False):
            x = self.rise(x.float() if self.part == "float32 islands" else x)
        return self.norm(x.to(self.norm.weight.dtype))

    def _mix(self, x: Tensor) -> Tensor:
        x = x.to(self.middle.weight.dtype)
        x = torch.tanh(self.middle(x))
        if self.part == "shared layers":
            x = torch.tanh(self.middle(x))
            with self._amp("shared layers", False):
                x = torch.tanh(self.middle(x.float()))
        if self.part == "own functions":
            x = own_function(x.device.type)(x)
        return x

    def _down(self, x: Tensor) -> Tensor:
        if self.part == "mixed types":
            return F.linear(x, self.fall.weight, self.fall.bias.to(x.dtype))
        return self.fall(x)

    def _amp(self, part: str, is_on: bool) -> contextlib.AbstractContextManager[Any]:
        if self.part != part:
            return contextlib.nullcontext()
        return torch.autocast(self.norm.weight.device.type, torch.bfloat16, enabled=is_on)


@dataclass(frozen=True)
class Cell:
    """One way to train."""

    name: str
    amp: torch.dtype | None = torch.bfloat16
    """Under which autocast; None: none."""
    part: str = ""
    """What is special about the network."""
    parameters: torch.dtype = torch.float32
    loop: str = "plain"
    optimizer: dict[str, Any] = field(default_factory=dict)
    cache: bool = True
    is_inside: bool = False
    """Whether backward runs under autocast too."""
    options: dict[str, Any] = field(default_factory=dict)
    compiled: str = ""
    float32_rank: int | None = None
    """This worker computes without autocast."""


BF16, FP16 = torch.bfloat16, torch.float16

CELLS = [
    Cell("float32", None, loop="evaluating"),
    *(
        Cell(f"{short} {loop}", amp, loop=loop)
        for short, amp in (("bf16", BF16), ("fp16", FP16))
        for loop in ("plain", "clipping", "accumulating", "backward twice", "evaluating", "max norm")
    ),
    Cell("fp16 skipping", FP16, loop="skipping"),
    *(
        Cell(f"{short}, {part}", amp, part)
        for short, amp in (("bf16", BF16), ("fp16", FP16))
        for part in ("tied", "shared layers", "checkpoints", "own functions", "Conv1D")
    ),
    Cell("re-entrant checkpoints", BF16, "re-entrant checkpoints"),
    Cell("float32 islands", BF16, "float32 islands"),
    Cell("backward inside", BF16, loop="evaluating", is_inside=True),
    Cell("backward inside, fp16", FP16, is_inside=True),
    Cell("float32 islands, backward inside", BF16, "float32 islands", is_inside=True),
    Cell("autocast in parts", None, "autocast in parts"),
    Cell("without a cache", BF16, cache=False),
    Cell("unused", BF16, loop="unused", options={"find_unused_parameters": True}),
    Cell("unused, fp16", FP16, loop="unused", options={"find_unused_parameters": True}),
    Cell("fused", BF16, optimizer={"fused": True}),
    Cell("fused, fp16", FP16, optimizer={"fused": True}),
    Cell("fused, fp16, skipping", FP16, loop="skipping", optimizer={"fused": True}),
    Cell("fused, fp16, max norm", FP16, loop="max norm", optimizer={"fused": True}),
    Cell("foreach, fp16", FP16, optimizer={"foreach": True}),
    Cell("bf16 parameters", None, parameters=BF16),
    Cell("bf16 parameters, autocast", BF16, parameters=BF16),
    Cell("fp16 parameters", None, parameters=FP16),
    Cell("static graph", BF16, "checkpoints", options={"static_graph": True}),
    Cell("views of buckets", FP16, loop="clipping", options={"gradient_as_bucket_view": True}),
    Cell("one worker without autocast", BF16, float32_rank=1),
    Cell("mixed types", None, "mixed types"),
    Cell("mixed types, accumulating", None, "mixed types", loop="accumulating"),
]
COMPILED = [Cell(f"compiled {part}", BF16, compiled=part) for part in ("first", "one graph", "wrapper", "part")]


@dataclass
class Run:
    """A network in training, wrapped in one way."""

    cell: Cell
    model: Any
    inner: Net
    optimizer: torch.optim.Optimizer
    scaler: Any
    clips: bool
    """By hand, because the wrapper does not."""

    def loss(self, number: int, broken: bool = False) -> Tensor:
        cell, rank = self.cell, dist.get_rank()
        generator = torch.Generator().manual_seed(100 * number + rank)
        tokens = torch.randint(0, WORDS, (2, 5), generator=generator).to(self.inner.norm.weight.device)
        uses_spare = cell.loop != "unused" or (number + rank) % 3 == 0
        loss = F.cross_entropy(self.model(tokens, uses_spare).flatten(0, 1).float(), tokens.flatten())
        return loss * float("inf") if broken else loss

    @contextlib.contextmanager
    def amp(self) -> Iterator[None]:
        device = self.inner.norm.weight.device.type
        is_on = self.cell.amp is not None and dist.get_rank() != self.cell.float32_rank
        with torch.autocast(device, self.cell.amp, enabled=is_on, cache_enabled=self.cell.cache):
            yield

    def backward(self, number: int, broken: bool = False) -> None:
        with self.amp():
            loss = self.loss(number, broken)
            if self.cell.is_inside:
                self.scaler.scale(loss).backward()
        if not self.cell.is_inside:
            self.scaler.scale(loss).backward()

    def step(self, number: int) -> None:
        loop = self.cell.loop
        self.optimizer.zero_grad()
        if loop == "accumulating":
            with self.model.no_sync():
                self.backward(50 + number)
        if loop == "backward twice":
            self.backward(70 + number)
        self.backward(number, broken=loop == "skipping" and number == 2 and dist.get_rank() == 1)
        if loop == "clipping" or (loop == "max norm" and self.clips):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.inner.parameters(), 0.2)
        if number == STEPS - 1:
            self._check_gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if loop == "evaluating":
            self.evaluate()

    def _check_gradients(self) -> None:
        for name, parameter in self.inner.named_parameters():
            assert parameter.grad is None or parameter.grad.dtype is parameter.dtype, name

    def evaluate(self) -> None:
        self.model.eval()
        with self.amp():
            with torch.no_grad():
                self.loss(90)
            with torch.inference_mode():
                self.loss(91)
        self.model.train()


def _start(cell: Cell, kind: str, options: dict[str, Any]) -> Run:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inner = Net(cell.part)
    if cell.part != "mixed types":
        inner = inner.to(cell.parameters)
    inner = inner.to(device)
    model: Any = inner
    if cell.compiled == "part":
        inner.fall = torch.compile(inner.fall, backend="aot_eager")
    if cell.compiled in ("first", "one graph"):
        model = torch.compile(inner, backend="aot_eager", fullgraph=cell.compiled == "one graph")
    if cell.optimizer:
        optimizer: Any = torch.optim.AdamW(inner.parameters(), lr=0.01, **cell.optimizer)
    else:
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.2, momentum=0.5)
    extra = {**cell.options, **options, "cluster": slow_cluster()}
    if kind == "torch":
        model = nn.parallel.DistributedDataParallel(model, **cell.options)
    elif kind == "wrapper":
        model = poseidon.DistributedDataParallel(model, **extra)
    else:
        norm = 0.2 if cell.loop == "max norm" else None
        update = "server" if kind == "served" else "worker"
        model, optimizer = poseidon.distribute(model, optimizer, max_grad_norm=norm, update=update, **extra)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, enabled=cell.amp is FP16)
    run = Run(cell, model, inner, optimizer, scaler, clips=kind in ("torch", "wrapper"))
    if cell.compiled == "wrapper":
        run.model = torch.compile(model, backend="aot_eager")
    return run


def _train(cell: Cell, kind: str, options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Return the parameters and the scale after some steps; replicas must be identical."""
    run = _start(cell, kind, options)
    for number in range(STEPS):
        run.step(number)
    found = {name: parameter.detach().clone() for name, parameter in run.inner.named_parameters()}
    for name, value in found.items():
        everybody = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, value)
        assert all(torch.equal(value, other) for other in everybody), f"{name} differs between workers"
    if kind != "torch":
        wrapped = getattr(run.model, "_orig_mod", run.model)
        if kind != "served":
            asked = options["routes"]["*"] if "routes" in options else "factors"
            assert (wrapped.plan.routes["rise"] == asked) is (cell.compiled != "one graph")
        wrapped.close()
    return found, run.scaler.get_scale()


def _compare(cell: Cell, found: list[tuple[dict[str, Tensor], float]], is_exact: bool) -> list[str]:
    (theirs, scale), (ours, our_scale), (deferred, deferred_scale) = found
    wrong = []
    if not scale == our_scale == deferred_scale:
        wrong.append(f"scales {scale}, {our_scale}, {deferred_scale}")
    if cell.loop == "skipping" and scale != 128.0:
        wrong.append(f"scale {scale} after a skipped step")
    is_short = cell.amp is not None or cell.part != "" or cell.parameters is not torch.float32
    for name, value in theirs.items():
        if not torch.equal(ours[name], deferred[name]):
            wrong.append(f"{name} differs between wrapper and distribute")
        if is_exact and not torch.equal(ours[name], value):
            wrong.append(f"{name} does not have torch's bits")
        error = (ours[name].float() - value.float()).norm() / value.float().norm()
        if not error < (1e-2 if is_short else 1e-6):
            wrong.append(f"{name} is {error:.1e} from torch's")
    return wrong


def _compare_served(cell: Cell, ours: tuple[dict[str, Tensor], float], served: tuple[dict[str, Tensor], float]) -> Any:
    # Owners add the squares of their own shares to a norm.
    error = 1e-6 if cell.loop == "max norm" else 0.0
    wrong = [name for name, value in ours[0].items() if not (value - served[0][name]).abs().max() <= error]
    return [f"{name} differs if the server takes the step" for name in wrong] + ["scale"] * (ours[1] != served[1])


def _try(cells: list[Cell], routes: list[str]) -> dict[tuple[str, str], list[str]]:
    """Train each cell in each way and return what is wrong, by cell and route."""
    warnings.simplefilter("ignore")
    found = {}
    for cell in cells:
        theirs = _train(cell, "torch", {})
        for route in routes:
            ours = [_train(cell, kind, ROUTES[route]) for kind in ("wrapper", "distribute")]
            # A GPU may choose other kernels.
            is_exact = theirs[0]["norm.bias"].is_cpu and route in ("allreduce", "sharded")
            found[cell.name, route] = _compare(cell, [theirs, *ours], is_exact)
            if route == "sharded":
                same = {"routes": {"words": "split", "*": "sharded"}}  # as the server's plan
                expected = _train(cell, "distribute", same) if cell.part == "tied" else ours[0]
                found[cell.name, "served"] = _compare_served(cell, expected, _train(cell, "served", {}))
    return {key: wrong for key, wrong in found.items() if wrong}


@pytest.mark.parametrize("part", range(4))
def test_every_precision_in_every_surrounding(part: int) -> None:
    # Not every cell by every route, to save time: routes differ in how values travel, not in what surrounds them.
    some = [["allreduce", "factors"], ["sharded", "factors"], ["allreduce", "gathered"], ["sharded"]][part]
    routes = nightly.amount(some, ["allreduce", "factors", "sharded", "gathered"])
    for wrong in run_ranks(_try, 2, CELLS[part::4], routes, timeout_s=nightly.amount(90.0, 400.0)):
        assert not wrong


def _join(kind: str) -> list[Tensor]:
    run = _start(Cell("joining"), kind, ROUTES["cheapest"])
    with run.model.join():
        for number in range(3 + 2 * dist.get_rank()):
            run.step(number)
    found = [parameter.detach().clone() for parameter in run.inner.parameters()]
    if kind != "torch":
        run.model.verify_replicas()
    return found


def _compare_joined() -> None:
    theirs, ours, deferred = (_join(kind) for kind in ("torch", "wrapper", "distribute"))
    for a, b, c in zip(theirs, ours, deferred, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-2, atol=1e-3)
        assert torch.equal(b, c)


def test_a_worker_without_input_takes_part_under_autocast() -> None:
    run_ranks(_compare_joined, 2)


def test_compiled_models_under_autocast() -> None:
    for wrong in run_ranks(_try, 2, COMPILED, ["cheapest"], preload=["torch._inductor.compile_fx"]):
        assert not wrong


def _twice(kind: str, is_tied: bool) -> list[Tensor]:
    torch.manual_seed(1)
    words, head = nn.Embedding(200, 8), nn.Linear(8, 200, bias=False)
    if is_tied:
        head.weight = words.weight
    model = nn.Sequential(words, nn.Linear(8, 8), head).half()
    wrapped: Any
    if kind == "torch":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = poseidon.DistributedDataParallel(model, cluster=slow_cluster())
    for number in range(3):
        model.zero_grad()
        chance = torch.Generator().manual_seed(2 * number + dist.get_rank())
        one, other = (torch.randint(0, 200, (3, 4), generator=chance) for _ in range(2))
        (wrapped(one).float().square().mean() + wrapped(other).float().square().mean()).backward()
    found = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    if kind != "torch":
        wrapped.close()
    return found


def _compare_twice() -> None:
    for is_tied in (False, True):
        for theirs, ours in zip(_twice("torch", is_tied), _twice("wrapper", is_tied), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


def test_a_table_in_float16_that_is_used_twice() -> None:
    # PyTorch adds up no rows in float16 on CPUs.
    run_ranks(_compare_twice, 2)


class _SummedTwice(nn.Module):
    """Two sums of rows of one table, in both of which all rows have the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, words: Tensor, other: Tensor) -> Tensor:
        out: Tensor = self.last(self.words(words).sum(1) + self.words(other).sum(1))
        return out


def _summed_twice(kind: str) -> list[Tensor]:
    torch.manual_seed(1)
    model = _SummedTwice().bfloat16()
    wrapped: Any
    if kind == "torch":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        wrapped = poseidon.DistributedDataParallel(model, cluster=slow_cluster(), routes={"words": "rows"})
    for number in range(3):
        model.zero_grad()
        chance = torch.Generator().manual_seed(2 * number + dist.get_rank())
        one, other = (torch.randint(0, 200, (1, 4), generator=chance) for _ in range(2))
        wrapped(one, other).float().square().mean().backward()
    found = [parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None]
    if kind != "torch":
        wrapped.close()
    return found


def _compare_summed_twice() -> None:
    for theirs, ours in zip(_summed_twice("torch"), _summed_twice("wrapper"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4)


def test_a_table_in_bfloat16_whose_rows_are_summed_twice() -> None:
    # PyTorch adds up no rows in bfloat16 on CPUs that share their values.
    run_ranks(_compare_summed_twice, 2)
