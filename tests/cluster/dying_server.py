"""A chief whose only parameter server is killed in the middle of an epoch.

dying_server.py FOLDER
"""

import json
import os
import signal
import sys
from pathlib import Path

import keras
import numpy as np

FOLDER = Path(sys.argv[1])
if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "ps":
    FOLDER.joinpath("server").write_text(str(os.getpid()))

import keras_multigpu as kmg  # noqa: E402 (workers and servers never return from this)


class Kill(keras.callbacks.Callback):
    """Kills the server."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            os.kill(int(FOLDER.joinpath("server").read_text()), signal.SIGKILL)


model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model = kmg.distribute(model)
model.compile("sgd", "mse")
try:
    model.fit(np.ones((40, 2)), np.ones((40, 1)), batch_size=4, verbose=0, callbacks=[Kill()])
except RuntimeError as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.flush()
os._exit(0)
