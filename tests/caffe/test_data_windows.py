from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from poseidon.caffe.io.windows import ImageWindow, WindowCrop, read_windows
from poseidon.caffe.schema import BlobProto
from poseidon.errors import ConfigError

ENTRY = "# {index}\n{image}\n3\n20\n30\n{count}\n"
RANDOM = np.random.default_rng(4)


@pytest.fixture(autouse=True)
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    pixels = [RANDOM.integers(0, 256, (20, 30, 3)).astype(np.uint8) for _ in range(2)]
    for number, array in enumerate(pixels):
        Image.fromarray(np.ascontiguousarray(array[:, :, ::-1])).save(f"images/{number}.png")
    return pixels


def write_windows(*entries):
    with Path("w.txt").open("w") as file:
        for index, windows in enumerate(entries):
            file.write(ENTRY.format(index=index, image=f"{index}.png", count=len(windows)))
            file.writelines(f"{window}\n" for window in windows)


def net_of(caffe, settings="", transform="crop_size: 6"):
    with Path("net.prototxt").open("w") as file:
        file.write(
            'layer { name: "w" type: "WindowData" top: "data" top: "label" '
            f"transform_param {{ {transform} }} "
            f'window_data_param {{ source: "w.txt" root_folder: "images/" {settings} }} }}'
        )
    return caffe.Net("net.prototxt", caffe.TRAIN)


@pytest.mark.parametrize("cached", ["false", "true"])
def test_batches_have_their_share_of_objects(caffe, cached):
    write_windows(["1 0.9 0 0 5 5", "2 0.8 3 3 9 9", "4 0.45 0 0 3 3"], ["3 0.1 2 2 8 8", "3 0.2 1 1 20 15"])
    net = net_of(caffe, f"batch_size: 8 fg_fraction: 0.4 bg_threshold: 0.4 cache_images: {cached}")
    labels = [net.forward()["label"].copy() for _ in range(6)]
    assert all((batch[:5] == 0).all() and set(batch[5:]) <= {1, 2} for batch in labels)
    assert {value for batch in labels for value in batch[5:]} == {1, 2}


def test_window_of_the_crop_size_is_the_region_itself(caffe, images):
    write_windows(["1 0.9 4 3 9 8"], ["1 0.0 7 2 12 7"])
    data = net_of(caffe, "batch_size: 2 fg_fraction: 0.5 scale: 0.5").forward()["data"]
    np.testing.assert_array_equal(data[0], images[1][2:8, 7:13].transpose(2, 0, 1) * 0.5)
    np.testing.assert_array_equal(data[1], images[0][3:9, 4:10].transpose(2, 0, 1) * 0.5)


def test_mirrored_windows_come_both_ways(caffe, images):
    write_windows(["1 0.9 4 3 9 8"], ["1 0.0 7 2 12 7"])
    data = net_of(caffe, "batch_size: 40 fg_fraction: 0.5", "crop_size: 6 mirror: true").forward()["data"]
    plain = images[0][3:9, 4:10].transpose(2, 0, 1)
    found = {np.array_equal(row, plain) * 1 + np.array_equal(row, plain[:, :, ::-1]) * 2 for row in data[20:]}
    assert found == {1, 2}


def test_middle_of_the_mean_image_is_subtracted(caffe, images):
    mean = RANDOM.uniform(0, 100, (3, 10, 10)).astype(np.float32)
    proto = BlobProto(num=1, channels=3, height=10, width=10, data=mean.ravel().tolist())
    Path("mean.binaryproto").write_bytes(proto.SerializeToString())
    write_windows(["1 0.9 4 3 9 8"], ["1 0.0 7 2 12 7"])
    data = net_of(caffe, "batch_size: 2 fg_fraction: 0.5", 'crop_size: 6 mean_file: "mean.binaryproto"').forward()[
        "data"
    ]
    np.testing.assert_allclose(data[1], images[0][3:9, 4:10].transpose(2, 0, 1) - mean[:, 2:8, 2:8], rtol=1e-5)


def test_context_outside_the_image_stays_zero(caffe):
    write_windows(["1 0.9 0 0 9 9"], ["1 0.0 20 10 29 19"])
    data = net_of(caffe, "batch_size: 2 fg_fraction: 0.5 context_pad: 2", "crop_size: 8 mean_value: 300").forward()[
        "data"
    ]
    assert (data[1][:, :2] == 0).all()
    assert (data[1][:, :, :2] == 0).all()
    assert (data[1][:, 2:, 2:] < 0).all()
    assert (data[0][:, -1:] == 0).all()


def test_square_crops_keep_the_shape_of_objects():
    window = ImageWindow(0, 1, 1.0, 10, 5, 19, 8)  # 10 wide, 4 high
    place = WindowCrop(10, is_square=True).place(window, 40, 40, mirrored=False)
    assert place.x2 - place.x1 == place.y2 - place.y1
    assert WindowCrop(10).place(window, 40, 40, mirrored=False)[:4] == (10, 5, 19, 8)


def test_padding_is_mirrored_too():
    window = ImageWindow(0, 1, 1.0, 0, 10, 9, 19)
    plain = WindowCrop(8, context_pad=2).place(window, 30, 40, mirrored=False)
    mirrored = WindowCrop(8, context_pad=2).place(window, 30, 40, mirrored=True)
    assert plain.left > 0
    assert mirrored.left == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the window file is empty"),
        ("0\n", "w.txt:1: '0' where '#'"),
        ("# 0\na.png\n3\n9\n", "ends where width is expected; it is truncated"),
        ("# 0\na.png\n3\n9\n9\n1\n1 high 1 1 2 2\n", "w.txt:7: 'high' where an overlap is expected"),
        ("# 4\na.png\n3\n9\n9\n1\n1 0.5 1 1 2 2\n", "a window belongs to image 4, but there are 1"),
    ],
)
def test_bad_window_files_are_explained(text, message):
    Path("w.txt").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_windows("w.txt")


@pytest.mark.parametrize(
    ("windows", "settings", "transform", "message"),
    [
        (["1 0.9 0 0 5 5"], "", "crop_size: 6", "1 foreground and 0 background windows"),
        (["0 0.9 0 0 5 5"], "", "crop_size: 6", "label 0; expected above 0"),
        (["1 0.9 0 0 5 5"], 'crop_mode: "round"', "crop_size: 6", "unknown crop_mode 'round'; known: square, warp"),
        (["1 0.9 0 0 5 5"], "context_pad: 3", "crop_size: 6", "twice context_pad 3"),
        (["1 0.9 0 0 50 5", "1 0.1 0 0 50 5"], "", "crop_size: 6", r"window \(0, 0, 50, 5\) of image 0.*30 x 20"),
    ],
)
def test_impossible_windows_are_explained(caffe, windows, settings, transform, message):
    write_windows(windows)
    with pytest.raises(ConfigError, match=f"'w'.*{message}"):
        net_of(caffe, f"batch_size: 2 fg_fraction: 0.5 {settings}", transform).forward()
