"""One machine of the cap's test: send to all others for a while; say the rate at the interface. ENCRYPT CAP_MBIT."""

import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch.distributed as dist

from poseidon.lab.bench_worker import bytes_sent
from poseidon.wire.message import Header, Kind
from poseidon.wire.settings import WireSettings
from poseidon.wire.tcp import TcpTransport

WARM_UP_S, MEASURE_S = 0.5, 3.0
CHUNK = np.zeros(64 << 10, np.float32)


def main(encrypt, cap_mbit, folder):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = WireSettings(encrypt=encrypt == "1", interface="eth0", cap_mbit=cap_mbit, close_timeout_s=20)
    transport = TcpTransport(rank, size, b"a secret of the tests", settings)
    transport.listen(Kind.PART, lambda *_: None)
    addresses = [""] * size
    dist.all_gather_object(addresses, transport.address)
    transport.connect(addresses)
    dist.barrier()
    if rank == 0:
        Path(folder, encrypt).write_text(json.dumps(measure(transport)))
    dist.barrier()
    transport.close()
    os._exit(0)


def measure(transport):
    """Keep a few chunks queued for every peer, and return the bits per second that leave."""
    room = threading.Semaphore(4 * (transport.size - 1))
    began, start_s, start_bytes = time.monotonic(), 0.0, 0
    while True:
        for peer in range(1, transport.size):
            room.acquire()
            header = Header(Kind.PART, 0, 0, 0, 0, CHUNK.nbytes)
            transport.send(peer, header, CHUNK, on_sent=room.release)
        now = time.monotonic() - began
        if not start_s and now > WARM_UP_S:
            start_s, start_bytes = now, bytes_sent()
        elif start_s and now > start_s + MEASURE_S:
            return (bytes_sent() - start_bytes) * 8 / (now - start_s)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
