#!/usr/bin/env bash
# What people train today: models of transformers and torchvision as they come, AdamW, bf16 autocast, on 8 machines at
# 10 Gbit/s that share one GPU. Names of models before "--", options of `poseidon bench` behind it.
set -euo pipefail
source "$(dirname "$0")/common.sh"
models=(transformers/gpt2 torchvision/vit_b_16 torchvision/resnet50)
declare -A batch=([transformers/gpt2]=4 [torchvision/vit_b_16]=16)
read_arguments "$@"
for model in "${models[@]}"; do
    bench --device cuda --models "$model" --batch "${batch[$model]:-32}" --precision bf16 --optimizer adamw \
        --machines 8 --rate 10gbit --against linear,ddp,ddp-bf16,poseidon,poseidon-distribute,poseidon-distribute:update=server \
        --steps 8 --warmup 6 --repetitions 3 --timeout 300 --output "$results/today_${model##*/}.json" "${options[@]}"
done
