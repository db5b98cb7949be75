"""Caffe's commands (``poseidon train``, ``convert-imageset``, ...), one file each; ``cli/main.py`` lists them."""
