"""How TensorFlow, and with it Keras, reaches files without Python's `open`."""

from typing import Any

from tensorflow.python.lib.io import _pywrap_file_io
from tensorflow.python.ops import gen_summary_ops
from tensorflow.python.saved_model import load, save

# `tf.io.gfile`, checkpoints and saved models call the functions of this module, so replacing those
# of `tf.io.gfile` would miss the others.
FILES: Any = _pywrap_file_io

READ = (
    "BufferedInputStream FileExists GetChildren GetMatchingFiles IsDirectory ReadFileToString Stat"
)
CHANGE = "CreateDir DeleteFile RecursivelyCreateDir"
WRITE = "WritableFile WriteStringToFile"

# Behind public names, of which Keras has its own, or which TensorFlow sets again while it exports.
SUMMARIES: Any = gen_summary_ops
MAKE_WRITER = "create_summary_file_writer"
SAVES: Any = save
SAVE_MODEL = "save_and_return_nodes"
LOADS: Any = load
LOAD_MODEL = "load_partial"
