"""Ray Train: ``TorchTrainer(work, torch_config=PoseidonConfig())``.

Ray places the workers and makes the process group as with its own ``TorchConfig``. Before the user's function starts,
Poseidon's class takes the place of torch's, so that ``ray.train.torch.prepare_model`` wraps with it; and before Ray
destroys the group, exchanges end in good order.
"""

from __future__ import annotations

from typing import Any

from ray.train.torch import TorchConfig

from poseidon.errors import UnsupportedError
from poseidon.job.closing import close_now
from poseidon.trainers.in_place import replace

_TorchBackend: Any = TorchConfig().backend_cls
if not all(hasattr(_TorchBackend, name) for name in ("on_start", "on_training_start", "on_shutdown")):
    import ray

    raise UnsupportedError(
        f"Ray {ray.__version__}: its backend for torch has no on_start, on_training_start and on_shutdown; use Ray 2.9 "
        "or newer, or wrap the model with poseidon.DistributedDataParallel yourself"
    )


class PoseidonBackend(_TorchBackend):  # type: ignore[misc] # known when Ray is there
    """What Ray calls on behalf of all workers."""

    def on_training_start(self, worker_group: Any, backend_config: Any) -> None:
        """Have every worker take Poseidon's class for torch's."""
        super().on_training_start(worker_group, backend_config)
        worker_group.execute(replace)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """End exchanges and heartbeats on every worker, and then the group that they use."""
        try:
            worker_group.execute(close_now)
        finally:
            super().on_shutdown(worker_group, backend_config)


class PoseidonConfig(TorchConfig):  # type: ignore[misc]
    """Configuration for ``TorchTrainer(torch_config=...)``; takes the arguments of Ray's ``TorchConfig``."""

    @property
    def backend_cls(self) -> type[PoseidonBackend]:
        """The class that Ray makes the backend of."""
        return PoseidonBackend
