"""Tune settings with Optuna, a trial on each device.

    python examples/tune.py                 # a trial on each GPU; on each core without
    python examples/tune.py --devices 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install optuna scikit-learn
"""

import argparse
import functools

import keras

import keras_multigpu as kmg


# --8<-- [start:trial]
def train(rate, width, epochs):
    """Train with these settings; returns the best validation accuracy."""
    from sklearn import datasets

    keras.utils.set_random_seed(0)
    x, y = datasets.load_digits(return_X_y=True)
    layers = [keras.layers.Rescaling(1 / 16), keras.layers.Dense(width, "relu")]
    model = keras.Sequential([*layers, keras.layers.Dense(10, "softmax")])
    model.compile(
        keras.optimizers.Adam(rate), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    history = model.fit(x, y, 64, epochs, validation_split=0.25, verbose=2).history
    return max(history["val_accuracy"])


# --8<-- [end:trial]


def main(rounds=5, each=4, epochs=5, devices=None):
    """Search; returns the best validation accuracy."""
    # --8<-- [start:search]
    import optuna

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True)
    )
    for _ in range(rounds):
        trials = [study.ask() for _ in range(each)]
        jobs = []
        for trial in trials:
            rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
            width = trial.suggest_int("width", 8, 128, log=True)
            jobs.append(functools.partial(train, rate, width, epochs))
        for trial, result in zip(trials, kmg.train_separately(jobs, devices=devices), strict=True):
            if result.error is None:
                study.tell(trial, result.value)
            else:
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
    print(f"{study.best_value:.3f} with {study.best_params}")
    # --8<-- [end:search]
    return study.best_value


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=4, help="trials in a round")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, help="default: all GPUs, or all cores")
    main(**vars(parser.parse_args()))
