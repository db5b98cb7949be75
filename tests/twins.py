"""Train the same model with torch's DistributedDataParallel and with Poseidon's, and compare.

Both run the same steps on the same ranks in the same process group, one after the other, from the same seed and data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import poseidon
from poseidon.planning.cluster import Cluster, Link

SLOW_WIRE = Link(bits_per_s=1e6, latency_s=1e-6)
"""So slow that every byte counts and the plan takes factors and rows wherever they are smaller."""

Make = Callable[[], nn.Module]
Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def slow_cluster() -> Cluster:
    """Return a cluster on which short forms of gradients always pay."""
    return Cluster(machines=dist.get_world_size(), between=SLOW_WIRE, flops=1e12)


def wrap(model: nn.Module, **kwargs: Any) -> poseidon.DistributedDataParallel:
    """Wrap as Poseidon, with a plan that uses every route it can."""
    kwargs.setdefault("cluster", slow_cluster())
    return poseidon.DistributedDataParallel(model, **kwargs)


def wrap_torch(model: nn.Module, **kwargs: Any) -> nn.parallel.DistributedDataParallel:
    """Wrap as torch's own class does it."""
    return nn.parallel.DistributedDataParallel(model, **kwargs)


def distribute(model: nn.Module, optimizer: torch.optim.Optimizer, update: str, **options: Any) -> Any:
    """Distribute with steps taken by owners (``"server"``), or with the sums that are its twins (``"worker"``)."""
    if update == "worker":
        options.setdefault("routes", {"*": "sharded"})
    return poseidon.distribute(model, optimizer, cluster=slow_cluster(), update=update, **options)


def train(wrapped: nn.Module, step: Step, steps: int, lr: float = 0.05) -> dict[str, Tensor]:
    """Run ``steps`` steps of SGD with momentum and return all gradients and parameters afterwards."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr, momentum=0.9)
    for number in range(steps):
        step(wrapped, optimizer, number)
    found = {name: p.detach().clone() for name, p in wrapped.named_parameters()}
    for name, p in wrapped.named_parameters():
        if p.grad is not None:
            found[f"grad of {name}"] = (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().clone()
    return found


def seed_of_rank(number: int) -> torch.Generator:
    """Return a generator that differs between ranks and steps and repeats between the twins."""
    return torch.Generator().manual_seed(1000 * dist.get_rank() + number)


def compare_twins(
    make: Make,
    step: Step,
    steps: int = 6,
    rtol: float = 1e-6,
    atol: float = 1e-9,
    lr: float = 0.05,
    torch_options: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, str]:
    """Train both twins, check that they agree and that Poseidon's replicas are bit-identical; return the routes.

    The tolerance covers the order of float additions: torch sums gradients of workers, the factors route sums over the
    rows of all workers in one product. Differences grow with the number of steps, hence the small learning rate.
    """
    torch.manual_seed(7)
    theirs = train(wrap_torch(make(), **(options if torch_options is None else torch_options)), step, steps, lr)
    torch.manual_seed(7)
    wrapped = wrap(make(), **options)
    ours = train(wrapped, step, steps, lr)
    wrapped.verify_replicas()
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=atol, msg=_naming(name))
    routes = {} if wrapped.plan is None else wrapped.plan.routes
    wrapped.close()
    return routes


def _naming(name: str) -> Callable[[str], str]:
    return lambda text: f"{name}: {text}"


def quiet() -> None:
    """Turn warnings into errors in a rank, as pytest does in its own process."""
    warnings.simplefilter("error")
    # What torch says of itself: arguments it has renamed, and its compiler looking at non-leaf gradients.
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", module="torch")
