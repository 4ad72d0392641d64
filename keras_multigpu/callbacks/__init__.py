"""Callbacks: what people do by hand around training, done once and tested.

Each is a `keras.callbacks.Callback`. What it needs to know of `fit` it asks
`model.training_run` (`training/run.py`); what has to be seen inside a step, on each replica, it
measures with a probe (`training/probes.py`).
"""
