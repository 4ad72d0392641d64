"""Several worker processes: who they are, and what starts them.

`kmg.cluster.local` and `kmg.cluster.ray` are for users; the rest is what the package itself and its
commands ask.

environment        Cluster: the workers and which of them this process is, from TF_CONFIG; settings
joining            how this process joins them, for each kind of strategy
meeting            all wait until all have begun
lines              what workers say to each other, and how
lifelines          finds a dead worker immediately
failures           what happened to a worker, in a sentence, on every other one
apart              processes that torchrun, MPI or Kubernetes has started, which train apart
slurm              the workers from SLURM's variables
launcher           starts the workers of a training, watches them, ends them together
worker_commands    what starts each of them, here or on other machines
this_machine       its GPUs and its free ports
local              a function on workers of this machine, such as from a notebook
ray                Ray starts them, and starts them again
loopback           workers of one machine listen to that machine only
"""

from keras_multigpu.cluster import ray as ray
from keras_multigpu.cluster.local import local as local

__all__ = ["local", "ray"]


def __dir__() -> list[str]:
    """What is public, and not the modules that it is made of."""
    return list(__all__)
