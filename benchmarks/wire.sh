#!/usr/bin/env bash
# The wire beside gloo (and, with a GPU, NCCL). Usage: benchmarks/wire.sh cpu|gpu [OPTIONS OF wire.py]
set -euo pipefail
source "$(dirname "$0")/common.sh"
kind=${1:-cpu}
shift || true
case $kind in
cpu)
    "$PYTHON" benchmarks/wire.py --rounds 9 \
        --wires "chunk_kb=4096; chunk_kb=2048; chunk_kb=512; chunk_kb=2048,encrypt=1" \
        --output "$results/wire_1gbe.json" "$@"
    ;;
gpu)
    for rate in 10 25; do
        "$PYTHON" benchmarks/wire.py --machines 8 --rate ${rate}gbit --megabytes 241 --peers gloo,nccl --rounds 7 \
            --wires "chunk_kb=2048; chunk_kb=4096; chunk_kb=2048,encrypt=1" \
            --timeout 100 --output "$results/wire_${rate}gbe.json" "$@"
    done
    ;;
*)
    echo "usage: benchmarks/wire.sh cpu|gpu [OPTIONS OF wire.py]" >&2
    exit 2
    ;;
esac
