"""A convolutional network for CIFAR-10 in the style of TensorFlow 1: one device, a graph and a session.

python cifar10.py --steps 200                                          # on one device
poseidon run --nproc 2 --auto cifar10.py --steps 200                   # on two workers of this machine
psd_run -c cluster.json -o logs "python cifar10.py --steps 200"        # on the machines of cluster.json

With --data FOLDER it reads CIFAR-10's Python files (cifar-10-batches-py); without, it makes pictures of the same shape.
"""

import argparse
import pickle
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

CROP, CLASSES = 24, 10


def read_pictures(folder):
    """Return training and test pictures with their labels."""
    parts = []
    for pattern in ("data_batch_*", "test_batch"):
        files = [pickle.loads(path.read_bytes(), encoding="bytes") for path in sorted(Path(folder).glob(pattern))]
        pictures = np.concatenate([file[b"data"] for file in files]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        parts.append((pictures, np.concatenate([file[b"labels"] for file in files]).astype(np.int32)))
    return parts


def make_pictures(count, rng):
    """Return noisy stripes; their direction and colour determine the class."""
    labels = rng.integers(0, CLASSES, count).astype(np.int32)
    angle, phase = labels * np.pi / CLASSES, rng.uniform(0, 2 * np.pi, count)
    y, x = np.mgrid[0:32, 0:32] / 4
    waves = np.sin(np.cos(angle)[:, None, None] * x + np.sin(angle)[:, None, None] * y + phase[:, None, None])
    colours = 1 + np.eye(3)[labels % 3]
    pictures = 128 + 30 * waves[..., None] * colours[:, None, None, :] + rng.normal(0, 20, (count, 32, 32, 3))
    return np.clip(pictures, 0, 255).astype(np.uint8), labels


def distort(picture, label):
    """Return a random crop, perhaps mirrored, with other brightness and contrast."""
    picture = tf.image.random_crop(tf.cast(picture, tf.float32), [CROP, CROP, 3])
    picture = tf.image.random_brightness(tf.image.random_flip_left_right(picture), 63)
    return tf.image.per_image_standardization(tf.image.random_contrast(picture, 0.2, 1.8)), label


def variable(name, shape, deviation, decay=0.0):
    made = tf.get_variable(name, shape, initializer=tf.truncated_normal_initializer(stddev=deviation))
    if decay:
        tf.add_to_collection("losses", decay * tf.nn.l2_loss(made))
    return made


def network(x):
    """Return the logits: two convolutions, two large layers that hold most of the parameters, and a linear one."""
    for name, inputs in (("conv1", 3), ("conv2", 64)):
        with tf.variable_scope(name):
            kernel = variable("weights", [5, 5, inputs, 64], 0.05)
            biases = tf.get_variable("biases", [64], initializer=tf.constant_initializer(0.1))
            x = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), biases))
            x = tf.nn.lrn(tf.nn.max_pool2d(x, 3, 2, "SAME"), 4, bias=1.0, alpha=0.001 / 9.0, beta=0.75)
    x = tf.reshape(x, [-1, 6 * 6 * 64])
    for name, inputs, outputs in (("local3", 2304, 384), ("local4", 384, 192)):
        with tf.variable_scope(name):
            biases = tf.get_variable("biases", [outputs], initializer=tf.constant_initializer(0.1))
            x = tf.nn.relu(tf.matmul(x, variable("weights", [inputs, outputs], 0.04, decay=0.004)) + biases)
    with tf.variable_scope("softmax"):
        biases = tf.get_variable("biases", [CLASSES], initializer=tf.zeros_initializer())
        return tf.matmul(x, variable("weights", [192, CLASSES], 1 / 192)) + biases


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--data", help="folder of CIFAR-10's Python files")
    parser.add_argument("--folder", default="cifar10_train", help="where checkpoints and summaries go")
    args = parser.parse_args()

    tf.disable_eager_execution()
    rng = np.random.default_rng(0)
    (pictures, labels), (test_pictures, test_labels) = (
        read_pictures(args.data) if args.data else (make_pictures(5000, rng), make_pictures(500, rng))
    )
    train = tf.data.Dataset.from_tensor_slices((pictures, labels)).shuffle(len(pictures)).repeat()
    train = train.map(distort, num_parallel_calls=2).batch(args.batch, drop_remainder=True).prefetch(2)
    inputs, targets = tf.data.make_one_shot_iterator(train).get_next()
    with tf.variable_scope("network"):
        logits = network(inputs)
    entropy = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=logits))
    loss = entropy + tf.add_n(tf.get_collection("losses"))
    tf.summary.scalar("loss", loss)

    step = tf.train.get_or_create_global_step()
    rate = tf.train.exponential_decay(0.05, step, 1000, 0.5, staircase=True)
    update = tf.train.GradientDescentOptimizer(rate).minimize(loss, global_step=step)
    averages = tf.train.ExponentialMovingAverage(0.99, step)
    with tf.control_dependencies([update]):
        train_op = averages.apply(tf.trainable_variables())

    picture = tf.placeholder(tf.float32, [None, 32, 32, 3])
    centre = tf.image.resize_with_crop_or_pad(picture, CROP, CROP)
    with tf.variable_scope("network", reuse=True):
        guesses = tf.argmax(network(tf.image.per_image_standardization(centre)), 1)

    hooks = [tf.train.StopAtStepHook(last_step=args.steps)]
    with tf.train.MonitoredTrainingSession(checkpoint_dir=args.folder, hooks=hooks) as session:
        while not session.should_stop():
            _, value, number = session.run([train_op, loss, step])
            if number % 20 == 0:
                print(f"step {number}: loss {value:.3f}", flush=True)
    with tf.Session() as session:
        tf.train.Saver().restore(session, tf.train.latest_checkpoint(args.folder))
        found = session.run(guesses, {picture: test_pictures})
        print(f"{session.run(step)} steps, test accuracy {np.mean(found == test_labels):.3f}")


if __name__ == "__main__":
    main()
