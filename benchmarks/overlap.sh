#!/usr/bin/env bash
# What a schedule hides: ten equal layers whose traffic takes as long as their computation, forward half of backward.
# 4 machines; computation is paced and uses no CPU. At 250 Mbit/s nothing but the schedule counts; at 1 Gbit/s the CPU too.
set -euo pipefail
source "$(dirname "$0")/common.sh"
bench --models ladder --batch 1 --paced 960:1920 --machines 4 --rate 250mbit \
    --against linear,ddp,poseidon,poseidon-distribute --steps 4 --warmup 3 --repetitions 3 \
    --output "$results/overlap_250mbit.json" "$@"
bench --models ladder --batch 1 --paced 240:480 --machines 4 --rate 1gbit \
    --against linear,ddp,poseidon,poseidon-distribute --steps 6 --warmup 3 --repetitions 3 \
    --output "$results/overlap_1gbit.json" "$@"
# Bound by the wire: 8 machines, and a quarter less computation than traffic. What counts is that no link stands idle.
bench --models ladder --batch 1 --paced 870:1740 --machines 8 --rate 250mbit \
    --against linear,ddp,poseidon-distribute --steps 3 --warmup 3 --repetitions 2 \
    --output "$results/overlap_8x250mbit.json" "$@"
