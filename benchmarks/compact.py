"""Time the kernels that compact, add and restore on a GPU, and count the bits that a value takes.

    python benchmarks/compact.py --values 8388608 --workers 8

Prints one line for each kind of values: bits per value of a part and of a sum, and milliseconds for compacting a bucket
(with all its chunks), adding one chunk of all workers, and restoring a bucket; then what copies over the bus take. It
needs a CUDA device and Triton, and less than a minute, most of which Triton compiles.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from poseidon.sums import compact_kernels as kernels
from poseidon.sums.chunks import cut
from poseidon.sums.compact import ChunkRows
from poseidon.sums.encodings import Encoding
from poseidon.sums.packed import ChunkTable, table_bytes

Draw = Callable[[int], Tensor]


def _gradient(size: int) -> Tensor:
    """Values of a few magnitudes, as neighbours in a gradient have."""
    scales = torch.randn(-(-size // 768), device="cuda").exp_().repeat_interleave(768)[:size]
    return torch.randn(size, device="cuda") * scales * 1e-4


KINDS: dict[str, Draw] = {
    "float32": _gradient,
    "bf16 autocast": lambda size: _gradient(size).bfloat16().float(),
    "fp16 autocast": lambda size: (_gradient(size) * 65536).half().float(),
    "bf16": lambda size: _gradient(size).bfloat16(),
    "zeros": lambda size: torch.zeros(size, device="cuda"),
}


def _time_ms(work: Callable[[], object], repetitions: int = 20) -> float:
    work()
    times = []
    for _ in range(repetitions):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _pack(chunks: dict[int, Tensor], count: int) -> Tensor:
    """Return compacted chunks behind their table; those that are missing are on the device."""
    room = table_bytes(count) + sum(len(chunk) + 16 for chunk in chunks.values())
    memory = torch.zeros(room, dtype=torch.uint8)
    table = ChunkTable(memory.numpy(), count)
    for number, chunk in chunks.items():
        position = table.place(number, len(chunk))
        memory[position : position + len(chunk)] = chunk.cpu()
        table.mark(number, Encoding.COMPACT)
    return memory[: table.used_bytes].cuda()


def _cut_to_size(row: Tensor, rows: ChunkRows) -> Tensor:
    size_bytes = rows.layout.measure(row[:16].cpu().numpy().data)
    if size_bytes > rows.layout.row_bytes:
        raise SystemExit(f"{size_bytes} bytes compacted, {rows.layout.row_bytes} plain: such values travel plain")
    return row[:size_bytes]


def _measure(name: str, draw: Draw, values: int, workers: int) -> None:
    parts = [draw(values) for _ in range(workers)]
    (chunks,) = cut([values], range(workers), values)
    rows = ChunkRows.of(chunks, parts[0].element_size())
    layout, first = rows.layout, chunks[0]
    into = torch.empty((len(chunks), layout.row_bytes), dtype=torch.uint8, device="cuda")
    compact_ms = _time_ms(lambda: kernels.compact(parts[0], rows, into))
    part_rows = []
    for part in parts:
        kernels.compact(part, rows, into)
        part_rows.append(_cut_to_size(into[0], rows).clone())

    packed = _pack(dict(enumerate(part_rows[1:], 1)), workers)
    own = parts[0][: first.length].clone()
    total = torch.empty(layout.row_bytes, dtype=torch.uint8, device="cuda")
    # Each repetition adds the others' parts to the sum before: only the first one is right, the time is the same.
    kernels.add(packed, workers, own, layout, workers, total)
    sum_row = _cut_to_size(total, rows).clone()
    expected = functools.reduce(torch.add, [part[: first.length].float() for part in parts])
    if own.dtype == torch.bfloat16:
        expected = (expected / torch.full_like(expected, workers)).bfloat16()
    same = torch.equal(own, expected)
    add_ms = _time_ms(lambda: kernels.add(packed, workers, own, layout, workers, total))

    kernels.compact(parts[0], rows, into)
    sums = _pack({at: _cut_to_size(into[at], rows) for at in range(len(chunks))}, len(chunks))
    back = torch.empty_like(parts[0])
    kernels.restore(sums, rows, back, 1)
    same = same and torch.equal(back, parts[0])
    restore_ms = _time_ms(lambda: kernels.restore(sums, rows, back, workers))
    bits = [8 * len(row) / first.length for row in (part_rows[0], sum_row)]
    print(
        f"{name:14} {bits[0]:6.2f} {bits[1]:6.2f}   {compact_ms:8.3f} {add_ms:8.3f} {restore_ms:8.3f}   "
        f"{'exact' if same else 'WRONG BITS'}",
        flush=True,
    )


def _measure_bus(values: int) -> None:
    there = torch.zeros(4 * values, dtype=torch.uint8, device="cuda")
    here = torch.zeros(4 * values, dtype=torch.uint8, pin_memory=True)
    for share in (1.0, 0.66, 0.38):
        size = int(share * 4 * values)
        out_ms = _time_ms(lambda size=size: here[:size].copy_(there[:size], non_blocking=True))
        in_ms = _time_ms(lambda size=size: there[:size].copy_(here[:size], non_blocking=True))
        print(f"copying {size / 1e6:.1f} MB: out {out_ms:.3f} ms, in {in_ms:.3f} ms")


def main() -> None:
    """Measure all kinds of values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=1 << 23, help="values of the bucket (default: 8 Mi)")
    parser.add_argument("--workers", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{options.values} values, {options.workers} chunks, {torch.cuda.get_device_name()}")
    print(f"{'':14} {'bits per value':13}   {'milliseconds':26}")
    print(f"{'':14} {'part':>6} {'sum':>6}   {'compact':>8} {'add':>8} {'restore':>8}")
    for name, draw in KINDS.items():
        _measure(name, draw, options.values, options.workers)
    _measure_bus(options.values)


if __name__ == "__main__":
    main()
