#!/usr/bin/env bash
# Makes ilsvrc12_train_lmdb, ilsvrc12_val_lmdb and imagenet_mean.binaryproto here, from folders of images and their lists.
#     ./create_imagenet.sh TRAIN_FOLDER/ VAL_FOLDER/ LISTS_FOLDER
# LISTS_FOLDER holds train.txt and val.txt: lines of a file's name below its folder, a space and the label.
# RESIZE=no keeps the images' sizes. Run again, it continues after an interruption.
set -euo pipefail
train=${1:?name the folder of training images} val=${2:?name the folder of validation images} lists=${3:?name the folder of the lists}
size=(--resize_height=256 --resize_width=256)
if [ "${RESIZE:-yes}" = no ]; then size=(); fi
[ -e ilsvrc12_train_lmdb ] || poseidon convert-imageset "${size[@]}" --shuffle "$train/" "$lists/train.txt" ilsvrc12_train_lmdb
[ -e ilsvrc12_val_lmdb ] || poseidon convert-imageset "${size[@]}" --shuffle "$val/" "$lists/val.txt" ilsvrc12_val_lmdb
poseidon compute-image-mean ilsvrc12_train_lmdb imagenet_mean.binaryproto
