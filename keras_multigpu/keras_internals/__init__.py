"""All uses of names that Keras and TensorFlow do not document.

| module | internals of |
| --- | --- |
| `model_internals` | models: their layers, wiring and calls, and what a call leaves behind |
| `compile_internals` | `compile`: its arguments, and the losses and metrics made from them |
| `variable_internals` | variables: the storage of their values, and the states of seeds |
| `optimizer_internals` | optimizers: how they keep and update their variables |
| `dataset_internals` | datasets: how one was made, and how Keras makes one |
| `graph_internals` | graphs: functions by their definitions, reads, the scope of a strategy |
| `collective_internals` | TensorFlow's all-reduce: which sums belong together |
| `cluster_internals` | several workers and their connections |
| `callback_internals` | the counters of Keras's callbacks |
| `keras_cv_internals` | the random numbers of keras-cv's layers |
| `replacing` | attributes that have another value for a while |
| `versions` | the versions that all this was tested on |
| `backend` | checks first of all that Keras runs on TensorFlow |

Everything was tested on Keras 3.10 to 3.15 with TensorFlow 2.19 to 2.21. Comments say why no public
name will do; `tests/keras_internals/` fails with a clear sentence if a later version changes one.
"""

from keras_multigpu.keras_internals.backend import require_tensorflow

require_tensorflow()
