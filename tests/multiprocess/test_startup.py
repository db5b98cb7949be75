"""The stand-in for torch's compiler that processes of the suite start with (``tests/startup``)."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import torch
from poseidon.engine.compiled import uncompiled

is_traced = []

@uncompiled
def aside(x):
    is_traced.append(torch.compiler.is_compiling())
    return x + 1

import torch._dynamo as compiler

@compiler.disable()
def beside(x):
    return aside(x)

torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()
beside(torch.ones(1))
before = type(sys.modules["torch._dynamo"]).__name__
compiled = torch.compile(lambda x: 3 * beside(2 * x), backend="eager")
print(before, type(sys.modules["torch._dynamo"]).__name__, compiled(torch.ones(1)).item(), is_traced)
"""


def test_the_compiler_is_imported_to_compile_and_leaves_out_what_it_should() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split(maxsplit=2) == ["_Later", "module", "9.0 [False, False]\n"], done.stderr
