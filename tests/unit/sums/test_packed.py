from __future__ import annotations

import numpy as np

from poseidon.sums.packed import HERE, ChunkTable, table_bytes


def test_chunks_lie_one_behind_the_other_aligned_and_the_rest_is_on_the_device() -> None:
    memory = np.full(table_bytes(3) + 200, 0xAA, np.uint8)
    table = ChunkTable(memory, 3)
    assert table.used_bytes == table_bytes(3) == 48
    assert table.place(2, 33) == 48
    assert table.place(0, 16) == 48 + 48
    table.mark(2, 1)
    table.mark(0, 0)
    assert memory[:48].view(np.int64).reshape(3, 2).tolist() == [[96, 0], [0, HERE], [48, 1]]
    assert table.used_bytes == 96 + 16
    assert (memory[48:] == 0xAA).all()
    table.clear()
    assert memory[:48].view(np.int64).reshape(3, 2).tolist() == [[0, HERE]] * 3
    assert table.place(1, 1) == 48
