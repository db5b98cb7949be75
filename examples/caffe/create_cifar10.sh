#!/usr/bin/env bash
# Makes cifar10_train_lmdb, cifar10_test_lmdb and mean.binaryproto here, from the folder of CIFAR-10's binary version.
#     ./create_cifar10.sh DATA_FOLDER [lmdb|leveldb]
set -euo pipefail
data=${1:?name the folder of data_batch_1.bin to data_batch_5.bin and test_batch.bin}
backend=${2:-lmdb}
rm -rf "cifar10_train_$backend" "cifar10_test_$backend"
poseidon convert-cifar-data "$data" . "$backend"
poseidon compute-image-mean --backend="$backend" "cifar10_train_$backend" mean.binaryproto
