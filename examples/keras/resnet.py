"""A small Keras ResNet on handwritten digits; start it with ``poseidon run --nproc 2 examples/keras/resnet.py``.

Only the lines with ``poseidon`` in them are specific to Poseidon. The same script runs alone, and on any Keras backend
(KERAS_BACKEND=tensorflow, torch or jax).
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import poseidon.keras


def block(x: keras.KerasTensor, width: int, strides: int) -> keras.KerasTensor:
    shortcut = x
    if strides > 1 or x.shape[-1] != width:
        shortcut = layers.BatchNormalization()(layers.Conv2D(width, 1, strides, use_bias=False)(x))
    x = layers.BatchNormalization()(layers.Conv2D(width, 3, strides, padding="same", use_bias=False)(x))
    x = layers.Activation("relu")(x)
    x = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x))
    return layers.Activation("relu")(layers.add([x, shortcut]))


def build() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    x = layers.Activation("relu")(layers.BatchNormalization()(layers.Conv2D(16, 3, padding="same")(inputs)))
    for width, strides in ((16, 1), (32, 2), (64, 2)):
        x = block(x, width, strides)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def main() -> float:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args()

    keras.utils.set_random_seed(1)
    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digits))
    images, digits = images[order, :, None].reshape(-1, 8, 8, 1) / 16.0, digits[order]

    model = build()
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    # Normalised over the samples of all workers, the result is that of one worker with their batches in one.
    distributed = poseidon.keras.distribute(model, batch="total", sync_batchnorm=True)
    history = model.fit(
        images[:1500],
        digits[:1500],
        batch_size=64,
        epochs=options.epochs,
        validation_data=(images[1500:], digits[1500:]),
    )
    if distributed.rank == 0:
        print(distributed.summary())
    return history.history["val_accuracy"][-1]


if __name__ == "__main__":
    main()
