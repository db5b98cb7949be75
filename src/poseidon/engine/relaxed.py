"""Bounded staleness for a model: workers read parameters that may miss the others' latest updates.

Each worker steps the user's optimizer on its own gradients. The resulting change, divided by the number of workers,
goes into a table of the parameter server (``poseidon/ps.py``), and the parameters are set to the table's values: all
workers' changes up to the allowed staleness, and all of this worker's own. With staleness 0, SGD and momentum match the
updates of the mean gradient; other optimizers approximate them.

A change is counted from the values that were read last, so what is changed by hand between two steps, alike on all
workers, reaches the table too. Where a state dict was loaded, all workers go on from it together.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from poseidon.engine.bounding import ChosenBound
from poseidon.engine.discover import check_same_parameters, tensors_of
from poseidon.engine.engine import Engine
from poseidon.engine.loads import Loads
from poseidon.engine.optimizers import (
    check_known,
    check_max_norm,
    check_optimizer,
    clear_gradients,
    defer,
    give_back,
    parameters_of,
)
from poseidon.engine.own_steps import OwnSteps
from poseidon.engine.policy import Policy
from poseidon.errors import UnsupportedError
from poseidon.job.closing import Stage, at_exit
from poseidon.job.limits import time_limit
from poseidon.planning.staleness import MOST, Prospect
from poseidon.ps import Table, connect
from poseidon.team.agree import check_same_model, describe
from poseidon.team.mirror import mirror_different
from poseidon.team.team import Team
from poseidon.wire.settings import WireSettings

WIDTH = 1024
"""Parameters per row of the table."""

_TYPES = {torch.float32: "float32", torch.float64: "float64"}


class Ledger:
    """All parameters of a model as the rows of a table."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        dtypes = {parameter.dtype for parameter in parameters}
        if not dtypes <= set(_TYPES):
            odd = next(dtype for dtype in dtypes if dtype not in _TYPES)
            raise UnsupportedError(
                f"parameters of type {odd} do not support bounded staleness; keep them in float32 and use autocast"
            )
        self.parameters = list(parameters)
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        count = sum(parameter.numel() for parameter in parameters)
        self.rows = -(-count // WIDTH)

    @property
    def dtype_name(self) -> str:
        """The table's number format."""
        return _TYPES[self.dtype]

    @torch.no_grad()
    def read(self) -> np.ndarray[Any, Any]:
        """Return a copy of all parameters, as rows."""
        flat = torch.zeros(self.rows * WIDTH, dtype=self.dtype, device="cpu")
        torch._foreach_copy_(self._views(flat), [parameter.detach() for parameter in self.parameters])
        rows: np.ndarray[Any, Any] = flat.view(self.rows, WIDTH).numpy()
        return rows

    def parts_of(self, rows: np.ndarray[Any, Any]) -> dict[int, Tensor]:
        """Return, by id() of each parameter, what rows say of it."""
        views = self._views(torch.from_numpy(np.ascontiguousarray(rows)).view(-1))
        return {id(p): view.to(p.device, p.dtype) for p, view in zip(self.parameters, views, strict=True)}

    @torch.no_grad()
    def write(self, rows: np.ndarray[Any, Any]) -> None:
        """Set all parameters."""
        flat = torch.from_numpy(np.ascontiguousarray(rows)).view(-1)
        torch._foreach_copy_([parameter.detach() for parameter in self.parameters], self._views(flat))

    def _views(self, flat: Tensor) -> list[Tensor]:
        views = []
        start = 0
        for parameter in self.parameters:
            views.append(flat[start : start + parameter.numel()].view(parameter.shape))
            start += parameter.numel()
        return views


class Shared:
    """Parameters in a table that all workers add to. Construction is collective and starts from worker 0's values."""

    def __init__(
        self, ledger: Ledger, table: Table, workers: int, bound: ChosenBound | None = None, is_first: bool = True
    ) -> None:
        self.bound = bound
        self._is_first = is_first
        self._table = table
        self._workers = workers
        self._every_row = np.arange(ledger.rows)
        first = ledger.read()
        table.start_from(np.pad(first, ((0, table.spec.rows - ledger.rows), (0, 0))))
        ledger.write(table.get(self._every_row))
        # Not what the table gave: the ledger may hold it in a shorter type.
        self._seen = ledger.read()
        """The parameters as they were read last."""
        self._began_s = time.perf_counter()
        self._waited_s = 0.0

    def begin_from(self, ledger: Ledger) -> None:
        """Let the table hold the first worker's parameters, and everybody read them. All workers must call it.

        Each waits for the others twice: to know what the table holds, and to read what the first has made of it.
        """
        loaded = ledger.read()
        self._table.clock()
        held = self.read_all()
        if not np.isfinite(held).all():
            raise UnsupportedError(
                "load_state_dict under ssp: the shared parameters are not finite any more, and what is added to them "
                "cannot mend that; start the job again from the checkpoint"
            )
        if self._is_first:
            self._table.inc(self._every_row, loaded - held)
        self._table.clock()
        ledger.write(self.read_all())
        self._seen = ledger.read()
        self._began_s = time.perf_counter()
        self._waited_s = 0.0

    def read_all(self) -> np.ndarray[Any, Any]:
        """Return the table's rows with all that the workers have added up to this worker's clock, unless none waits."""
        is_bounded, spec = self._table.spec.consistency == "ssp", self._table.spec
        if is_bounded:
            self._table.limit(0)
        try:
            rows: np.ndarray[Any, Any] = self._table.get(self._every_row)
        finally:
            if is_bounded:
                self._table.limit(spec.staleness if self.bound is None else self.bound.bound)
        return rows

    def share(self, ledger: Ledger) -> None:
        """Add this worker's change since the last read, and read the others'; blocks while one is too far behind."""
        change = ledger.read()
        change -= self._seen
        change /= self._workers
        self._table.inc(self._every_row, change)
        ended_s = time.perf_counter()
        if self.bound is not None:
            self.bound.measured(ended_s - self._began_s, self._waited_s)
        self._table.clock()
        if self.bound is not None:
            self.bound.clocked()
        ledger.write(self._table.get(self._every_row))
        self._seen = ledger.read()
        self._began_s = time.perf_counter()
        self._waited_s = self._began_s - ended_s


class RelaxedUpdates(Policy):
    """Steps the optimizer on this worker's own gradients and shares the changes through a table.

    ``staleness`` is the bound; for "ssp" also "auto": chosen from the workers' step times (``bounding.py``).
    ``managed`` and ``settings`` go to :func:`poseidon.ps.connect` and its tables.
    """

    uses_engine = False
    takes_steps = True
    is_copyable = False
    is_lasting = False
    is_updating = True
    """The optimizer's state always belongs to a finished step."""
    steps_later = False

    def __init__(
        self,
        optimizer: Optimizer,
        consistency: str,
        staleness: int | Literal["auto"],
        max_grad_norm: float | None = None,
        *,
        timeout_s: float | None = None,
        managed: bool = False,
        settings: WireSettings | None = None,
    ) -> None:
        check_optimizer(optimizer)
        check_max_norm(max_grad_norm)
        self.plain = type(optimizer)
        self._optimizer = optimizer
        # Without staleness every read sees exactly the finished steps, as "bsp" promises.
        self._consistency = "bsp" if consistency == "ssp" and staleness == 0 else consistency
        self._is_chosen = staleness == "auto"
        self._staleness = MOST if staleness == "auto" else staleness
        self._steps = OwnSteps(optimizer, max_grad_norm)
        self._timeout_s = timeout_s
        self._managed = managed
        self._settings = settings
        self._cancel: Callable[[], None] | None = None
        self._undo: list[Callable[[], None]] = []

    def connect(self, module: nn.Module, engine: Engine | None) -> None:  # noqa: ARG002
        """Join the job's tables and copy worker 0's parameters. Collective."""
        self._module = module
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._ledger = Ledger(self._trained)
        self._known = frozenset(map(id, self._trained))
        self._job = connect(timeout_s=self._timeout_s, settings=self._settings)
        workers = self._job.workers
        # With staleness="auto" the workers' step times lie behind the parameters.
        rows = self._ledger.rows + len(workers) * self._is_chosen
        try:
            self._table = self._job.table(
                "parameters",
                rows,
                WIDTH,
                self._ledger.dtype_name,
                consistency=self._consistency,
                staleness=self._staleness,
                managed=self._managed,
            )
            bound = None
            if self._is_chosen and len(workers) > 1:
                bound = ChosenBound(self._table, np.arange(self._ledger.rows, rows), workers.index(self._job.rank))
            self._make_alike(module)
            self._shared = Shared(self._ledger, self._table, len(workers), bound, workers[0] == self._job.rank)
        except BaseException:
            self._job.__exit__(*sys.exc_info())
            raise
        defer(self._optimizer, self)
        self._loads = Loads(module)
        self._undo += [self._steps.take_over(), self._loads.close]
        self._cancel = at_exit(Stage.TABLES, self.close)

    def _make_alike(self, module: nn.Module) -> None:
        """Compare the models, and copy worker 0's buffers and frozen parameters, which no table holds. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        with contextlib.closing(Team(None, time_limit(self._timeout_s))) as team:
            ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
            everything = (*module.named_parameters(), *module.named_buffers())
            check_same_model(team, describe([(name, tensor) for name, tensor in everything if name not in ignored]))
            mirror_different(team, tensors_of(module, ignored, with_buffers=True), 0, "the initial parameters")

    def _take_loaded(self) -> None:
        """Go on from parameters that were loaded. All workers must have loaded them."""
        if not self._loads.is_due or not self._loads.take() & self._known:
            return
        if self._consistency == "asp":
            raise UnsupportedError(
                'load_state_dict with consistency="asp": workers do not wait for each other, and would train on a '
                "mixture of old and loaded parameters; load before distribute()"
            )
        self._shared.begin_from(self._ledger)

    @property
    def staleness_seen(self) -> Counter[int]:
        """Number of parameter rows read at each staleness, in clocks."""
        return self._table.staleness_seen

    @property
    def staleness(self) -> int | None:
        """Clocks that this worker's reads may miss at present; None without a bound."""
        if self._shared.bound is not None:
            return self._shared.bound.bound
        return None if self._consistency == "asp" else 0 if self._is_chosen else self._staleness

    @property
    def prospects(self) -> list[Prospect]:
        """What each staleness promised when one was last chosen, the best first; empty before, and if it is given."""
        return [] if self._shared.bound is None else list(self._shared.bound.prospects)

    @property
    def losses(self) -> dict[int, int]:
        """Workers that died, each with the last step this worker saw from it."""
        return self._job.losses

    def shared(self) -> dict[int, Tensor]:
        """Return, by id() of each parameter, its value with all updates of the steps that this worker has taken.

        Waits for those of the others; with "asp", what has come so far.
        """
        if self._loads.is_due:
            return {}  # what was loaded is in place
        return self._ledger.parts_of(self._shared.read_all())

    def begin_backward(self, unused: Collection[nn.Parameter] = ()) -> None:
        """No-op: gradients never leave their worker."""

    def end_backward(self) -> None:
        """No-op: gradients never leave their worker."""

    def step(self) -> None:
        """Update locally, push the change, and pull the others'; blocks while a worker is too far behind."""
        check_same_parameters(self._module, self._known)
        self._take_loaded()
        self._steps.step(self._trained)
        self._shared.share(self._ledger)

    def zero_grad(self, set_to_none: bool = True, parameters: Sequence[nn.Parameter] | None = None) -> bool:
        """Clear the gradients of the optimizer's parameters, or of these."""
        clear_gradients(parameters_of(self._optimizer) if parameters is None else parameters, set_to_none)
        return True

    def note_cleared(self) -> None:
        """No-op: gradients are each worker's own."""

    def show_state(self) -> None:
        """No-op: the state is always here."""

    def take_state(self) -> None:
        """No-op: the optimizer uses it where it is."""

    def check_group(self, parameters: Sequence[nn.Parameter]) -> None:
        """Raise if somebody adds parameters to the optimizer that nobody shares."""
        check_known(parameters, self._known)

    def close(self) -> None:
        """Wait until the other workers are done, and restore the optimizer's own class."""
        if self._cancel is None:
            return
        self._cancel()
        self._cancel = None
        for undo in self._undo:
            undo()
        self._undo.clear()
        give_back(self._optimizer, self.plain)
        self._job.close()
