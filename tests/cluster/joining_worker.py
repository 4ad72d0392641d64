"""A worker that prints what all workers must have in common, and then joins them."""

import json
import os
import signal
import sys

# Processes started in the background may ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
config = os.environ.pop("TF_CONFIG")
from keras_multigpu import replicas  # noqa: E402
from keras_multigpu.cluster import joining  # noqa: E402

os.environ["TF_CONFIG"] = config
sys.stdout.write(f"alike {json.dumps(joining.alike_on_all())}\n")
sys.stdout.flush()
replicas.strategy()
