from __future__ import annotations

import numpy as np
import pytest
import torch

from poseidon.caffe.blob import Blob
from poseidon.caffe.proto import caffe_pb2
from poseidon.errors import ConfigError


def test_a_new_blob_is_zero_and_single_precision():
    blob = Blob((2, 3))
    assert blob.data.dtype == np.float32
    assert not blob.data.any()
    assert (blob.num, blob.channels, blob.height, blob.width, blob.count) == (2, 3, 1, 1, 6)


def test_writes_to_a_view_reach_the_tensor():
    blob = Blob((2, 2))
    blob.data[...] = [[1, 2], [3, 4]]
    assert blob.data_tensor.tolist() == [[1, 2], [3, 4]]


def test_a_held_view_shows_what_a_layer_puts_there():
    blob = Blob((3,))
    view = blob.data
    row = view[1:]
    del view
    blob.put_data(torch.tensor([1.0, 2.0, 3.0]))
    assert row.tolist() == [2, 3]


def test_without_a_view_results_are_taken_over_uncopied():
    blob = Blob((3,))
    blob.data[...] = 1
    values = torch.tensor([1.0, 2.0, 3.0])
    blob.put_data(values)
    assert blob.data_tensor.data_ptr() == values.data_ptr()


def test_a_view_of_borrowed_memory_does_not_write_into_the_lender():
    lender, borrower = Blob((2,)), Blob((2,))
    lender.put_data(torch.tensor([1.0, 2.0]))
    borrower.put_data(lender.data_tensor, borrowed=True)
    borrower.data[...] = 9
    assert lender.data.tolist() == [1, 2]


def test_views_are_contiguous_whatever_the_layout_of_the_tensor():
    blob = Blob()
    values = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    blob.put_data(values)
    assert blob.data.flags.c_contiguous
    assert blob.data.flatten().tolist() == list(range(24))


def test_reshape_keeps_values_only_when_their_number_stays():
    blob = Blob((2, 3))
    blob.data[...] = 5
    blob.reshape(3, 2)
    assert blob.data.shape == (3, 2)
    assert (blob.data == 5).all()
    blob.reshape(4)
    assert blob.data.tolist() == [0, 0, 0, 0]


def test_gradients_add_up_until_cleared():
    blob = Blob((2,))
    first = torch.tensor([1.0, 2.0])
    blob.add_diff(first)
    blob.add_diff(torch.tensor([10.0, 10.0]))
    assert blob.diff.tolist() == [11, 12]
    held = blob.diff
    blob.clear_diff()
    assert held.tolist() == [0, 0]


def test_sharing_is_mutual_and_checks_the_count():
    owner, user = Blob((2, 3)), Blob((3, 2))
    user.share_data(owner)
    user.data[0, 0] = 7
    assert owner.data[0, 0] == 7
    with pytest.raises(ConfigError, match=r"\(2, 3\).*\(5,\)"):
        Blob((5,)).share_data(owner)


def test_proto_round_trip_and_older_shapes():
    blob = Blob((2, 3))
    blob.data[...] = np.arange(6).reshape(2, 3)
    blob.diff[...] = 1
    copy = Blob()
    copy.from_proto(blob.to_proto(write_diff=True))
    assert copy.shape == (2, 3)
    assert copy.data.tolist() == blob.data.tolist()
    assert copy.diff.sum() == 6
    old = caffe_pb2.BlobProto(num=1, channels=1, height=2, width=3, double_data=range(6))
    assert blob.fits(old)
    assert not Blob((3, 2)).fits(old)
    blob.from_proto(old, reshape=False)
    assert blob.data.tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ConfigError, match="needs 6 values but holds 5"):
        blob.from_proto(caffe_pb2.BlobProto(shape={"dim": [6]}, data=range(5)))
