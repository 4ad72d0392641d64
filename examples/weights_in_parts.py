"""Weights in parts: a transformer that no device holds whole, trained, then adapted with LoRA.

    python examples/weights_in_parts.py                  # all GPUs, or one CPU
    python examples/weights_in_parts.py --replicas 2     # two GPUs, or a CPU split in two
    python examples/weights_in_parts.py --preset gemma3_1b    # with keras-hub and a network

Without a preset it begins with random weights, and nothing is downloaded. The sentences are drawn
by the script.
"""

import argparse

import keras
import numpy as np

import keras_multigpu as kmg

LETTERS, LENGTH, WIDTH, BATCH = 256, 24, 256, 32
ANIMALS = ["cat", "dog", "owl", "fox"]


def sentences(number, verb, seed):
    """Draw lines such as `the cat sees the owl`."""
    pairs = np.random.default_rng(seed).choice(ANIMALS, (number, 2))
    return [f"the {one} {verb} the {other}." for one, other in pairs]


def letters(lines):
    """The letters of each line, the next of each, and equal weights for all."""
    rows = np.array([list(line.ljust(LENGTH + 1).encode()) for line in lines])
    return rows[:, :-1], rows[:, 1:], np.ones((len(rows), LENGTH))


# --8<-- [start:model]
def build_model(blocks=2):
    """A decoder: each letter sees those before it."""
    letters = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(LETTERS, WIDTH)(letters)
    for _ in range(blocks):
        seen = keras.layers.LayerNormalization()(x)
        attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=WIDTH // 4)
        x += attention(seen, seen, use_causal_mask=True)
        inner = keras.layers.LayerNormalization()(x)
        inner = keras.layers.Dense(4 * WIDTH, activation="gelu")(inner)
        x += keras.layers.Dense(WIDTH)(inner)
    return keras.Model(letters, keras.layers.Dense(LETTERS)(keras.layers.LayerNormalization()(x)))


# --8<-- [end:model]


# --8<-- [start:lora]
def enable_lora(model, rank=8):
    """Freeze all weights, and give what has large ones two narrow kernels to train beside them."""
    for layer in model.layers:
        layer.trainable = False
        is_attention = isinstance(layer, keras.layers.MultiHeadAttention)
        for part in (layer.query_dense, layer.value_dense) if is_attention else (layer,):
            if hasattr(part, "enable_lora"):
                part.trainable = True
                part.enable_lora(rank)


# --8<-- [end:lora]


def train(model, data, epochs):
    """Compile, also after `enable_lora`, which changes what trains; tell what is held, and fit."""
    x, y, weights = data
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    trained = sum(weight.shape.num_elements() for weight in model.trainable_weights)
    size = model.count_params() * 4 / 2**20
    print(f"Trains {trained:,} of {model.count_params():,} weights, {size:.1f} MiB in all.")
    batch = keras.tree.map_structure(lambda part: part[:BATCH], (x, y))
    for device in kmg.memory(model, batch).devices:
        held = device.weights / 2**20, device.optimizer / 2**20
        print("{}: {:.1f} MiB of weights, {:.1f} MiB of the optimizer".format(device.device, *held))
    model.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=epochs, verbose=2)


def main(epochs=6, replicas=None, preset=None):
    """Train on one verb, adapt to another; returns how many next letters of it are right."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)

    # --8<-- [start:train]
    # Keras would make the weights on the first GPU, and all of them.
    with keras.device("cpu"):
        if preset is None:
            model, tokens = build_model(), letters
        else:
            import keras_hub

            model = keras_hub.models.CausalLM.from_preset(preset, preprocessor=None)
            preprocessor = keras_hub.models.CausalLMPreprocessor
            tokens = preprocessor.from_preset(preset, sequence_length=LENGTH)
    model = kmg.distribute(model, strategy, shard="weights")
    train(model, tokens(sentences(512, "sees", seed=1)), epochs)
    # --8<-- [end:train]

    # --8<-- [start:adapt]
    if preset is None:
        enable_lora(model)
    else:
        model.backbone.enable_lora(rank=8)
    train(model, tokens(sentences(512, "fears", seed=2)), epochs)
    # --8<-- [end:adapt]
    x, y, weights = tokens(sentences(64, "fears", seed=3))
    return model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    parser.add_argument("--preset", help="a model of keras-hub, or the folder of one")
    main(**vars(parser.parse_args()))
