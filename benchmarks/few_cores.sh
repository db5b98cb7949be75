#!/usr/bin/env bash
# More workers than cores: machines at 500 Mbit/s that share the cores of this one, with real computation. ResNet-18 on 2, 4
# and 6 machines, the recommender on 4. Needs an otherwise idle machine with 2 cores. Then: benchmarks/predict.py --write
set -euo pipefail
source "$(dirname "$0")/common.sh"
common=(--rate 500mbit --steps 6 --warmup 4 --repetitions 3 --timeout 900)
all=linear,ddp,poseidon,poseidon-distribute
bench --models resnet18 --batch 4 --machines 2,4,6 --against "$all,poseidon-distribute:update=server" "${common[@]}" \
    --output "$results/few_cores_resnet18.json" "$@"
bench --models dlrm --batch 64 --machines 4 --against "$all" "${common[@]}" --output "$results/few_cores_dlrm.json" "$@"
