"""The cluster managers that start workers, and how each says which workers there are."""

from collections.abc import Callable
from typing import NamedTuple

from keras_multigpu.cluster import environment, slurm
from keras_multigpu.cluster.environment import Cluster


class Manager(NamedTuple):
    """A cluster manager.

    Attributes:
        title: What starts a sentence such as "TF_CONFIG names 8 workers".
        find_cluster: The workers and which of them this process is; None if it started none.
        own_gpus: The variables that limit a worker to its own GPUs.
    """

    title: str
    find_cluster: Callable[[], Cluster | None]
    own_gpus: Callable[[Cluster], dict[str, str]]


def cluster_of_config() -> Cluster | None:
    config = environment.tf_config()
    return config.cluster if config else None


# The first that answers counts. `processes.new_process.OF_CLUSTERS` has the variables of each.
MANAGERS = (
    Manager("TF_CONFIG names", cluster_of_config, lambda cluster: {}),
    Manager("SLURM started", slurm.cluster, slurm.own_gpus),
)


def is_chief() -> bool:
    """Whether this process is the one that writes: the only one, or the first of several workers.

    `fit` lets callbacks of Keras that write do so on the chief alone. This is for what a script
    writes by itself.

    Returns:
        True on the chief, and in a process that trains alone.

    Example:

    ```python
    if kmg.cluster.is_chief():
        model.save("model.keras")
    ```
    """
    found = find_cluster()
    return found is None or found[1].index == 0


def find_cluster() -> tuple[Manager, Cluster] | None:
    """The manager that started this process as one of several workers, and the workers."""
    # TF_CONFIG may name a server or an evaluator, which is no worker of SLURM's either.
    for manager in MANAGERS[:1] if environment.tf_config() else MANAGERS:
        if cluster := manager.find_cluster():
            return manager, cluster
    return None
