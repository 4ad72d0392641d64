"""The example on Ray, with one worker that is killed in the middle of an epoch.

    ray_training.py FOLDER

The example's folder has to be in PYTHONPATH, for the workers too. It saves `model.keras`, and
prints as JSON the last logs and how many times each worker has started.
"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import train_with_ray


def killed_once(epochs, folder):
    """The example's function, but the second worker is killed after a checkpoint."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    folder.mkdir(parents=True, exist_ok=True)
    begun = folder / f"begun-{rank}"
    is_first = not begun.exists()
    with begun.open("a") as file:
        file.write(".")

    def kill():
        while not list(folder.glob("checkpoint-*.kmg")):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1 and is_first:
        threading.Thread(target=kill, daemon=True).start()
    train_with_ray.train(epochs, folder)


def main(folder):
    import ray

    # In a folder with a short path: those of sockets have a limit.
    with tempfile.TemporaryDirectory() as short:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            _node_ip_address="127.0.0.1",
            _temp_dir=short,
        )
        metrics, model = train_with_ray.start(killed_once, 2, 2, folder)
        ray.shutdown()
    model.save(folder / "model.keras")
    begun = [(folder / "checkpoints" / f"begun-{rank}").stat().st_size for rank in range(2)]
    print("result", json.dumps([metrics, begun]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
