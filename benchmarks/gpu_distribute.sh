#!/usr/bin/env bash
# poseidon.distribute beside DDP on 8 machines at 10 Gbit/s; all machines share this machine's GPU through MPS.
# Usage: benchmarks/gpu_distribute.sh [MODEL ...] [-- OPTIONS OF poseidon bench]; one file per model.
set -euo pipefail
source "$(dirname "$0")/common.sh"
models=(resnet152 vgg19 gpt2)
read_arguments "$@"
status=0
for model in "${models[@]}"; do
    bench --device cuda --models "$model" --batch 32,gpt2=4 --machines 8 --rate 10gbit \
        --against linear,ddp,poseidon-distribute --steps 8 --warmup 6 --repetitions 3 --timeout 240 \
        --output "$results/gpu_10gbe_${model}_distribute.json" "${options[@]}" || status=$?
done
exit $status
