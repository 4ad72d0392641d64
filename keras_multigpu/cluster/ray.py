"""`ray.train`: Ray starts and restarts the workers of a training on any of its machines.

Ray's `TensorflowTrainer` sets TF_CONFIG for each worker, as any other launcher does.
"""

from collections.abc import Callable
from typing import Any

from keras_multigpu.checks import error_of, require_positive_integer


def train(
    fn: Callable[[], Any],
    num_workers: int = 2,
    *,
    run_config: Any = None,
    **scaling: Any,
) -> Any:
    """Train on workers that Ray's `TensorflowTrainer` starts.

    Each worker calls the same function, which trains as on one device: `kmg.distribute` finds the
    other workers, and a callback may call `ray.train.report`. A failed worker ends all; with
    `FailureConfig(max_failures=...)` Ray starts them again, and `kmg.callbacks.ResumableCheckpoint`
    resumes where they stopped.

    Args:
        fn: The function that each worker calls. It need not be importable, since Ray copies it, and
            `functools.partial` gives it arguments. Its return value is lost.
        num_workers: How many processes train.
        run_config: A `ray.train.RunConfig`, which says where results are kept and how many failures
            are allowed.
        **scaling: Further arguments of `ray.train.ScalingConfig`, such as `use_gpu=True` or
            `resources_per_worker={"CPU": 4}`.

    Returns:
        Ray's `Result`, with the last reported `metrics` and `checkpoint`.

    Raises:
        ImportError: If Ray Train is not installed: `pip install "ray[train]"`.

    Example:

    ```python
    failures = ray.train.FailureConfig(max_failures=3)
    result = kmg.cluster.ray.train(
        train, 4, run_config=ray.train.RunConfig(failure_config=failures), use_gpu=True
    )
    ```
    """
    require_positive_integer("num_workers", num_workers)
    ray_train = import_ray_train()
    from ray.train.tensorflow import TensorflowTrainer

    trainer = TensorflowTrainer(
        on_each_worker(fn),
        scaling_config=ray_train.ScalingConfig(num_workers=num_workers, **scaling),
        run_config=run_config,
    )
    return trainer.fit()


def on_each_worker(fn: Callable[[], Any]) -> Callable[[], None]:
    """A function for Ray to call, with `fn` inside as bytes."""
    from ray import cloudpickle

    # If `fn` uses this package, unpickling it imports the package, which waits for all workers to
    # join. Ray unpickles in the thread that has to answer it, so `fn` is unpickled in `call`.
    pickled = cloudpickle.dumps(fn)

    def call() -> None:
        import os
        import pickle

        # Ray asks for `tf.keras` to be Keras 2, which TensorFlow no longer includes.
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
        pickle.loads(pickled)()

    return call


def import_ray_train() -> Any:
    """The module `ray.train`; an `ImportError` that says how to install it."""
    try:
        import ray.train
    except ImportError as error:
        raise error_of(
            ImportError,
            "Ray Train is not installed.",
            "Expected it for `kmg.cluster.ray`; the rest of keras_multigpu does without.",
            'Run `pip install "ray[train]"`, or start workers with `keras-multigpu launch`.',
            package="ray",
        ) from error
    return ray.train
