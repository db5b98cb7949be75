# A TensorFlow 2 loop of its own: a tape, a traced step, tf.data.
import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target
train = tf.data.Dataset.from_tensor_slices((x[:1500], y[:1500])).shuffle(1500).batch(50)
test = tf.data.Dataset.from_tensor_slices((x[1500:], y[1500:])).batch(100)

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
optimizer = keras.optimizers.Adam(0.005)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


batches = 0
for epoch in range(2):
    for images, labels in train:
        loss = step(images, labels)
        batches += 1
    correct = sum(int(tf.reduce_sum(tf.cast(tf.argmax(model(a), 1) == b, tf.int32))) for a, b in test)
    print(f"epoch {epoch}: accuracy {correct / 297:.3f}")
np.savez("tf2_loop.npz", *model.get_weights(), accuracy=correct / 297, batches=batches)
