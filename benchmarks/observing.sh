#!/usr/bin/env bash
# What being observed costs with the page open: laps of one job in turn with and without, on emulated machines.
# Usage: benchmarks/observing.sh cpu|gpu [OPTIONS OF observing_cost.py], such as --laps 5 --image-size 64.
#   cpu: ResNet-18 on 4 machines at 1 Gbit/s, real computation on the CPU
#   gpu: VGG19 on 8 machines at 10 Gbit/s that share this machine's GPU; needs neither ssh nor sshd
set -euo pipefail
source "$(dirname "$0")/common.sh"
mode=${1:-cpu}
shift || true
case "$mode" in
    cpu) lab=(--machines 4 --rate 1gbit)
         options=(--model resnet18 --batch 8 --threads 1 --laps 20 --steps 4) ;;
    gpu) lab=(--machines 8 --rate 10gbit --gpu share)
         options=(--model vgg19 --batch 32 --threads 1 --device cuda --laps 20 --steps 8) ;;
    *) echo "observing.sh cpu or gpu, not $mode" >&2; exit 2 ;;
esac
"$PYTHON" benchmarks/observing_lab.py "${lab[@]}" --result "$results/observing_$mode.json" -- "${options[@]}" "$@"
