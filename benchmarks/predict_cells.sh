#!/usr/bin/env bash
# Cells for comparing predictions with measurements where the host is the CPU: compute is paced, so that a few idle cores
# suffice. Networks are narrowed and see small images; their layers are the published ones. Then: benchmarks/predict.py --write
set -euo pipefail
source "$(dirname "$0")/common.sh"
common=(--against linear,ddp,poseidon --steps 4 --warmup 3 --repetitions 3 --timeout 400)
bench --models vgg19 --width 0.25 --image-size 32 --batch 2 --paced 300:600 --machines 2,4 --rate 1gbit "${common[@]}" \
    --output "$results/predict_vgg19.json" "$@"
bench --models resnet152 --width 0.5 --image-size 32 --batch 8 --paced 800:1600 --machines 2,4 --rate 1gbit "${common[@]}" \
    --output "$results/predict_resnet152.json" "$@"
bench --models gpt2 --width 0.25 --batch 1 --paced 600:1200 --machines 2,4 --rate 1gbit "${common[@]}" \
    --output "$results/predict_gpt2.json" "$@"
bench --models dlrm --width 0.5 --batch 64 --paced 200:400 --machines 2,4,8 --rate 1gbit "${common[@]}" \
    --output "$results/predict_dlrm.json" "$@"
short=(--against linear,ddp,poseidon --steps 3 --warmup 3 --repetitions 2 --timeout 200)
bench --models resnet152 --width 0.5 --image-size 64 --batch 1 --paced 600:1200 --machines 2 --rate 250mbit "${short[@]}" \
    --output "$results/predict_resnet152_250mbit.json" "$@"
bench --models resnet18 --image-size 64 --batch 1 --paced 200:400 --machines 2 --rate 1gbit "${short[@]}" \
    --output "$results/predict_resnet18.json" "$@"
bench --models vgg19 --width 0.3 --image-size 32 --batch 1 --paced 300:600 --machines 2,4 --rate 1gbit "${short[@]}" \
    --output "$results/predict_vgg19_wider.json" "$@"
bench --models vgg19 --width 0.15 --image-size 32 --batch 1 --paced 400:800 --machines 2,4 --rate 250mbit "${short[@]}" \
    --output "$results/predict_vgg19_250mbit.json" "$@"
bench --models dlrm --width 0.3 --batch 32 --paced 300:600 --machines 2,4 --rate 250mbit "${short[@]}" \
    --output "$results/predict_dlrm_250mbit.json" "$@"
bench --models dlrm --width 0.1 --batch 32 --paced 300:600 --machines 2 --rate 1gbit "${short[@]}" \
    --output "$results/predict_dlrm_small.json" "$@"
