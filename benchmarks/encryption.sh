#!/usr/bin/env bash
# What encryption costs: ResNet-18 on 4 machines at 1 Gbit/s, real computation on the CPU, with and without encryption in
# turn, ROUNDS times (default 5), so that whatever else the machine does hits both. Options go to `poseidon bench`:
# on a GPU machine --device cuda --rate 10gbit --machines 8 --batch 32.
set -euo pipefail
source "$(dirname "$0")/common.sh"
rounds=${ROUNDS:-5}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for round in $(seq "$rounds"); do
    for encrypt in 0 1; do
        # Every other round begins with encryption.
        if [ $((round % 2)) = 0 ]; then encrypt=$((1 - encrypt)); fi
        POSEIDON_WIRE_ENCRYPT=$encrypt bench --models resnet18 --batch 8 --machines 4 --rate 1gbit \
            --against poseidon,poseidon-distribute --steps 6 --warmup 4 --repetitions 1 --timeout 600 \
            --output "$folder/$encrypt-$round.json" "$@"
    done
done
"$PYTHON" benchmarks/encryption.py "$folder" "$results/encryption.json"
