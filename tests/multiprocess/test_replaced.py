"""Poseidon in the place of torch's class: what is replaced, and what is not."""

from __future__ import annotations

import io
import sys

from ranks import run_ranks

PROGRAM = """
import os, sys, types
import torch
theirs = types.ModuleType("somebodys_library")
theirs.DDP = torch.nn.parallel.DistributedDataParallel
sys.modules["somebodys_library"] = theirs
import torch.distributed.checkpoint.state_dict as torchs_own
before = [torchs_own.DDP]

import poseidon
from poseidon.trainers import in_place
in_place.replace()
in_place.replace()  # once is enough, twice no harm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import DistributedDataParallel as Same

assert DistributedDataParallel is Same is theirs.DDP is torch.nn.parallel.DistributedDataParallel
assert issubclass(DistributedDataParallel, poseidon.DistributedDataParallel)
assert DistributedDataParallel.__name__ == "DistributedDataParallel"
assert [torchs_own.DDP] == before, "torch's own modules know the insides of its class"
assert poseidon.DistributedDataParallel is not DistributedDataParallel
net = torch.nn.Linear(2, 1)
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="m", MASTER_PORT="1")
for _ in range(2):
    torch.optim.SGD(net.parameters(), lr=0.1).step()
for name in ("RANK", "WORLD_SIZE"):
    del os.environ[name]
model = torch.nn.parallel.DistributedDataParallel(net)
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
assert in_place.wrapped == ["Linear, 3 parameters"]
assert DistributedDataParallel._get_active_ddp_module() is None, "the compiler asks"
import pickle
assert type(pickle.loads(pickle.dumps(model))) is DistributedDataParallel
"""


def _replace() -> str:
    """Do it in a process that nothing else needs; return what is said."""
    sys.stderr = said = io.StringIO()
    exec(PROGRAM, {})
    return said.getvalue()


def test_the_class_is_replaced_wherever_programs_have_it() -> None:
    (said,) = run_ranks(_replace, 1)
    assert said.count("an optimizer steps, and no model was wrapped") == 1, "said early, and once"
