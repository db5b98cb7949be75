#!/usr/bin/env bash
# AlexNet and a DLRM-like recommender on 4 machines at 1 Gbit/s, everything computed on the CPU.
set -euo pipefail
source "$(dirname "$0")/common.sh"
# Small images leave AlexNet's layers as they are and let 4 workers share a few cores.
bench --models alexnet --image-size 64 --batch 32 --machines 4 --rate 1gbit --against linear,ddp,ddp-powersgd,poseidon \
    --steps 5 --warmup 3 --repetitions 3 --output "$results/cpu_1gbe_alexnet.json" "$@"
bench --models dlrm --batch 128 --machines 4 --rate 1gbit --against linear,ddp,ddp-powersgd,poseidon \
    --steps 5 --warmup 3 --repetitions 3 --output "$results/cpu_1gbe_dlrm.json" "$@"
