"""Kernels in a process of their own: where there is no GPU, Triton must know that before it is imported."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import compact_codec
from compact_codec import same_bits
from nightly import amount
from poseidon.sums.chunks import Chunk
from poseidon.sums.compact import ChunkRows, CompactLayout, align
from poseidon.sums.encodings import Encoding
from poseidon.sums.packed import ChunkTable, table_bytes
from poseidon.sums.touched import TouchedRows, add_up, most_packed_bytes, pack

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton; scripts/setup kernels installs it")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Array = np.ndarray[Any, Any]


def _draw(kind: str, size: int) -> Array:
    generator = np.random.default_rng(size)
    values = generator.standard_normal(size).astype(np.float32)
    if kind == "bf16":
        values = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        values[generator.random(size) < 0.01] += np.float32(1e-3)
        values[300:900] = 0
    elif kind == "zeros":
        values[generator.random(size) < 0.7] = 0
        values[generator.random(size) < 0.1] *= np.float32(-0.0)
    elif kind == "strays":
        values[generator.random(size) < 0.02] *= np.float32(1e-12)
        values[5], values[9], values[11] = np.nan, 1e-42, np.inf
    elif kind == "any bits":
        values = generator.integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
    return values


def _rows_of(chunks: int, quotient: int, longer: int, itemsize: int = 4) -> ChunkRows:
    edges = [at * quotient + min(at, longer) for at in range(chunks + 1)]
    pieces = [Chunk(0, at, *edge, 0) for at, edge in enumerate(itertools.pairwise(edges))]
    return ChunkRows.of(tuple(pieces), itemsize)


def _pack(chunks: list[tuple[int, bytes] | None]) -> torch.Tensor:
    """Return chunks, given with their encodings, behind their table; None stands for one on the device."""
    room = sum(align(len(chunk[1])) for chunk in chunks if chunk)
    memory = np.full(table_bytes(len(chunks)) + room, 0xAA, np.uint8)
    table = ChunkTable(memory, len(chunks))
    for number, chunk in enumerate(chunks):
        if chunk is not None:
            position = table.place(number, len(chunk[1]))
            memory[position : position + len(chunk[1])] = np.frombuffer(chunk[1], np.uint8)
            table.mark(number, chunk[0])
    return torch.from_numpy(memory).to(DEVICE)


def _encode(values: Array, layout: CompactLayout) -> tuple[int, bytes]:
    compacted = compact_codec.compact(values, layout)
    if len(compacted) in layout.sizes(len(values)):
        return Encoding.COMPACT, compacted
    return Encoding.PLAIN, values.tobytes()


def _compact_and_restore(kind: str, rows: ChunkRows, divisor: int) -> None:
    from poseidon.sums import compact_kernels as kernels

    layout = rows.layout
    values = _draw(kind, rows.chunks[-1].stop)
    into = torch.full((len(rows.chunks) + 1, layout.row_bytes), 77, dtype=torch.uint8, device=DEVICE)
    kernels.compact(torch.from_numpy(values).to(DEVICE), rows, into[:-1])
    compacted = into.cpu().numpy()
    assert (compacted[-1] == 77).all()
    packed: list[tuple[int, bytes] | None] = []
    for chunk, row in zip(rows.chunks, compacted, strict=False):
        part = values[chunk.start : chunk.stop]
        size = layout.measure(row.data)
        expected = compact_codec.compact(part, layout)
        assert size == len(expected)
        if size in layout.sizes(len(part)):
            assert same_bits(compact_codec.restore(row[:size].tobytes(), len(part), layout), part)
            packed.append((Encoding.COMPACT, row[:size].tobytes()))
        else:
            packed.append((Encoding.PLAIN, part.tobytes()))
    # The first one is not to be read.
    packed[0] = None
    back = torch.full((len(values),), 7.0, device=DEVICE)
    first = rows.chunks[0].stop
    back[:first] = torch.from_numpy(values[:first])
    kernels.restore(_pack(packed), rows, back, divisor)
    assert same_bits(back.cpu().numpy(), values / np.float32(divisor) if divisor > 1 else values)


def _change(kind: str, is_rounded: bool) -> None:
    """New weights from old ones; the second chunk is compacted as it is, beside those that change."""
    from poseidon.sums import compact_kernels as kernels

    rows = _rows_of(3, 700, 1)
    layout = rows.layout
    new = _draw(kind, rows.chunks[-1].stop)
    old = np.random.default_rng(7).permutation(new) if kind == "any bits" else new * np.float32(1.001)
    values, before = torch.from_numpy(new).to(DEVICE), torch.from_numpy(old).to(DEVICE)
    into = torch.empty((3, layout.row_bytes), dtype=torch.uint8, device=DEVICE)
    kernels.compact(values, rows, into, before, is_rounded)
    packed: list[tuple[int, bytes] | None] = []
    for chunk, row in zip(rows.chunks, into.cpu().numpy(), strict=True):
        part, earlier = new[chunk.start : chunk.stop], old[chunk.start : chunk.stop]
        size = layout.measure(row.data)
        expected = compact_codec.change(part, earlier, is_rounded)
        assert same_bits(compact_codec.changed(expected, earlier, is_rounded), _rounded(part, is_rounded))
        assert size == len(compact_codec.compact(expected, layout))
        if chunk.index == 1 or size not in layout.sizes(len(part)):
            packed.append(_encode(_rounded(part, is_rounded), layout))
        else:
            packed.append((Encoding.ROUNDED_CHANGE if is_rounded else Encoding.CHANGE, row[:size].tobytes()))
    back = torch.full((len(new),), 7.0, device=DEVICE)
    # Where weights come rounded, somebody may have looked at the exact ones, and somebody not.
    for held in [old, compact_codec.to_half(old)] if is_rounded else [old]:
        kernels.restore(_pack(packed), rows, back, 1, torch.from_numpy(held).to(DEVICE))
        assert same_bits(back.cpu().numpy(), _rounded(new, is_rounded))


def _rounded(values: Array, is_rounded: bool) -> Array:
    return compact_codec.to_half(values) if is_rounded else values


def _add(place: int, length: int) -> None:
    from poseidon.sums import compact_kernels as kernels

    workers = 4
    layout = CompactLayout(length + 1)
    generator = np.random.default_rng(place)
    parts = (generator.standard_normal((workers, length)) * [[1e4], [1], [1e-3], [1]]).astype(np.float32)
    # The smallest numbers there are must not become zeros, and negative zeros stay negative.
    parts[:, :50], parts[:, 50:60] = np.float32(1e-42), np.float32(-0.0)
    # One part travels plain.
    parts[3] = generator.integers(0, 2**31 - 2**24, length, dtype=np.uint32).view(np.float32)
    chunks = [_encode(part, layout) for part in parts]
    assert {encoding for encoding, _ in chunks} == {Encoding.PLAIN, Encoding.COMPACT}
    own = torch.from_numpy(parts[place].copy()).to(DEVICE)
    into = torch.full((layout.row_bytes,), 77, dtype=torch.uint8, device=DEVICE)
    packed = _pack([None if at == place else chunk for at, chunk in enumerate(chunks)])
    kernels.add(packed, workers, own, layout, 3, into)
    with np.errstate(over="ignore"):
        expected = functools.reduce(np.add, parts)
    assert same_bits(own.cpu().numpy(), expected)
    size = layout.measure(into.cpu().numpy().data)
    assert size == len(compact_codec.compact(expected, layout))


def _add_rows(counts: list[int]) -> None:
    from poseidon.sums import compact_kernels as kernels

    width = 30
    chunk = Chunk(0, 0, 1000, 2025, 0)  # begins and ends in the middle of rows
    layout = CompactLayout(chunk.length)
    generator = np.random.default_rng(counts)
    own = generator.standard_normal(chunk.length).astype(np.float32)
    own[:50], own[50:400] = np.float32(1e-42), np.float32(-0.0)
    everybody = []
    for count in counts:
        numbers = np.sort(generator.choice(35, count, replace=False))
        values = (generator.standard_normal((count, width)) * 10.0 ** generator.integers(-3, 4)).astype(np.float32)
        values[:2], values[2:4] = np.float32(-0.0), np.float32(-3e-42)
        everybody.append(TouchedRows(numbers, values))
    rows = np.empty(chunk.length, np.float32)
    add_up(everybody, chunk, rows)
    memory = np.full(most_packed_bytes(chunk, width, len(counts)), 0xAA, np.uint8)
    packed = pack(everybody, chunk, memory)
    there = torch.from_numpy(memory[: packed.used_bytes]).to(DEVICE)
    mine = torch.from_numpy(own.copy()).to(DEVICE)
    into = torch.full((layout.row_bytes,), 77, dtype=torch.uint8, device=DEVICE)
    kernels.add_rows(there, packed, mine, layout, into)
    assert same_bits(mine.cpu().numpy(), own + rows)
    size = layout.measure(into.cpu().numpy().data)
    assert size == len(compact_codec.compact(own + rows, layout))


def _half() -> None:
    from poseidon.sums import compact_kernels as kernels

    rows = _rows_of(2, 1030, 1, itemsize=2)
    layout, size = rows.layout, rows.chunks[-1].stop
    flats = [torch.from_numpy(_draw("bf16", size) * (3 + rank)).bfloat16() for rank in range(3)]
    flats[1][:4] = torch.tensor([torch.nan, torch.inf, -0.0, 1e-40])
    mean = (functools.reduce(torch.add, [flat.float() for flat in flats]) / 3).bfloat16()
    into = torch.zeros((3, 2, layout.row_bytes), dtype=torch.uint8, device=DEVICE)
    for flat, row in zip(flats, into, strict=True):
        kernels.compact(flat.to(DEVICE), rows, row)
    compacted = [[row[: layout.measure(row.data)].tobytes() for row in one] for one in into.cpu().numpy()]
    sums: list[tuple[int, bytes] | None] = []
    for chunk in rows.chunks:
        one, two = ((Encoding.COMPACT, compacted[rank][chunk.index]) for rank in (0, 1))
        own = flats[2][chunk.start : chunk.stop].to(DEVICE)
        total = torch.zeros(layout.row_bytes, dtype=torch.uint8, device=DEVICE)
        kernels.add(_pack([one, two, None]), 3, own, layout, 3, total)
        expected = mean[chunk.start : chunk.stop]
        assert torch.equal(own.cpu().nan_to_num(7), expected.nan_to_num(7))
        encoded = total.cpu().numpy()
        sums.append((Encoding.COMPACT, encoded[: layout.measure(encoded.data)].tobytes()))
    back = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
    # The second chunk travels plain.
    plain = mean[rows.chunks[1].start :].view(torch.int16).numpy().tobytes()
    kernels.restore(_pack([sums[0], (Encoding.PLAIN, plain)]), rows, back, 3)
    assert torch.equal(back.cpu().nan_to_num(7), mean.nan_to_num(7))


def _garbage(seed: int) -> None:
    """Whatever comes from the wire, nothing outside its memory is read, and the codec reads the same."""
    from poseidon.sums import compact_kernels as kernels

    generator = np.random.default_rng(seed)
    rows = _rows_of(1, 1024, 0)
    layout = rows.layout
    chunk = generator.integers(0, 256, layout.tail_at + 2000, dtype=np.uint8)
    chunk[:4].view("<u4")[0] = 2000
    entries = chunk[16 : layout.tail_at].view("<u8")
    # Some begin within the tail.
    entries[::2] &= np.uint64(0xFFFFFFFF000007FF)
    back = torch.zeros(1024, device=DEVICE)
    kernels.restore(_pack([(Encoding.COMPACT, chunk.tobytes())]), rows, back, 1)
    assert same_bits(back.cpu().numpy(), compact_codec.restore(chunk.tobytes(), 1024, layout))


def _compile() -> None:
    """What Triton's interpreter accepts, its compiler may not; that needs no GPU."""
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    from poseidon.sums import compact_kernels as kernels

    numbers = dict.fromkeys(["workers", "count", "groups", "capacity"], "i32")
    signature = {"packed": "*u8", "own": "*i16", "into": "*u8", **numbers, "divisor": "fp32"}
    constants = {"is_half": True}
    rows = {**signature, "own": "*i32", **dict.fromkeys(["width", "skipped", "values_at"], "i32")}
    del rows["divisor"]
    whole = {**dict.fromkeys(["flat", "old"], "*i32"), **dict.fromkeys(["rows", "packed"], "*u8"), "divisor": "fp32"}
    whole |= dict.fromkeys(["quotient", "longer", "stride", "groups", "capacity"], "i32")
    changes = {"is_half": False, "is_change": True, "is_rounded": True}
    restored = {"is_half": False, "has_old": True}
    for kernel, kinds, fixed in (
        (kernels._add, {**signature, **dict.fromkeys(constants, "constexpr")}, constants),
        (kernels._add_rows, rows, {}),
        (kernels._compact, {**whole, **dict.fromkeys(changes, "constexpr")}, changes),
        (kernels._restore, {**whole, **dict.fromkeys(restored, "constexpr")}, restored),
    ):
        source = compiler.ASTSource(kernel, {name: kinds[name] for name in kernel.arg_names}, fixed)
        compiler.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})


def _main() -> None:
    shapes = [(2, 512, 0), (3, 700, 1)]
    for number, kind in enumerate(["normal", "bf16", "zeros", "strays", "any bits"]):
        for chunks, quotient, longer in amount(shapes[number % 2 :][:1], shapes):
            print(f"compacting {chunks} chunks of {quotient} values, {longer} of them longer: {kind}", flush=True)
            _compact_and_restore(kind, _rows_of(chunks, quotient, longer), divisor=1 + longer * 2 * (kind == "normal"))
    for kind in ["normal", "any bits"]:
        for is_rounded in (False, True):
            print(f"changes, rounded {is_rounded}: {kind}", flush=True)
            _change(kind, is_rounded)
    for place in (0, 2):
        print(f"adding as worker {place}", flush=True)
        _add(place, 1025)
    for counts in ([5, 0, 12, 9], [35, 20, 1], [0, 0]):
        print(f"adding {counts} touched rows", flush=True)
        _add_rows(counts)
    print("adding bf16", flush=True)
    _half()
    for seed in range(2):
        print(f"restoring garbage {seed}", flush=True)
        _garbage(seed)


def run_apart(file: str, job: str, interpreted: bool) -> None:
    """Call a function of a file in a process of its own, whose kernels are interpreted or compiled."""
    paths = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, file, job],
        env={**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {}), "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_kernels_compact_like_the_codec_restore_all_bits_and_add_in_the_order_of_ranks() -> None:
    run_apart(__file__, "_main", interpreted=DEVICE != "cuda")


def test_kernels_compile() -> None:
    run_apart(__file__, "_compile", interpreted=False)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
