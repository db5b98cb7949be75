#!/usr/bin/env bash
# LoRA on a model of GPT-2's size, 2 machines at 1 Gbit/s with the compute time of a small GPU: speedup over one machine.
# Ends by itself within three minutes. Options go to lora.py: --steps 5 --rate 100mbit
set -euo pipefail
source "$(dirname "$0")/common.sh"
"$PYTHON" benchmarks/lora.py --output "$results/lora_1gbe.json" "$@"
