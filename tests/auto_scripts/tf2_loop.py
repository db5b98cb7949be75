# A TensorFlow 2 loop of its own: a tape, a traced step, tf.data, metrics, checkpoints and summaries.
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target
train = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500])).shuffle(1500).batch(50)
test = tf.data.Dataset.from_tensor_slices((x[1500:], y[1500:])).batch(100)

hidden = keras.layers.Dense(64, activation="relu")
model = keras.Sequential([keras.Input((64,)), hidden, keras.layers.BatchNormalization(), keras.layers.Dense(10)])
seen, learned = keras.metrics.Sum(), keras.metrics.SparseCategoricalAccuracy()
manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), "checkpoints", max_to_keep=1)
writer = tf.summary.create_file_writer("events")
optimizer = keras.optimizers.Adam(0.005)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_function(labels, logits)
    seen.update_state(tf.ones_like(labels))
    learned.update_state(labels, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


batches = 0
for epoch in range(2):
    for images, labels in train:
        loss = step(images, labels)
        batches += 1
    correct = sum(int(tf.reduce_sum(tf.cast(tf.argmax(model(a), 1) == b, tf.int32))) for a, b in test)
    print(f"epoch {epoch}: accuracy {correct / 297:.3f}, in training {float(learned.result()):.3f}")
    manager.save()
    with writer.as_default():
        tf.summary.write("accuracy", correct / 297, step=epoch)
after = model.get_weights()
hidden.bias.assign(tf.zeros(64))
tf.train.Checkpoint(model=model).restore(manager.latest_checkpoint)
is_restored = all(np.array_equal(one, other) for one, other in zip(after, model.get_weights()))
counts = {"batches": batches, "seen": float(seen.result()), "restored": is_restored}
np.savez("tf2_loop.npz", *after, accuracy=correct / 297, **counts)
