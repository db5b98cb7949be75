"""Networks in one column: CIFAR-10 quick and full, AlexNet, CaffeNet, VGG with 19 layers."""

from __future__ import annotations

from collections.abc import Callable

from networks.blocks import conv, dense, dropout, gaussian, max_pool, mean_pool, relu
from networks.definition import Head
from poseidon.caffe import NetSpec
from poseidon.caffe import layers as L
from poseidon.caffe import params as P
from poseidon.caffe.net_spec import Top

_FAST_BIAS = [{"lr_mult": 1}, {"lr_mult": 2}]


def cifar10_quick(n: NetSpec) -> list[Head]:
    """Add Caffe's small network for CIFAR-10: three convolutions, two fully connected layers."""
    n.conv1 = conv(n.data, 32, 5, gaussian(0.0001), pad=2, param=_FAST_BIAS)
    n.pool1 = max_pool(n.conv1, 3, 2)
    relu(n, "relu1", n.pool1)
    n.conv2 = conv(n.relu1, 32, 5, gaussian(0.01), pad=2, param=_FAST_BIAS)
    relu(n, "relu2", n.conv2)
    n.pool2 = mean_pool(n.relu2, 3, 2)
    n.conv3 = conv(n.pool2, 64, 5, gaussian(0.01), pad=2, param=_FAST_BIAS)
    relu(n, "relu3", n.conv3)
    n.pool3 = mean_pool(n.relu3, 3, 2)
    n.ip1 = dense(n.pool3, 64, gaussian(0.1), param=_FAST_BIAS)
    n.ip2 = dense(n.ip1, 10, gaussian(0.1), param=_FAST_BIAS)
    return [Head(n.ip2)]


def cifar10_full(n: NetSpec) -> list[Head]:
    """Add Caffe's larger network for CIFAR-10: normalised within channels, one fully connected layer."""
    n.conv1 = conv(n.data, 32, 5, gaussian(0.0001), pad=2, param=_FAST_BIAS)
    n.pool1 = max_pool(n.conv1, 3, 2)
    relu(n, "relu1", n.pool1)
    n.norm1 = _norm_within(n.relu1)
    n.conv2 = conv(n.norm1, 32, 5, gaussian(0.01), pad=2, param=_FAST_BIAS)
    relu(n, "relu2", n.conv2)
    n.pool2 = mean_pool(n.relu2, 3, 2)
    n.norm2 = _norm_within(n.pool2)
    n.conv3 = conv(n.norm2, 64, 5, gaussian(0.01), pad=2, param=[])
    relu(n, "relu3", n.conv3)
    n.pool3 = mean_pool(n.relu3, 3, 2)
    held_small = [{"lr_mult": 1, "decay_mult": 250}, {"lr_mult": 2, "decay_mult": 0}]
    n.ip1 = dense(n.pool3, 10, gaussian(0.01), param=held_small)
    return [Head(n.ip1)]


def _norm_within(bottom: Top) -> Top:
    top: Top = L.LRN(bottom, local_size=3, alpha=5e-5, beta=0.75, norm_region=P.LRN.WITHIN_CHANNEL)
    return top


def alexnet(n: NetSpec) -> list[Head]:
    """Add AlexNet, which normalises before pooling."""
    return _alexnet(n, pools_first=False, bias=0.1)


def caffenet(n: NetSpec) -> list[Head]:
    """Add CaffeNet: AlexNet with pooling before normalisation, which needs less memory."""
    return _alexnet(n, pools_first=True, bias=1.0)


def _alexnet(n: NetSpec, pools_first: bool, bias: float) -> list[Head]:
    weight = gaussian(0.01)
    n.conv1 = conv(n.data, 96, 11, weight, stride=4)
    first = _pool_and_norm(n, "1", relu(n, "relu1", n.conv1), pools_first)
    n.conv2 = conv(first, 256, 5, weight, bias, pad=2, group=2)
    second = _pool_and_norm(n, "2", relu(n, "relu2", n.conv2), pools_first)
    n.conv3 = conv(second, 384, 3, weight, pad=1)
    n.conv4 = conv(relu(n, "relu3", n.conv3), 384, 3, weight, bias, pad=1, group=2)
    n.conv5 = conv(relu(n, "relu4", n.conv4), 256, 3, weight, bias, pad=1, group=2)
    n.pool5 = max_pool(relu(n, "relu5", n.conv5), 3, 2)
    return _three_dense(n, n.pool5, 1000, bias)


def _pool_and_norm(n: NetSpec, number: str, bottom: Top, pools_first: bool) -> Top:
    pool, norm = f"pool{number}", f"norm{number}"
    if pools_first:
        n[pool] = max_pool(bottom, 3, 2)
        n[norm] = L.LRN(n[pool], local_size=5, alpha=1e-4, beta=0.75)
    else:
        n[norm] = L.LRN(bottom, local_size=5, alpha=1e-4, beta=0.75)
        n[pool] = max_pool(n[norm], 3, 2)
    last: Top = n[norm] if pools_first else n[pool]
    return last


def vgg19(classes: int) -> Callable[[NetSpec], list[Head]]:
    """Return the body of VGG with 19 layers; with 21841 classes it is the network for ImageNet-22K."""

    def body(n: NetSpec) -> list[Head]:
        top = n.data
        for stage, (channels, depth) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), start=1):
            for index in range(1, depth + 1):
                name = f"{stage}_{index}"
                n[f"conv{name}"] = conv(top, channels, 3, {"type": "msra"}, pad=1)
                top = relu(n, f"relu{name}", n[f"conv{name}"])
            top = n[f"pool{stage}"] = max_pool(top, 2, 2)
        return _three_dense(n, top, classes, bias=0.0)

    return body


def _three_dense(n: NetSpec, bottom: Top, classes: int, bias: float) -> list[Head]:
    """Add the fully connected layers, which hold most of the parameters."""
    n.fc6 = dense(bottom, 4096, gaussian(0.005), bias)
    n.fc7 = dense(dropout(n, "drop6", relu(n, "relu6", n.fc6)), 4096, gaussian(0.005), bias)
    n.fc8 = dense(dropout(n, "drop7", relu(n, "relu7", n.fc7)), classes, gaussian(0.01))
    return [Head(n.fc8)]
