"""Several worker processes: who they are, how they start, and how they end together.

`kmg.cluster.is_chief`, `local` and `ray` are public; the package and its commands use the rest.

managers           a table of what starts workers, and tells them who they are: a row for each
environment        the workers, and which of them this process is, from TF_CONFIG; settings
slurm              the same from SLURM's variables
apart              warns if torchrun, MPI or Kubernetes has started processes that train alone
joining            joins this process to the others, for each kind of strategy
meeting            all workers wait until all have started
connection         carries JSON objects between two workers
joint_start        ends a worker that TensorFlow lets wait for one that is gone
failures           names the worker that failed, on every other one
launcher           starts the workers of a training, watches them, ends them together
local              a function on workers of this machine, for notebooks
ray                a function on workers that Ray starts
this_machine       its GPUs, its free ports and its loopback device
"""

from keras_multigpu.cluster import ray as ray
from keras_multigpu.cluster.local import local as local
from keras_multigpu.cluster.managers import is_chief as is_chief

__all__ = ["is_chief", "local", "ray"]


def __dir__() -> list[str]:
    """The public names, without the modules."""
    return list(__all__)
