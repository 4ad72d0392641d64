"""Shows what `help` shows: the arguments that a function passes on to `Batches`, by name."""

import inspect
from typing import Any

import griffe

from keras_multigpu import data


class SharedArguments(griffe.Extension):
    """Takes the signature and the docstring of the `from_*` functions from Python."""

    def on_function(self, *, func: griffe.Function, **others: Any) -> None:
        """What griffe calls for each function that it has read."""
        if func.name not in data.__all__ or not func.docstring:
            return
        public = getattr(data, func.name)
        func.docstring.value = inspect.getdoc(public) or ""
        shared = inspect.signature(public).parameters
        for name in [one.name for one in func.parameters if one.name not in shared]:
            del func.parameters[name]
        for name, one in shared.items():
            if name not in func.parameters:
                annotation = inspect.formatannotation(one.annotation).replace("pathlib.", "")
                func.parameters.add(
                    griffe.Parameter(
                        name,
                        annotation=annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(one.default),
                    )
                )
