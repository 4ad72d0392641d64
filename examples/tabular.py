"""Tabular data: house prices from a table of numbers and categories, with Keras's `FeatureSpace`.

    python examples/tabular.py                  # all GPUs, or one CPU
    python examples/tabular.py --replicas 2     # two GPUs, or a CPU split in two

The houses are made by the script. The picture needs matplotlib: pip install matplotlib
"""

import argparse
import os

import keras
import numpy as np
import tensorflow as tf

import keras_multigpu as kmg

DISTRICTS = {"old town": 5.2, "harbour": 4.6, "park side": 3.9, "hill": 3.3, "north": 2.4}


def sold_homes(number):
    """A table of homes, a column for each property, and what they were sold for, in thousands."""
    random = np.random.default_rng(0)
    area = np.round(random.gamma(9, 11, number) + 20)
    homes = {
        "district": random.choice(list(DISTRICTS), number),
        "kind": random.choice(["house", "flat", "studio"], number),
        "rooms": np.clip(area // 28 + random.integers(0, 2, number), 1, 7).astype("int64"),
        "area": area.astype("float32"),
        "built": random.integers(1900, 2026, number).astype("float32"),
    }
    price = area * [DISTRICTS[name] for name in homes["district"]]
    price *= 1 - 0.3 * (2026 - homes["built"]) / 126
    # Flats at the harbour have the view.
    price *= np.where((homes["district"] == "harbour") & (homes["kind"] == "flat"), 1.5, 1)
    price *= random.lognormal(0, 0.08, number)
    return homes, price.astype("float32")[:, None]


# --8<-- [start:features]
def build_features():
    """How each column becomes numbers; `district` and `kind` also together, as a pair."""
    make = keras.utils.FeatureSpace
    return make(
        features={
            "district": make.string_categorical(num_oov_indices=1),
            "kind": make.string_categorical(num_oov_indices=1),
            "rooms": make.integer_categorical(num_oov_indices=1),
            "area": make.float_normalized(),
            "built": make.float_discretized(num_bins=10),
        },
        crosses=[make.cross(("district", "kind"), crossing_dim=32)],
        output_mode="concat",
    )


# --8<-- [end:features]


def build_model(encoded):
    """A small network, from an encoded row to a price."""
    x = keras.layers.Dense(64, activation="relu")(encoded)
    x = keras.layers.Dropout(0.1)(x)
    x = keras.layers.Dense(32, activation="relu")(x)
    return keras.Model(encoded, keras.layers.Dense(1)(x))


def draw(predicted, prices, path):
    """Each new home: what it was sold for, and what the model thinks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(prices, predicted, ".", color="#0b6e99", alpha=0.5)
    axes.axline((0, 0), slope=1, color="#d9822b", linewidth=1.5)
    axes.set(title="New homes", xlabel="sold for, in thousands", ylabel="predicted")
    axes.spines[["top", "right"]].set_visible(False)
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=100)
    os.replace(f"{path}.partial", path)


def main(epochs=15, replicas=None, picture="tabular.png"):
    """Train on most of the homes; returns R2 on the others."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)

    # --8<-- [start:data]
    homes, prices = sold_homes(2500)
    rows = tf.data.Dataset.from_tensor_slices((homes, prices))
    train, new = rows.take(2003), rows.skip(2003)
    features = build_features()
    features.adapt(train.map(lambda home, price: home))

    def batches(rows):
        # The CPU encodes while the replicas train.
        encoded = rows.batch(64).map(lambda home, price: (features(home), price))
        return encoded.prefetch(tf.data.AUTOTUNE)

    # --8<-- [end:data]

    # --8<-- [start:train]
    model = kmg.distribute(build_model(features.get_encoded_features()), strategy)
    metrics = ["mape", keras.metrics.R2Score(name="r2")]
    model.compile(keras.optimizers.Adam(0.01), "mae", metrics=metrics)
    model.fit(batches(train.shuffle(2003, seed=0)), epochs=epochs, verbose=2)
    scores = model.evaluate(batches(new), verbose=0, return_dict=True)
    # --8<-- [end:train]
    print(f"New homes: off by {scores['mape']:.1f} % on average, R2 {scores['r2']:.2f}.")

    # --8<-- [start:serve]
    price = model(features.get_encoded_features())
    keras.Model(features.get_inputs(), price).save("prices.keras")
    prices_of = keras.saving.load_model("prices.keras")  # Plain Keras, from raw columns.
    home = {"district": "harbour", "kind": "flat", "rooms": 3, "area": 90.0, "built": 1990.0}
    price = prices_of({name: tf.constant([[value]]) for name, value in home.items()})
    print(f"A flat of 90 square metres at the harbour: {float(price[0, 0]):.0f} thousand.")
    # --8<-- [end:serve]

    draw(model.predict(batches(new), verbose=0), prices[2003:], picture)
    print(f"See {picture}.")
    return scores["r2"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
