"""The functions by which TensorFlow reaches files, which a rehearsal gives other paths."""

import inspect

import tensorflow as tf

from keras_multigpu.keras_internals import path_internals


def test_the_functions_that_take_paths_are_known():
    """A new one, which a rehearsal would not redirect, needs a place in one of the lists."""
    known = " ".join((path_internals.READ, path_internals.CHANGE, path_internals.WRITE)).split()
    special = {"CopyFile", "DeleteRecursively", "RenameFile"}
    takes_none = {"FileStatistics", "GetRegisteredSchemes", "HasAtomicMove", "TransactionToken"}
    names = {name for name in dir(path_internals.FILES) if not name.startswith("_")}
    assert names == {*known} | special | takes_none


def test_where_the_other_paths_are():
    writer = getattr(path_internals.SUMMARIES, path_internals.MAKE_WRITER)
    assert [*inspect.signature(writer).parameters][1] == "logdir"
    save = getattr(path_internals.SAVES, path_internals.SAVE_MODEL)
    assert [*inspect.signature(save).parameters][1] == "export_dir"
    load = getattr(path_internals.LOADS, path_internals.LOAD_MODEL)
    assert [*inspect.signature(load).parameters][0] == "export_dir"
    assert path_internals.SAVE_MODEL in inspect.getsource(tf.saved_model.save)
