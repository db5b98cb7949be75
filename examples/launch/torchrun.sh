#!/usr/bin/env bash
# On every machine, with its number: ./torchrun.sh 0, ./torchrun.sh 1, ...
# A script that calls poseidon.init() joins torchrun's job; so does `poseidon run` (here for --auto or --as-caffe).
set -euo pipefail
machines=${MACHINES:-4}
exec torchrun --nnodes "$machines" --nproc-per-node "${WORKERS:-1}" --node-rank "$1" \
    --master-addr "${FIRST:-node1}" --master-port 29500 train.py
