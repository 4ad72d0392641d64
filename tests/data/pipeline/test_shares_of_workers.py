"""A real worker process reads its own share; together the shares hold every example once."""

import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers.processes_left import PATIENCE

import keras_multigpu as kmg

WORKER = """
import json, sys
sys.modules["cv2"] = None
import numpy as np
import keras_multigpu as kmg
import keras_multigpu.data.decoding.decoder

worker, workers = int(sys.argv[1]), int(sys.argv[2])
numbers = np.arange(29)
batches = kmg.data.from_arrays(numbers, numbers % 3, global_batch_size=8, seed=5)
part = batches.epoch(3, shard=(worker, workers))
print(json.dumps([batch.numpy().tolist() for batch, _ in part]))
"""


@pytest.mark.slow
def test_workers_agree_on_the_batches_without_talking():
    """Another process, with other hashes and without OpenCV, reads the third part of three."""
    command = [sys.executable, "-P", "-c", WORKER, "2", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=PATIENCE, check=True
    )
    numbers = np.arange(29)
    batches = kmg.data.from_arrays(numbers, numbers % 3, global_batch_size=8, seed=5)
    shares = [batches.epoch(3, shard=(worker, 3)) for worker in range(2)]
    parts = [[batch.numpy().tolist() for batch, _ in share] for share in shares]
    parts.append(json.loads(ended.stdout))
    whole = [batch.numpy().tolist() for batch, _ in batches.epoch(3)]
    assert [list(itertools.chain(*part)) for part in zip(*parts, strict=True)] == whole
    assert sorted(itertools.chain(*whole)) == list(range(29))
