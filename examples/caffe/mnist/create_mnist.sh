#!/usr/bin/env bash
# Makes mnist_train_lmdb and mnist_test_lmdb here from MNIST's four files, unpacked, in the folder named first.
#     ./create_mnist.sh DATA_FOLDER [lmdb|leveldb]
set -euo pipefail
data=${1:?name the folder of train-images-idx3-ubyte and the other three}
backend=${2:-lmdb}
rm -rf "mnist_train_$backend" "mnist_test_$backend"
poseidon convert-mnist-data --backend="$backend" "$data/train-images-idx3-ubyte" "$data/train-labels-idx1-ubyte" "mnist_train_$backend"
poseidon convert-mnist-data --backend="$backend" "$data/t10k-images-idx3-ubyte" "$data/t10k-labels-idx1-ubyte" "mnist_test_$backend"
