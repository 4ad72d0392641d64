"""Train on a folder of images: which of six jigsaw puzzles does a piece belong to?

    python examples/train_from_directory.py                  # all GPUs, or one CPU
    python examples/train_from_directory.py --replicas 2     # two GPUs, or a CPU split in two

The photographs are those of scikit-image: pip install scikit-image matplotlib
"""

import argparse
import os
from pathlib import Path

import keras
import numpy as np

import keras_multigpu as kmg

PUZZLES = ("astronaut", "cat", "coffee", "rocket", "stars", "tissue")
PHOTOS = ("astronaut", "chelsea", "coffee", "rocket", "hubble_deep_field", "immunohistochemistry")
ROWS, COLUMNS, SIDE = 10, 15, 48


def write_pieces(folder):
    """Cut each photograph into 150 pieces: `folder/cat/03_11.jpg` is one."""
    from PIL import Image, ImageOps
    from skimage import data

    for puzzle, photo in zip(PUZZLES, PHOTOS, strict=True):
        Path(folder, puzzle).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(getattr(data, photo)())
        image = ImageOps.fit(image, (COLUMNS * SIDE, ROWS * SIDE))
        for row, column in np.ndindex(ROWS, COLUMNS):
            left, top = column * SIDE, row * SIDE
            piece = image.crop((left, top, left + SIDE, top + SIDE))
            piece.save(Path(folder, puzzle, f"{row:02}_{column:02}.jpg"), quality=92)


# --8<-- [start:model]
def build_model():
    """A small convnet. Images come as whole numbers from 0 to 255."""
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), keras.layers.Rescaling(1 / 255)])
    for filters in (32, 64, 128):
        model.add(keras.layers.Conv2D(filters, 3, strides=2, activation="relu"))
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(len(PUZZLES), activation="softmax"))
    return model


# --8<-- [end:model]


def draw(train, validation, answers, path):
    """Lay the validation pieces where they belong, the others faintly, wrong ones in red."""
    from matplotlib.figure import Figure

    boards = {puzzle: np.zeros((ROWS * SIDE, COLUMNS * SIDE, 3)) for puzzle in PUZZLES}
    answer_of = dict(zip(validation.file_paths, answers, strict=True))
    for file in train.file_paths + validation.file_paths:
        puzzle = Path(file).parent.name
        row, column = (SIDE * int(number) for number in Path(file).stem.split("_"))
        piece = np.array(keras.utils.load_img(file)) / 255
        if file not in answer_of:
            piece = 0.85 + 0.15 * piece
        elif answer_of[file] != puzzle:
            piece[:5] = piece[-5:] = piece[:, :5] = piece[:, -5:] = (0.9, 0.1, 0.2)
        boards[puzzle][row : row + SIDE, column : column + SIDE] = piece
    figure = Figure(figsize=(9, 4.7), layout="constrained")
    figure.suptitle("Pieces it was not trained on. Red: the model takes them for another puzzle's")
    for axes, puzzle in zip(figure.subplots(2, 3).flat, PUZZLES, strict=True):
        of_puzzle = [answer_of[file] for file in answer_of if Path(file).parent.name == puzzle]
        axes.set_title(f"{puzzle}: {of_puzzle.count(puzzle)} of {len(of_puzzle)}", fontsize=10)
        axes.imshow(boards[puzzle])
        axes.axis("off")
    # Written whole or not at all, so that no half picture is ever seen.
    figure.savefig(f"{path}.partial", format="png", dpi=90)
    os.replace(f"{path}.partial", path)


def main(epochs=20, replicas=None, folder="puzzles"):
    """Train, and draw two pictures; returns the accuracy on new pieces."""
    # First of all: once TensorFlow has started, it cannot split a CPU in two.
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    write_pieces(folder)
    # --8<-- [start:data]
    pieces = kmg.data.from_directory(folder, image_size=(SIDE, SIDE), global_batch_size=32)
    train, validation = pieces.split(0.2)
    # --8<-- [end:data]
    # --8<-- [start:augment]
    train = train.with_(augment=[keras.layers.RandomFlip(), keras.layers.RandomRotation(0.5)])
    # --8<-- [end:augment]
    # --8<-- [start:look]
    print(validation)
    print(validation.class_counts)
    train.preview("pieces.png")
    # --8<-- [end:look]
    # --8<-- [start:train]
    model = kmg.distribute(build_model(), strategy)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(train, validation_data=validation, epochs=epochs, verbose=2)
    # --8<-- [end:train]
    # --8<-- [start:answers]
    # One answer for each of `validation.file_paths`, in that order.
    numbers = model.predict(validation, verbose=0).argmax(axis=1)
    answers = [validation.class_names[number] for number in numbers]
    # --8<-- [end:answers]
    draw(train, validation, answers, "puzzles.png")
    accuracy = history.history["val_accuracy"][-1]
    print(f"{accuracy:.1%} of the new pieces are right. See pieces.png and puzzles.png.")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    main(**vars(parser.parse_args()))
