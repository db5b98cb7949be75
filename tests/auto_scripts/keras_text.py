# Which of two languages is a text in? A model of its words with a large embedding, fed by tf.data.
import numpy as np
import tensorflow as tf
from tensorflow import keras

WORDS, LENGTH = 2000, 12

tf.random.set_seed(1)
rng = np.random.default_rng(1)
y = rng.integers(0, 2, 1200)
common = rng.integers(0, WORDS, (1200, LENGTH))
special = rng.integers(0, WORDS // 2, (1200, LENGTH)) + (y * WORDS // 2)[:, None]
x = np.where(rng.random((1200, LENGTH)) < 0.3, special, common)

train = tf.data.Dataset.from_tensor_slices((x[:1000], y[:1000])).shuffle(1000).batch(40).prefetch(2)
test = tf.data.Dataset.from_tensor_slices((x[1000:], y[1000:])).batch(50)

inputs = keras.Input((LENGTH,), dtype="int32")
hidden = keras.layers.Embedding(WORDS, 32)(inputs)
hidden = keras.layers.GlobalAveragePooling1D()(hidden)
hidden = keras.layers.Dropout(0.1)(hidden)
outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model(inputs, outputs)
model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
model.optimizer.learning_rate = 0.02
model.fit(train, epochs=3, validation_data=test, verbose=2)
_, accuracy = model.evaluate(test, verbose=0)
print(f"accuracy {accuracy:.3f}")
np.savez("keras_text.npz", *model.get_weights(), accuracy=accuracy)
