# Keras in half precision, and steps one by one on a model with dropout and moving averages.
import keras
import numpy as np
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target

keras.mixed_precision.set_global_policy("mixed_float16")
half = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
half.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
half.fit(x[:600], y[:600], batch_size=60, verbose=0)
rate = float(half.optimizer.learning_rate)

keras.mixed_precision.set_global_policy("float32")
layers = [keras.layers.Dense(32), keras.layers.Dropout(0.3), keras.layers.BatchNormalization(), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input((64,)), *layers])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
for start in range(0, 600, 60):
    model.train_on_batch(x[start : start + 60], y[start : start + 60])
loss, accuracy = model.evaluate(x[1500:], y[1500:], verbose=0)
print(f"rate {rate:.3f}, loss {loss:.7f}", flush=True)
np.savez("keras_steps.npz", rate=rate, loss=loss)
