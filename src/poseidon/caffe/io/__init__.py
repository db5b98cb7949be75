"""pycaffe's ``caffe.io``; the modules of this package read the data of layers and tools.

Databases, lists, images, transformation, prefetching and sharding each have their own module.
"""

from poseidon.caffe.conversions import (
    array_to_blobproto,
    array_to_datum,
    arraylist_to_blobprotovecor_str,
    arraylist_to_blobprotovector_str,
    blobproto_to_array,
    blobprotovector_str_to_arraylist,
    datum_to_array,
)
from poseidon.caffe.float_images import load_image, oversample, resize_image
from poseidon.caffe.proto import caffe_pb2
from poseidon.caffe.transformer import Transformer

__all__ = [
    "Transformer",
    "array_to_blobproto",
    "array_to_datum",
    "arraylist_to_blobprotovecor_str",
    "arraylist_to_blobprotovector_str",
    "blobproto_to_array",
    "blobprotovector_str_to_arraylist",
    "caffe_pb2",
    "datum_to_array",
    "load_image",
    "oversample",
    "resize_image",
]
