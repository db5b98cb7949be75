"""Write the prototxts of the Caffe examples.

    python examples/caffe/generate.py

Each network has a folder with train_test.prototxt, solver.prototxt and deploy.prototxt. Paths to data are those a
Caffe user expects; change them, or make the databases there.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format
from networks.classic import alexnet, caffenet, cifar10_full, cifar10_quick, vgg19
from networks.definition import Network, deploy, solver, train_test
from networks.googlenet import googlenet
from networks.inception import inception_v3
from networks.resnet import resnet152

_CIFAR10 = {
    "crop": 32,
    "train_batch": 100,
    "test_batch": 100,
    "deploy_batch": 1,
    "is_cropped": False,
    "mean": {"mean_file": "examples/cifar10/mean.binaryproto"},
    "sources": ("examples/cifar10/cifar10_train_lmdb", "examples/cifar10/cifar10_test_lmdb"),
    "counts_top_5": False,
}
_IMAGENET_MEAN = {"mean_file": "data/ilsvrc12/imagenet_mean.binaryproto"}
_IMAGENET_22K = ("examples/imagenet22k/imagenet22k_train_lmdb", "examples/imagenet22k/imagenet22k_val_lmdb")
_CIFAR10_SOLVER = {"test_iter": [100], "base_lr": 0.001, "momentum": 0.9, "weight_decay": 0.004, "lr_policy": "fixed"}
_ALEXNET_SOLVER = {
    "test_iter": [1000],
    "test_interval": 1000,
    "base_lr": 0.01,
    "lr_policy": "step",
    "gamma": 0.1,
    "stepsize": 100000,
    "display": 20,
    "max_iter": 450000,
    "momentum": 0.9,
    "weight_decay": 0.0005,
    "snapshot": 10000,
}
_GOOGLENET_SOLVER = {
    "test_iter": [1000],
    "test_interval": 4000,
    "test_initialization": False,
    "display": 40,
    "average_loss": 40,
    "base_lr": 0.01,
    "lr_policy": "poly",
    "power": 0.5,
    "max_iter": 2400000,
    "momentum": 0.9,
    "weight_decay": 0.0002,
    "snapshot": 40000,
}
# The paper's batch of 256 images as 8 batches of 32.
_VGG_SOLVER = _ALEXNET_SOLVER | {"max_iter": 370000, "iter_size": 8}
_RESNET_SOLVER = {
    "test_iter": [1000],
    "test_interval": 5000,
    "test_initialization": False,
    "display": 20,
    "average_loss": 20,
    "base_lr": 0.1,
    "lr_policy": "multistep",
    "stepvalue": [300000, 450000],
    "gamma": 0.1,
    "max_iter": 600000,
    "iter_size": 8,
    "momentum": 0.9,
    "weight_decay": 0.0001,
    "snapshot": 10000,
}
_INCEPTION_SOLVER = {
    "type": "RMSProp",
    "test_iter": [1000],
    "test_interval": 10000,
    "test_initialization": False,
    "display": 40,
    "average_loss": 40,
    "base_lr": 0.045,
    "lr_policy": "step",
    "gamma": 0.94,
    "stepsize": 80000,
    "max_iter": 4000000,
    "rms_decay": 0.9,
    "delta": 1.0,
    "clip_gradients": 2.0,
    "weight_decay": 0.00004,
    "snapshot": 40000,
}

NETWORKS = {
    "cifar10_quick": Network(
        "CIFAR10_quick",
        cifar10_quick,
        **_CIFAR10,
        solver=_CIFAR10_SOLVER | {"test_interval": 500, "display": 100, "max_iter": 4000, "snapshot": 4000},
    ),
    "cifar10_full": Network(
        "CIFAR10_full",
        cifar10_full,
        **_CIFAR10,
        solver=_CIFAR10_SOLVER | {"test_interval": 1000, "display": 200, "max_iter": 60000, "snapshot": 10000},
    ),
    "alexnet": Network("AlexNet", alexnet, 227, 256, _ALEXNET_SOLVER, mean=_IMAGENET_MEAN),
    "caffenet": Network("CaffeNet", caffenet, 227, 256, _ALEXNET_SOLVER, mean=_IMAGENET_MEAN),
    "googlenet": Network("GoogleNet", googlenet, 224, 32, _GOOGLENET_SOLVER),
    "vgg19": Network("VGG_ILSVRC_19_layers", vgg19(1000), 224, 32, _VGG_SOLVER),
    "vgg19_22k": Network("VGG19-22K", vgg19(21841), 224, 32, _VGG_SOLVER, sources=_IMAGENET_22K),
    "resnet152": Network("ResNet-152", resnet152, 224, 32, _RESNET_SOLVER),
    "inception_v3": Network("Inception-V3", inception_v3, 299, 32, _INCEPTION_SOLVER),
}


def texts(folder: str) -> dict[str, str]:
    """Return the three files of a network."""
    network = NETWORKS[folder]
    messages = {
        "train_test": train_test(network),
        "solver": solver(network, folder),
        "deploy": deploy(network),
    }
    return {f"{name}.prototxt": text_format.MessageToString(message) for name, message in messages.items()}


def main() -> None:
    here = Path(__file__).parent
    for folder in NETWORKS:
        (here / folder).mkdir(exist_ok=True)
        for name, text in texts(folder).items():
            (here / folder / name).write_text(text)


if __name__ == "__main__":
    main()
