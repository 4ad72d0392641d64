"""A training that stands still for a while, because of its second worker.

standing_worker.py data|stopped FILE

Its sixth batch comes when there is such a file; or it stops itself before that batch.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import keras_multigpu as kmg
from keras_multigpu.training.watching import standstill

WHAT, FILE = sys.argv[1], Path(sys.argv[2])
IS_SECOND = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
X = np.ones((4, 3), "float32")
# Someone with little patience.
standstill.POLL, standstill.LEAST, standstill.USUAL, standstill.ANSWER = 0.1, 2.0, 0, 3


def batches():
    for number in range(8):
        if number == 5 and IS_SECOND and WHAT == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        while number == 5 and IS_SECOND and WHAT == "data" and not FILE.exists():
            time.sleep(0.1)
        yield X, X[:, :1]


strategy = kmg.strategy()
model = kmg.distribute(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), strategy)
model.compile("sgd", "mse")
model.fit(batches(), steps_per_epoch=8, verbose=0)
sys.stdout.write("trained\n")
