"""Softmax digits as in the old TensorFlow tutorials: placeholders, feed_dict, a saver."""

import argparse

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

tf.disable_v2_behavior()

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch", type=int, default=64)
args = parser.parse_args()

np.random.seed(1)
tf.set_random_seed(1)
digits = load_digits()
order = np.random.permutation(len(digits.data))
images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
train_images, train_labels, test_images, test_labels = images[:1500], labels[:1500], images[1500:], labels[1500:]


def weight(name, shape):
    return tf.get_variable(name, shape, initializer=tf.truncated_normal_initializer(stddev=0.1))


x = tf.placeholder(tf.float32, [None, 64], name="x")
y = tf.placeholder(tf.int64, [None], name="y")
keep = tf.placeholder_with_default(1.0, [], name="keep")
hidden = tf.nn.relu(tf.matmul(x, weight("w1", [64, 128])) + weight("b1", [128]))
logits = tf.matmul(tf.nn.dropout(hidden, keep_prob=keep), weight("w2", [128, 10])) + weight("b2", [10])
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
correct = tf.equal(tf.argmax(logits, 1), y)
accuracy = tf.reduce_mean(tf.cast(correct, tf.float32))

global_step = tf.train.get_or_create_global_step()
rate = tf.train.exponential_decay(0.2, global_step, 20, 0.9)
train_op = tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, global_step=global_step)
saver = tf.train.Saver()
writer = tf.summary.FileWriter("logs", tf.get_default_graph())
summary = tf.summary.scalar("loss", loss)

with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for step in range(args.steps):
        chosen = np.random.choice(1500, args.batch, replace=False)
        feed = {x: train_images[chosen], y: train_labels[chosen]}
        _, value, text = sess.run([train_op, loss, summary], feed_dict=feed)
        writer.add_summary(text, step)
        if step % 10 == 0:
            print(f"step {step}: loss {value:.4f}")
    path = saver.save(sess, "./model.ckpt", global_step=global_step)
    print("saved to", path)
writer.close()

with tf.Session() as sess:
    saver.restore(sess, tf.train.latest_checkpoint("."))
    score = sess.run(accuracy, feed_dict={x: test_images, y: test_labels})
    print(f"test accuracy {score:.3f} after {sess.run(global_step)} steps")
    np.savez("tf_digits_feed.npz", *sess.run(tf.trainable_variables()), accuracy=score)
