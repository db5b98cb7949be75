"""Lightning: importing this module registers ``Trainer(strategy="poseidon")`` and ``Fabric(strategy="poseidon")``.

It serves ``lightning`` and ``pytorch_lightning``, whichever is installed. The strategies are Lightning's for DDP, with
two differences: the model is wrapped by :class:`poseidon.DistributedDataParallel`, and where a launcher has started the
workers, it is the launcher that says how many there are, not ``devices`` and ``num_nodes``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import torch

from poseidon.api import DistributedDataParallel
from poseidon.errors import ConfigError
from poseidon.job import settings
from poseidon.job.world import World, init, is_launched
from poseidon.trainers.in_place import note

NAMES = {"poseidon": {}, "poseidon_find_unused_parameters_true": {"find_unused_parameters": True}}
"""What is registered: names as Lightning builds them, and the options that each stands for."""

_PACKAGES = (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
"""One project under two names: the package of the Trainer and that of Fabric."""


class LaunchedEnvironment:
    """A launcher's description of the job, as Lightning asks for it; mixed into its class ``ClusterEnvironment``."""

    creates_processes_externally = True

    def __init__(self) -> None:
        self._world = World.from_environment()

    @staticmethod
    def detect() -> bool:
        """Return whether a launcher has started this process."""
        return is_launched()

    @property
    def main_address(self) -> str:
        """Where the workers meet."""
        return self._world.master_addr or "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The port where they meet."""
        return self._world.master_port or 0

    def world_size(self) -> int:
        """Return the number of workers."""
        return self._world.size

    def global_rank(self) -> int:
        """Return this worker's rank."""
        return self._world.rank

    def local_rank(self) -> int:
        """Return the rank on this machine."""
        return self._world.local_rank

    def node_rank(self) -> int:
        """Return the number of this machine, where machines have equally many workers."""
        return (self._world.rank - self._world.local_rank) // (self._world.local_size or 1)

    def set_world_size(self, size: int) -> None:
        """Lightning's guess from ``devices`` and ``num_nodes``; the launcher knows."""

    def set_global_rank(self, rank: int) -> None:
        """Lightning's guess; the launcher knows."""


class LaunchedPlace:
    """Mixed into Lightning's strategies: a worker's place in the job is what its launcher says, if there is one."""

    environment: type[Any]
    """Lightning's class of environments, with :class:`LaunchedEnvironment`."""
    cluster_environment: Any
    parallel_devices: Any
    local_rank: int
    global_rank: int
    world_size: int
    _ddp_kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if is_launched() and kwargs.get("cluster_environment") is None:
            kwargs["cluster_environment"] = self.environment()
        super().__init__(*args, **kwargs)

    @property
    def root_device(self) -> torch.device:
        """The device of this worker."""
        devices = self.parallel_devices
        if devices[0].type != "cpu" and self.local_rank >= len(devices):
            raise ConfigError(
                f"devices={len(devices)}, but this is worker {self.local_rank} (from 0) of its machine; "
                "leave devices out, and each worker takes one"
            )
        device: torch.device = devices[self.local_rank % len(devices)]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Which part of the data this worker reads."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def wrap(self, model: torch.nn.Module) -> DistributedDataParallel:
        """Return the model with its exchange."""
        device = self.root_device
        device_ids: list[int | torch.device] | None = None if device.type == "cpu" else [device]
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._ddp_kwargs)
        note(wrapped)
        return wrapped

    def setup_environment(self) -> None:
        """Join the job, by Poseidon's own way where it started the job: its store listens on one address only."""
        if settings.RUN.read():
            init()
        super().setup_environment()  # type: ignore[misc]


class TrainerStrategy(LaunchedPlace):
    """The strategy of Lightning's Trainer; mixed into its ``DDPStrategy``."""

    model: Any
    lightning_module: Any
    _is_blocked = False
    """Whether gradients are being accumulated."""

    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return self.wrap(model)

    def _register_ddp_hooks(self) -> None:
        hook, state = self._ddp_comm_hook, self._ddp_comm_state  # type: ignore[attr-defined]
        if hook is not None:
            wrapper = self._ddp_comm_wrapper  # type: ignore[attr-defined]
            self.model.register_comm_hook(state, hook if wrapper is None else wrapper(hook))

    @property
    def _is_manual(self) -> bool:
        """Whether the user's training step calls backward itself, inside the wrapper's forward."""
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        return is_wrapped and not self.lightning_module.automatic_optimization

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's step; one that calls backward itself exchanges then, and not when it has returned."""
        if not self._is_manual:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        with self.model.no_sync():
            result = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self.model.require_forward_param_sync = True
        return result

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Expect a backward that the user's step calls itself."""
        if self._is_manual and not self._is_blocked:
            self.model.expect_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Do nothing: when a backward has returned, its exchange is complete."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients inside this context without exchanging them."""
        was_blocked, self._is_blocked = self._is_blocked, True
        is_wrapped = isinstance(self.model, DistributedDataParallel)
        try:
            with self.model.no_sync() if is_wrapped else contextlib.nullcontext():
                yield
        finally:
            self._is_blocked = was_blocked

    def teardown(self) -> None:
        """Give the model back as it was."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.close()
            self.model = self.lightning_module
        super().teardown()  # type: ignore[misc]


class FabricStrategy(LaunchedPlace):
    """The strategy of Fabric; mixed into its ``DDPStrategy``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = self

    def setup_module(self, module: torch.nn.Module) -> DistributedDataParallel:
        """Return the model with its exchange."""
        return self.wrap(module)

    def get_module_state_dict(self, module: torch.nn.Module) -> Any:
        """Return the state of the model, without the wrapper's prefix."""
        return super().get_module_state_dict(_unwrapped(module))  # type: ignore[misc]

    def load_module_state_dict(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        """Load the state of the model."""
        super().load_module_state_dict(_unwrapped(module), *args, **kwargs)  # type: ignore[misc]

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients inside this context without exchanging them."""
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(f"{type(module).__name__} is not wrapped: call fabric.setup(model) first")
        return module.no_sync() if enabled else contextlib.nullcontext()


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def register() -> list[type[Any]]:
    """Register the strategy with the packages of Lightning that are in use, or else with all; return its classes."""
    made: list[type[Any]] = []
    # Usually both are installed, and each takes seconds to import.
    loaded = [packages for packages in _PACKAGES if packages[0].partition(".")[0] in sys.modules]
    for trainer, fabric in loaded or _PACKAGES:
        if importlib.util.find_spec(trainer.partition(".")[0]) is None:
            continue
        environments = importlib.import_module(f"{fabric}.plugins.environments")
        environment = type("PoseidonEnvironment", (LaunchedEnvironment, environments.ClusterEnvironment), {})
        for package, ours in ((trainer, TrainerStrategy), (fabric, FabricStrategy)):
            strategies = importlib.import_module(f"{package}.strategies")
            registry = getattr(strategies, "StrategyRegistry", None) or strategies.STRATEGY_REGISTRY
            made.append(type("PoseidonStrategy", (ours, strategies.DDPStrategy), {"environment": environment}))
            for name, options in NAMES.items():
                registry.register(name, made[-1], "Poseidon: the cheapest exact way for each layer", True, **options)
    if not made:
        raise ConfigError("Lightning is not installed; pip install lightning, or pytorch-lightning")
    return made


PoseidonStrategy = register()[0]
"""``Trainer(strategy=PoseidonStrategy(routes=...))``: with options of :class:`poseidon.DistributedDataParallel`."""
