#!/usr/bin/env bash
# AlexNet and a DLRM-like recommender on 4 machines at 1 Gbit/s, everything computed on the CPU.
set -euo pipefail
source "$(dirname "$0")/common.sh"
bench --models alexnet --batch 8 --machines 4 --rate 1gbit --against linear,ddp,poseidon \
    --steps 4 --warmup 3 --repetitions 3 --output "$results/cpu_1gbe_alexnet.json" "$@"
bench --models dlrm --batch 128 --machines 4 --rate 1gbit --against linear,ddp,poseidon \
    --steps 4 --warmup 3 --repetitions 3 --output "$results/cpu_1gbe_dlrm.json" "$@"
