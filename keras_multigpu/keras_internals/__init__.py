"""The only door to names that Keras and TensorFlow do not document.

| module | what it knows of Keras and TensorFlow |
| --- | --- |
| `model_internals` | a model's layers, how they are wired and called, what a call leaves behind |
| `compile_internals` | what `compile` was given and made of it: losses and metrics |
| `variable_internals` | what holds the value of a variable, and the states of seeds |
| `optimizer_internals` | how optimizers keep and update their variables |
| `dataset_internals` | how a dataset was made, and how Keras makes one |
| `graph_internals` | functions by their definitions, reads, the scope of a strategy |
| `cluster_internals` | workers and their connections |
| `callback_internals` | what Keras's callbacks keep |
| `keras_cv_internals` | the seeds of keras-cv's layers |
| `versions` | the versions that all this was checked on |
| `backend` | that Keras runs on TensorFlow: asked here, because nothing works without |

Everything was checked on Keras 3.10 to 3.15 with TensorFlow 2.19 to 2.21. Each entry says why no
public name will do; `tests/keras_internals/` fails with a clear sentence when a later
version changes one of them.
"""

from keras_multigpu.keras_internals.backend import require_tensorflow

require_tensorflow()
