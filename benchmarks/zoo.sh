#!/usr/bin/env bash
# The whole zoo beside DDP, wrapper and distribute, on 8 machines that share this machine's GPU; in float32 with TF32.
# Usage: benchmarks/zoo.sh [MODEL ...] [-- OPTIONS OF poseidon bench]; RATE=25gbit for another speed; one file per rate.
set -euo pipefail
source "$(dirname "$0")/common.sh"
models=(vgg19 resnet152 gpt2 googlenet alexnet dlrm inception-v3 resnet50 resnet18 cifar10-quick lenet vgg19-22k)
rate=${RATE:-10gbit}
read_arguments "$@"
bench --device cuda --models "$(IFS=,; echo "${models[*]}")" --batch 32,gpt2=4,dlrm=128 --machines 8 --rate "$rate" \
    --against linear,ddp,poseidon,poseidon-distribute --steps 8 --warmup 6 --repetitions 3 --timeout 240 \
    --output "$results/zoo_$rate.json" "${options[@]}"
