"""Real worker processes: each reads its own share, and together they read every example once."""

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

import keras_multigpu as kmg

WORKER = """
import json, sys
import numpy as np
import keras_multigpu as kmg

worker, workers = int(sys.argv[1]), int(sys.argv[2])
numbers = np.arange(29)
batches = kmg.data.from_arrays(numbers, numbers % 3, global_batch_size=8, seed=5)
part = batches.epoch(3, shard=(worker, workers))
print(json.dumps([batch.numpy().tolist() for batch, _ in part]))
"""


@pytest.mark.slow
def test_workers_agree_on_the_batches_without_talking():
    """Three processes, started alone, cut the same batches into three parts."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(worker), "3"], stdout=subprocess.PIPE, text=True
        )
        for worker in range(3)
    ]
    parts = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    numbers = np.arange(29)
    batches = kmg.data.from_arrays(numbers, numbers % 3, global_batch_size=8, seed=5)
    whole = [batch.numpy().tolist() for batch, _ in batches.epoch(3)]
    assert [list(itertools.chain(*part)) for part in zip(*parts, strict=True)] == whole
    assert sorted(itertools.chain(*whole)) == list(range(29))
