"""Large networks in the style of TensorFlow 1, on made-up pictures: Inception-V3, VGG19, VGG19-22K, ResNet-152.

python networks.py vgg19 --steps 10                                             # on one device
psd_run -c cluster.json -o logs "python networks.py vgg19 --steps 10"           # on the machines of cluster.json

Plain graphs and sessions, so nothing but TensorFlow is needed. --width and --size make a network small enough to try.
With batch normalisation (Inception, ResNet), POSEIDON_SYNC_BATCHNORM=1 gives the results of one device.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf


class Builder:
    """Adds layers to the graph; ``width`` is the part of the published number of channels."""

    def __init__(self, width):
        self.width = width
        self.layers = 0

    def scope(self, name):
        """Return a scope for the variables of the next layer."""
        self.layers += 1
        return tf.variable_scope(f"{name}{self.layers}")

    def channels(self, count):
        """Return how many of the published channels there are."""
        return max(1, round(count * self.width))

    def weights(self, shape, fan_in):
        """Return the weights of a layer."""
        start = tf.truncated_normal_initializer(stddev=(2 / fan_in) ** 0.5, seed=self.layers)
        return tf.get_variable("weights", shape, initializer=start)

    def biases(self, count):
        """Return the biases of a layer."""
        return tf.get_variable("biases", [count], initializer=tf.zeros_initializer())

    def conv(self, x, outputs, size, stride=1, padding="SAME", normalize=True, relu=True):
        """Return a convolution with batch normalisation, or with biases."""
        height, width = size if isinstance(size, tuple) else (size, size)
        inputs, outputs = x.shape.as_list()[-1], self.channels(outputs)
        with self.scope("conv"):
            kernel = self.weights([height, width, inputs, outputs], height * width * inputs)
            x = tf.nn.conv2d(x, kernel, stride, padding)
            x = self.normalize(x) if normalize else tf.nn.bias_add(x, self.biases(outputs))
        return tf.nn.relu(x) if relu else x

    def normalize(self, x, momentum=0.9):
        """Normalize by the moments of the batch, and keep moving averages of them."""
        count = x.shape.as_list()[-1]
        scale = tf.get_variable("scale", [count], initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", [count], initializer=tf.zeros_initializer())
        mean, variance = tf.nn.moments(x, [0, 1, 2])
        for name, value, start in (("mean", mean, 0.0), ("variance", variance, 1.0)):
            moving = tf.get_variable(name, [count], initializer=tf.constant_initializer(start), trainable=False)
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign_sub(moving, (1 - momentum) * (moving - value)))
        return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)

    def dense(self, x, outputs, relu=False):
        """Return a layer in which everything is connected."""
        inputs = x.shape.as_list()[-1]
        with self.scope("dense"):
            x = tf.matmul(x, self.weights([inputs, outputs], inputs)) + self.biases(outputs)
        return tf.nn.relu(x) if relu else x


def vgg19(net, x, classes):
    for depth, count in ((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)):
        for _ in range(depth):
            x = net.conv(x, count, 3, normalize=False)
        x = tf.nn.max_pool2d(x, 2, 2, "VALID")
    x = tf.reshape(x, [-1, int(np.prod(x.shape.as_list()[1:]))])
    for _ in range(2):
        x = net.dense(x, net.channels(4096), relu=True)
    return net.dense(x, classes)


def resnet152(net, x, classes):
    x = tf.nn.max_pool2d(net.conv(x, 64, 7, 2), 3, 2, "SAME")
    for stage, (depth, count) in enumerate(((3, 64), (8, 128), (36, 256), (3, 512))):
        for block in range(depth):
            stride = 2 if block == 0 and stage else 1
            shortcut = net.conv(x, 4 * count, 1, stride, relu=False) if block == 0 else x
            inner = net.conv(net.conv(x, count, 1), count, 3, stride)
            x = tf.nn.relu(shortcut + net.conv(inner, 4 * count, 1, relu=False))
    return net.dense(tf.reduce_mean(x, [1, 2]), classes)


def inception3(net, x, classes):
    def average(x):
        return tf.nn.avg_pool2d(x, 3, 1, "SAME")

    def halve(x):
        return tf.nn.max_pool2d(x, 3, 2, "VALID")

    def chain(x, *layers):
        for count, size in layers:
            x = net.conv(x, count, size)
        return x

    def fork(x, count):
        return [net.conv(x, count, (1, 3)), net.conv(x, count, (3, 1))]

    x = net.conv(net.conv(net.conv(x, 32, 3, 2, "VALID"), 32, 3, 1, "VALID"), 64, 3)
    x = halve(net.conv(net.conv(halve(x), 80, 1), 192, 3, 1, "VALID"))
    for pooled in (32, 64, 64):
        branches = [chain(x, (64, 1)), chain(x, (48, 1), (64, 5)), chain(x, (64, 1), (96, 3), (96, 3))]
        x = tf.concat([*branches, net.conv(average(x), pooled, 1)], 3)
    inner = net.conv(chain(x, (64, 1), (96, 3)), 96, 3, 2, "VALID")
    x = tf.concat([net.conv(x, 384, 3, 2, "VALID"), inner, halve(x)], 3)
    for count in (128, 160, 160, 192):
        once = chain(x, (count, 1), (count, (1, 7)), (192, (7, 1)))
        twice = chain(x, (count, 1), (count, (7, 1)), (count, (1, 7)), (count, (7, 1)), (192, (1, 7)))
        x = tf.concat([chain(x, (192, 1)), once, twice, net.conv(average(x), 192, 1)], 3)
    first = net.conv(net.conv(x, 192, 1), 320, 3, 2, "VALID")
    second = net.conv(chain(x, (192, 1), (192, (1, 7)), (192, (7, 1))), 192, 3, 2, "VALID")
    x = tf.concat([first, second, halve(x)], 3)
    for _ in range(2):
        forks = [*fork(net.conv(x, 384, 1), 384), *fork(chain(x, (448, 1), (384, 3)), 384)]
        x = tf.concat([net.conv(x, 320, 1), *forks, net.conv(average(x), 192, 1)], 3)
    return net.dense(tf.reduce_mean(x, [1, 2]), classes)


NETWORKS = {
    "inception3": (inception3, 299, 1000),
    "vgg19": (vgg19, 224, 1000),
    "vgg19-22k": (vgg19, 224, 21841),
    "resnet152": (resnet152, 224, 1000),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="pictures in a step, of all workers together")
    parser.add_argument("--size", type=int, help="height and width of a picture; default: as published")
    parser.add_argument("--classes", type=int, help="default: as published")
    parser.add_argument("--width", type=float, default=1.0, help="part of the published number of channels")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--losses", type=Path, help="file for the losses and the number of parameters, as JSON")
    args = parser.parse_args()

    tf.disable_eager_execution()
    build, size, classes = NETWORKS[args.network]
    size, classes = args.size or size, args.classes or classes
    pictures, labels = tf.placeholder(tf.float32, [None, size, size, 3]), tf.placeholder(tf.int64, [None])
    logits = build(Builder(args.width), pictures, classes)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    parameters = sum(int(np.prod(variable.shape.as_list())) for variable in tf.trainable_variables())
    print(f"{args.network}: {parameters:,} parameters, pictures of {size} x {size}, {classes} classes", flush=True)
    with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
        train = tf.train.MomentumOptimizer(args.rate, 0.9).minimize(loss)

    rng, losses = np.random.default_rng(0), []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for step in range(args.steps):
            batch = rng.normal(size=(args.batch, size, size, 3)).astype(np.float32)
            feeds = {pictures: batch, labels: rng.integers(0, classes, args.batch)}
            losses.append(float(session.run([train, loss], feeds)[1]))
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
    if args.losses:
        args.losses.write_text(json.dumps({"parameters": parameters, "losses": losses}))


if __name__ == "__main__":
    main()
