#!/usr/bin/env bash
# How communication hides behind computation: passes take the time of a small GPU without using the CPU.
set -euo pipefail
source "$(dirname "$0")/common.sh"
bench --models alexnet --image-size 64 --batch 8 --paced 400:800 --machines 2,4 --rate 1gbit --against linear,ddp,poseidon \
    --steps 5 --warmup 3 --repetitions 3 --output "$results/paced_1gbe_alexnet.json" "$@"
bench --models resnet18 --image-size 64 --batch 1 --paced 200:400 --machines 2,4,8 --rate 1gbit --against linear,ddp,poseidon \
    --steps 5 --warmup 3 --repetitions 3 --output "$results/paced_1gbe_resnet18.json" "$@"
