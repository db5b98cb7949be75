# Digits with Keras: arrays, callbacks, the best weights kept.
import json

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

keras.utils.set_random_seed(0)
digits = load_digits()
images = (digits.images[..., None] / 16).astype("float32")
x_train, y_train = images[:1500], digits.target[:1500]
x_test, y_test = images[1500:], digits.target[1500:]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(16, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(),
        layers.Flatten(),
        layers.Dense(64, activation="relu"),
        layers.Dense(10),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(0.003),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    keras.callbacks.EarlyStopping(patience=2, monitor="val_loss"),
    keras.callbacks.ModelCheckpoint("best.weights.h5", save_best_only=True, save_weights_only=True),
    keras.callbacks.CSVLogger("history.csv"),
]
history = model.fit(x_train, y_train, batch_size=60, epochs=3, validation_split=0.1, callbacks=callbacks, verbose=2)
model.load_weights("best.weights.h5")
loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"test accuracy {accuracy:.3f}")

model.save("digits.keras")
again = keras.models.load_model("digits.keras")
assert np.allclose(again.predict(x_test[:5], verbose=0), model.predict(x_test[:5], verbose=0), atol=1e-5)
np.savez("keras_digits.npz", *model.get_weights(), accuracy=accuracy)
with open("history.json", "w") as file:
    json.dump({name: [float(value) for value in values] for name, values in history.history.items()}, file)
