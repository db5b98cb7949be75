from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from poseidon import zoo
from poseidon.errors import ConfigError

PARAMETERS = {
    "lenet": 431_080,
    "cifar10-quick": 145_578,
    "alexnet": 61_100_840,
    "googlenet": 6_624_904,
    "inception-v3": 23_834_568,
    "vgg19": 143_667_240,
    "vgg19-22k": 229_052_817,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "gpt2": 124_439_808,
    "dlrm": 51_538_241,
    "ladder": 15_000_000,
}

# Published multiply-adds per image, in 1e9. Unlike parameter counts they notice a wrong stride or padding.
GIGA_MULTIPLY_ADDS = {
    "alexnet": 0.71,
    "googlenet": 1.50,
    "inception-v3": 5.71,
    "vgg19": 19.63,
    "resnet18": 1.81,
    "resnet50": 4.09,
    "resnet152": 11.51,
}

OUTPUT_SHAPES = {
    "lenet": (2, 10),
    "cifar10-quick": (2, 10),
    "vgg19-22k": (2, 21841),
    "gpt2": (2, 1024, 50257),
    "dlrm": (2,),
    "ladder": (2, 1500),
}

each_network = pytest.mark.parametrize("name", zoo.names())


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@functools.cache
def build_meta(name: str) -> zoo.Network:
    with torch.device("meta"):
        return zoo.build(name)


def test_names_are_the_published_networks():
    assert zoo.names() == tuple(PARAMETERS)


@each_network
def test_full_size_has_the_published_number_of_parameters(name):
    assert count_parameters(build_meta(name).model) == PARAMETERS[name]


@pytest.mark.parametrize("name", GIGA_MULTIPLY_ADDS)
def test_full_size_does_the_published_number_of_multiply_adds(name):
    network = copy.deepcopy(build_meta(name))
    inputs, _ = network.batch(1, device="meta")
    network.model.eval()
    with FlopCounterMode(display=False) as counter:
        network.model(*inputs)
    assert counter.get_total_flops() / 2e9 == pytest.approx(GIGA_MULTIPLY_ADDS[name], abs=0.01)


@each_network
def test_full_size_fits_its_own_batch(name):
    network = build_meta(name)
    inputs, targets = network.batch(2, device="meta")
    outputs = network.model(*inputs)
    assert outputs.shape == OUTPUT_SHAPES.get(name, (2, 1000))
    assert network.loss(outputs, targets).shape == ()


@each_network
def test_tiny_has_the_layers_of_the_full_size(name):
    full, tiny = build_meta(name).model, zoo.build(name, tiny=True).model
    assert [type(module) for module in tiny.modules()] == [type(module) for module in full.modules()]
    assert list(tiny.state_dict()) == list(full.state_dict())
    assert count_parameters(tiny) <= 200_000


@each_network
@pytest.mark.parametrize("size", [1, 4])
def test_tiny_gives_a_gradient_to_every_parameter(name, size):
    torch.manual_seed(0)
    network = zoo.build(name, tiny=True)
    inputs, targets = network.batch(size)
    loss = network.loss(network.model(*inputs), targets)
    loss.backward()
    assert loss.shape == ()
    assert math.isfinite(loss.item())
    for parameter_name, parameter in network.model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        # A single sample may well silence a whole ReLU layer of two channels.
        assert size == 1 or parameter.grad.count_nonzero() > 0, parameter_name


@each_network
def test_tiny_can_be_trained(name):
    torch.manual_seed(0)
    network = zoo.build(name, tiny=True, dropout=0.0)
    optimizer = torch.optim.Adam(network.model.parameters(), lr=1e-3)
    inputs, targets = network.batch(4)
    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = network.loss(network.model(*inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@each_network
def test_loss_is_a_mean_over_samples(name):
    network = zoo.build(name, tiny=True)
    network.model.eval()
    inputs, targets = network.batch(4)
    with torch.no_grad():
        outputs = network.model(*inputs)
        halves = [network.loss(outputs[part], targets[part]) for part in (slice(2), slice(2, 4))]
        whole = network.loss(outputs, targets)
    torch.testing.assert_close(sum(halves) / 2, whole)


@each_network
def test_batches_depend_on_the_seed_alone(name):
    network = zoo.build(name, tiny=True)
    torch.manual_seed(1)
    inputs, targets = network.batch(8, seed=3)
    torch.manual_seed(2)
    same_inputs, same_targets = network.batch(8, seed=3)
    assert all(torch.equal(one, other) for one, other in zip(inputs, same_inputs, strict=True))
    assert torch.equal(targets, same_targets)
    other_inputs, _ = network.batch(8, seed=4)
    assert not any(torch.equal(one, other) for one, other in zip(inputs, other_inputs, strict=True))


@each_network
def test_every_tensor_of_a_batch_has_the_samples_first(name):
    inputs, targets = zoo.build(name, tiny=True).batch(3)
    assert [len(tensor) for tensor in (*inputs, targets)] == [3] * (len(inputs) + 1)


@each_network
def test_without_dropout_training_passes_repeat_exactly(name):
    network = zoo.build(name, tiny=True, dropout=0.0)
    twin = copy.deepcopy(network.model)
    inputs, _ = network.batch(4)
    with torch.no_grad():
        assert torch.equal(network.model(*inputs), twin(*inputs))


@pytest.mark.parametrize("name", ["alexnet", "googlenet", "inception-v3", "vgg19", "gpt2"])
def test_original_dropout_makes_training_passes_differ(name):
    network = zoo.build(name, tiny=True)
    twin = copy.deepcopy(network.model)
    inputs, _ = network.batch(4)
    with torch.no_grad():
        assert not torch.equal(network.model(*inputs), twin(*inputs))


def test_gpt2_ties_the_output_projection_to_the_embedding():
    model = zoo.build("gpt2", tiny=True).model
    assert model.get_parameter("head.weight") is model.get_parameter("tokens.weight")


def test_gpt2_sees_no_future():
    network = zoo.build("gpt2", tiny=True, dropout=0.0)
    (tokens,), _ = network.batch(1)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 7
    with torch.no_grad():
        before, after = network.model(tokens), network.model(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


SMALLEST_IMAGES = {
    "lenet": 13,
    "cifar10-quick": 8,
    "alexnet": 63,
    "googlenet": 15,
    "inception-v3": 75,
    "vgg19": 32,
    "resnet50": 1,
}


@pytest.mark.parametrize("extra", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SMALLEST_IMAGES)
def test_images_may_have_another_size(name, extra):
    image_size = SMALLEST_IMAGES[name] + extra
    network = zoo.build(name, tiny=True, image_size=image_size)
    inputs, _ = network.batch(2)
    assert inputs[0].shape[-2:] == (image_size, image_size)
    assert network.model(*inputs).shape == (2, 10)


@pytest.mark.parametrize("name", SMALLEST_IMAGES)
def test_images_too_small_are_refused(name):
    smallest = SMALLEST_IMAGES[name]
    with pytest.raises(ConfigError, match=f"image_size={smallest - 1}: {name} needs at least {smallest}"):
        zoo.build(name, tiny=True, image_size=smallest - 1)


def test_width_and_classes_change_the_sizes():
    network = zoo.build("resnet18", width=0.25, classes=7)
    layer = network.model.get_submodule("0")
    assert isinstance(layer, nn.Conv2d)
    assert layer.out_channels == 16
    assert network.model(*network.batch(1)[0]).shape == (1, 7)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"unknown network 'resnet51'; did you mean 'resnet50'\? known: alexnet, .*resnet50"
    ):
        zoo.build("resnet51")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("lenet", {"width": 0.0}, "width=0.0: expected a positive number"),
        ("lenet", {"width": math.nan}, "width=nan: expected a positive number"),
        ("vgg19", {"dropout": 1.0}, "dropout=1.0: expected a probability"),
        ("resnet18", {"dropout": 0.5}, "resnet18 has no dropout layers"),
        ("vgg19", {"classes": 1}, "classes=1: vgg19 needs at least 2"),
        ("gpt2", {"image_size": 32}, "image_size=32: gpt2 reads no images"),
        ("dlrm", {"classes": 10}, "classes=10: dlrm reads no images"),
    ],
)
def test_arguments_that_cannot_work_are_refused(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        zoo.build(name, tiny=True, **arguments)
