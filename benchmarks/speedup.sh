#!/usr/bin/env bash
# The README's speedup picture: VGG19 and ResNet-152 on 2, 4 and 8 machines at 10 Gbit/s, all systems in one run.
# Usage: benchmarks/speedup.sh [MODEL ...] [-- OPTIONS OF poseidon bench]; one file per model, in $OUT where that is set.
# Then: python benchmarks/speedup.py DIRECTORY/speedup_*.json
# Takes about 8 minutes on an H200.
set -euo pipefail
source "$(dirname "$0")/common.sh"
results=${OUT:-$results}
models=(vgg19 resnet152)
read_arguments "$@"
status=0
for model in "${models[@]}"; do
    bench --device cuda --models "$model" --batch 32 --machines 8,4,2 --rate 10gbit \
        --against linear,ddp,poseidon,poseidon-distribute --steps 6 --warmup 6 --repetitions 2 --timeout 180 \
        --output "$results/speedup_$model.json" "${options[@]}" || status=$?
done
exit $status
