"""Even the smallest variables are divided, and gathered in many buckets."""

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.partition.planning import gathering
from keras_multigpu.training.variables import storage


def divide_everything(monkeypatch):
    for module in (storage, optimizer_internals):
        monkeypatch.setattr(module, "SMALL", 12)
    monkeypatch.setattr(storage, "AT_ONCE", 1)
    monkeypatch.setattr(gathering, "BUCKET", 2000)
