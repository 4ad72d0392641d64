"""keras-hub: a small GPT-2 learns winter's weather reports, and adapts to summer with LoRA.

    pip install keras-hub
    python examples/hub_model.py                  # all GPUs, or one CPU
    python examples/hub_model.py --replicas 2     # two GPUs, or a CPU split in two

It begins with random weights, and nothing is downloaded. The reports are made by the script.
"""

import argparse
import random

import keras

import keras_multigpu as kmg

LENGTH = 40
SEASONS = {
    "winter": (["snow", "sleet", "fog"], -9, 9),
    "summer": (["sun", "haze", "storm"], 15, 39),
}


def write_report(season):
    """Such as `Monday in Oslo: sleet, 3 degrees.`."""
    weather, coldest, warmest = SEASONS[season]
    day, city = random.choice(["Monday", "Friday", "Sunday"]), random.choice(["Oslo", "Kyiv"])
    degrees = random.randint(coldest, warmest)
    return f"{day} in {city}: {random.choice(weather)}, {degrees} degrees."


# --8<-- [start:data]
def tokens(texts):
    """What `fit` takes: all bytes but the last, the next of each, and 0 for padding's weight."""
    import keras_hub

    ids = keras_hub.tokenizers.ByteTokenizer(sequence_length=LENGTH + 1)(texts)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    x = {"token_ids": inputs, "padding_mask": inputs > 0}
    return x, targets, (targets > 0).astype("float32")


# --8<-- [end:data]


# --8<-- [start:model]
def build_model(lora=False):
    """GPT-2 as keras-hub has it, but small and untrained; its text comes as `tokens`."""
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=256,
        num_layers=1,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=LENGTH,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    if lora:
        model.backbone.enable_lora(rank=4)
    return compiled(model)


def compiled(model):
    """The model, compiled: also after `enable_lora`, which changes what trains."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.005), loss, weighted_metrics=["accuracy"])
    return model


# --8<-- [end:model]


def finished(model, beginning):
    """The report that the model makes of its first words."""
    prompt, _, _ = tokens([beginning])
    ids = model.generate(prompt, stop_token_ids=[ord(".")])["token_ids"][0]
    return bytes(int(number) for number in ids if number).decode()


def main(epochs=12, replicas=None):
    """Train on winter, adapt to summer; returns how many of summer's next letters are right."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    random.seed(0)
    keras.utils.set_random_seed(0)

    # --8<-- [start:verify]
    winter = tokens([write_report("winter") for _ in range(301)])
    summer = tokens([write_report("summer") for _ in range(301)])
    kmg.verify(lambda: build_model(lora=True), winter, replicas=(2,), steps=4)
    # --8<-- [end:verify]

    # --8<-- [start:train]
    model = compiled(kmg.distribute(build_model(), strategy))
    x, y, weights = winter
    model.fit(x, y, sample_weight=weights, epochs=epochs, verbose=2)
    print(finished(model, "Friday in Oslo:"))
    # --8<-- [end:train]

    # --8<-- [start:adapt]
    model.backbone.enable_lora(rank=4)
    compiled(model)
    x, y, weights = summer
    before = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    model.fit(x, y, sample_weight=weights, epochs=epochs, verbose=2)
    after = model.evaluate(x, y, sample_weight=weights, verbose=0, return_dict=True)
    print(finished(model, "Friday in Oslo:"))
    # --8<-- [end:adapt]
    trained = sum(weight.shape.num_elements() for weight in model.trainable_weights)
    print(f"Trained {trained:,} of {model.count_params():,} weights;", end=" ")
    print(f"loss on summer {before['loss']:.2f} before, {after['loss']:.2f} after.")
    return after["accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
