"""Text: a small transformer reads support tickets and finds the team that has to answer.

    python examples/text_classification.py                  # all GPUs, or one CPU
    python examples/text_classification.py --replicas 2     # two GPUs, or a CPU split in two

It trains twice, in plain Keras and on the replicas. The tickets are made by the script.
"""

import argparse
import random

import keras
import numpy as np

import keras_multigpu as kmg

PROBLEMS = {
    "billing": "you charged me twice|the invoice was wrong|my card was declined",
    "delivery": "the parcel is late|the courier lost the {item}|nothing has arrived",
    "login": "I cannot log in|the app shows an error|my account is locked",
    "returns": "the {item} is broken|the {item} does not fit|I sent the {item} back",
}
TEAMS = list(PROBLEMS)
TICKETS = "{now}|{old}, but that is solved. now {now}|{now}. that {old} is solved"
ENDS = "|please help|order {number}|I have been a customer for {time} and expected more"
LENGTH, WIDTH = 28, 32


def one_of(choices):
    return random.choice(choices.split("|"))


def write_ticket(team):
    """For returns: `the lamp is broken. that I cannot log in is solved. please help.`, say."""
    other = random.choice([name for name in TEAMS if name != team])
    ticket = one_of(TICKETS).format(now=one_of(PROBLEMS[team]), old=one_of(PROBLEMS[other]))
    ticket = f"{ticket}. {one_of(ENDS)}".strip(" .") + "."
    return ticket.format(
        item=one_of("jacket|lamp|phone"),
        number=random.randint(1000, 9999),
        time=one_of("two weeks|a year"),
    )


# --8<-- [start:model]
class Embed(keras.layers.Layer):
    """A vector for each word and one for its place; word 0 is padding, which is masked."""

    def __init__(self, words):
        super().__init__()
        self.word = keras.layers.Embedding(words, WIDTH, mask_zero=True)
        self.place = keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, tokens):
        return self.word(tokens) + self.place(keras.ops.arange(LENGTH))

    def compute_mask(self, tokens, previous=None):
        return self.word.compute_mask(tokens)


def build_model(words):
    """One transformer block. Attention and the average leave out what is masked."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = Embed(words)(tokens)
    x += keras.layers.MultiHeadAttention(num_heads=4, key_dim=8, dropout=0.1)(x, x)
    x = keras.layers.LayerNormalization()(x)
    inner = keras.layers.Dense(2 * WIDTH, activation="gelu")(x)
    x += keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH)(inner))
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.Dropout(0.3)(keras.layers.GlobalAveragePooling1D()(x))
    return keras.Model(tokens, keras.layers.Dense(len(TEAMS), activation="softmax")(x))


# --8<-- [end:model]


def main(epochs=8, replicas=None):
    """Train on one device and on the replicas; returns the accuracy on new tickets."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)

    # --8<-- [start:data]
    random.seed(0)
    labels = np.arange(1200) % len(TEAMS)
    tickets = [write_ticket(TEAMS[label]) for label in labels]
    vectorize = keras.layers.TextVectorization(output_sequence_length=LENGTH)
    vectorize.adapt(tickets)
    tokens = keras.ops.convert_to_numpy(vectorize(tickets))
    # --8<-- [end:data]

    # --8<-- [start:train]
    losses = []
    for distributed in (False, True):
        keras.utils.set_random_seed(0)
        model = build_model(vectorize.vocabulary_size())
        if distributed:
            model = kmg.distribute(model, strategy)
        optimizer = keras.optimizers.Adam(0.005)
        model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        history = model.fit(tokens, labels, validation_split=0.25, epochs=epochs, verbose=0).history
        losses.append(history["loss"])
    # --8<-- [end:train]

    print("epoch  plain Keras  on replicas  new tickets that are right")
    rows = zip(*losses, history["val_accuracy"], strict=True)
    for epoch, (plain, distributed, accuracy) in enumerate(rows, start=1):
        print(f"{epoch:5} {plain:12.6f} {distributed:12.6f} {accuracy:27.0%}")

    # --8<-- [start:ask]
    questions = [
        "The lamp is broken, but that is solved. Now I cannot log in.",
        "The lamp is broken. That I cannot log in is solved.",
    ]
    answers = model.predict(keras.ops.convert_to_numpy(vectorize(questions)), verbose=0)
    for question, answer in zip(questions, answers, strict=True):
        print(f"{TEAMS[answer.argmax()]} ({answer.max():.0%}): {question}")
    # --8<-- [end:ask]
    return history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
