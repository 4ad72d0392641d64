"""A worker that calls another method than the chief, and exits as soon as it finds out."""

import os
import sys
import time

import keras_multigpu as kmg
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.workers import require_same_call

group = ReplicaGroup(kmg.strategy())
group.exchange_numbers([1])
sys.stdout.write("compares\n")
sys.stdout.flush()
time.sleep(0.5)
try:
    require_same_call(group, "fit" if group.is_chief else "evaluate")
except Exception as error:
    sys.stdout.write(f"{type(error).__name__}: {error}\n")
    sys.stdout.flush()
    os._exit(1)
