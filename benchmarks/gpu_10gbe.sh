#!/usr/bin/env bash
# Five networks on 4 and 8 machines at 10 Gbit/s; all machines share this machine's GPU through MPS.
# Usage: benchmarks/gpu_10gbe.sh [MODEL ...] [-- OPTIONS OF poseidon bench]; one file per model.
set -euo pipefail
source "$(dirname "$0")/common.sh"
models=(vgg19 vgg19-22k resnet152 inception-v3 gpt2)
read_arguments "$@"
status=0
for model in "${models[@]}"; do
    # Text needs far fewer samples than images: each is 1024 tokens.
    bench --device cuda --models "$model" --batch 32,gpt2=4 --machines 4,8 --rate 10gbit \
        --against linear,ddp,ddp-bf16,ddp-powersgd,poseidon --steps 8 --warmup 3 --repetitions 3 --timeout 240 \
        --output "$results/gpu_10gbe_$model.json" "${options[@]}" || status=$?
done
exit $status
