"""A small CNN with batch normalization: tf.data, hooks and a MonitoredTrainingSession."""

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

tf.disable_eager_execution()
tf.logging.set_verbosity(tf.logging.WARN)

BATCH, EPOCHS, FOLDER = 50, 2, "train"

if tf.gfile.Exists(FOLDER):
    tf.gfile.DeleteRecursively(FOLDER)
tf.gfile.MakeDirs(FOLDER)

digits = load_digits()
images = (digits.images[..., None] / 16).astype(np.float32)
labels = digits.target.astype(np.int64)


def batch_norm(x, name, training):
    with tf.variable_scope(name):
        channels = x.shape.as_list()[-1]
        scale = tf.get_variable("scale", [channels], initializer=tf.ones_initializer())
        offset = tf.get_variable("offset", [channels], initializer=tf.zeros_initializer())
        mean = tf.get_variable("mean", [channels], initializer=tf.zeros_initializer(), trainable=False)
        variance = tf.get_variable("variance", [channels], initializer=tf.ones_initializer(), trainable=False)
        if not training:
            return tf.nn.batch_normalization(x, mean, variance, offset, scale, 1e-3)
        x, batch_mean, batch_variance = tf.nn.fused_batch_norm(x, scale, offset)
        for average, value in ((mean, batch_mean), (variance, batch_variance)):
            tf.add_to_collection(tf.GraphKeys.UPDATE_OPS, tf.assign(average, 0.9 * average + 0.1 * value))
        return x


def network(x, training):
    with tf.variable_scope("network", reuse=tf.AUTO_REUSE):
        x = tf.nn.conv2d(x, tf.get_variable("conv1", [3, 3, 1, 16]), 1, "SAME")
        x = tf.nn.max_pool2d(tf.nn.relu(batch_norm(x, "bn1", training)), 2, 2, "SAME")
        x = tf.nn.conv2d(x, tf.get_variable("conv2", [3, 3, 16, 32]), 1, "SAME")
        x = tf.nn.relu(batch_norm(x, "bn2", training))
        x = tf.reshape(x, [-1, 4 * 4 * 32])
        bias = tf.get_variable("bias", [10], initializer=tf.zeros_initializer())
        return tf.matmul(x, tf.get_variable("dense", [512, 10])) + bias


dataset = tf.data.Dataset.from_tensor_slices((images[:1480], labels[:1480]))
dataset = dataset.shuffle(1480, seed=3).repeat(EPOCHS).batch(BATCH).prefetch(2)
features, targets = tf.data.make_one_shot_iterator(dataset).get_next()
loss = tf.losses.sparse_softmax_cross_entropy(targets, network(features, True))
global_step = tf.train.get_or_create_global_step()
optimizer = tf.train.AdamOptimizer(0.005)
gradients, variables = zip(*optimizer.compute_gradients(loss))
gradients, norm = tf.clip_by_global_norm(gradients, 5.0)
with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):
    train_op = optimizer.apply_gradients(zip(gradients, variables), global_step=global_step)

test_logits = network(tf.constant(images[1480:]), False)
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(test_logits, 1), labels[1480:]), tf.float32))
tf.summary.scalar("loss", loss)
averages = [v for v in tf.global_variables() if v.op.name.endswith(("/mean", "/variance"))]

hooks = [tf.train.LoggingTensorHook({"loss": loss, "step": global_step}, every_n_iter=10), tf.train.NanTensorHook(loss)]
with tf.train.MonitoredTrainingSession(checkpoint_dir=FOLDER, hooks=hooks, save_summaries_steps=5) as session:
    while not session.should_stop():
        _, step = session.run([train_op, global_step])
        if step % 10 == 0:
            score = session.run(accuracy)
            print(f"step {step}: test accuracy {score:.3f}")

with tf.Session() as session:
    tf.train.Saver().restore(session, tf.train.latest_checkpoint(FOLDER))
    score, steps, values = session.run([accuracy, global_step, averages])
    print(f"{steps} steps, test accuracy {score:.3f}")
    np.savez("tf_digits_monitored.npz", *values, accuracy=score, steps=steps)
