"""The code blocks of Markdown pages: finds them, runs them, compares what they print.

    python tests/helpers/documented_code.py RESULTS.json PAGE.md ...

A page's blocks run in order, as if they stood in one file. A `text` block right after a
`python` block is what it prints. A `py` block is only shown. Blocks that include a file
of `examples/` are left to `test_examples.py`, and the README's `diff` to `test_readme_diff.py`.
"""

import contextlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FENCE = re.compile(r"^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDED = "--8<--"
ROUNDING = 1e-5
SAME_DIGITS = 0.01


class Block(NamedTuple):
    """One block of code.

    Args:
        language: The word behind the fence.
        line: The page's line on which the code begins.
        code: The code.
        output: The block that follows without a word between, if it is `text`.
    """

    language: str
    line: int
    code: str
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, without those that include a file."""
    text = page.read_text(encoding="utf-8")
    fences = list(FENCE.finditer(text))
    blocks = []
    for fence, following in itertools.zip_longest(fences, fences[1:]):
        adjoins = following is not None and not text[fence.end() : following.start()].strip()
        is_output = adjoins and following["language"] == "text"
        line = text.count("\n", 0, fence.start("code")) + 1
        output = following["code"] if is_output else None
        if INCLUDED not in fence["code"]:
            blocks.append(Block(fence["language"], line, fence["code"], output))
    return blocks


def has_code(page: Path) -> bool:
    return any(runnable(block) is not None for block in blocks_of(page))


def runnable(block: Block) -> str | None:
    """A block's Python code, if it has any."""
    return block.code if block.language == "python" else None


def run(page: Path) -> None:
    """Run a page's blocks; raises where one fails or prints something else."""
    namespace: dict[str, object] = {"__name__": page.stem}
    for block in blocks_of(page):
        code = runnable(block)
        if code is None:
            continue
        # Tracebacks then tell the line of the page.
        compiled = compile("\n" * (block.line - 1) + code, str(page), "exec")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compiled, namespace)
        if block.output is not None and not same_text(block.output, printed.getvalue()):
            raise AssertionError(
                f"{page}:{block.line} prints\n{printed.getvalue()}\ninstead of\n{block.output}"
            )


def same_text(expected: str, found: str) -> bool:
    """Whether two texts have the same words, and numbers up to rounding."""
    words, others = expected.split(), found.split()
    return len(words) == len(others) and all(map(same_word, words, others))


def same_word(expected: str, found: str) -> bool:
    """Whether two words are equal, or nearly equal numbers, or both are rounding errors."""
    if expected == found:
        return True
    try:
        one, other = float(expected.strip("[],")), float(found.strip("[],"))
    except ValueError:
        return False
    largest = max(abs(one), abs(other))
    return largest < ROUNDING or abs(one - other) < SAME_DIGITS * largest


@contextlib.contextmanager
def folder_with_photos() -> Iterator[None]:
    """Work in an empty folder with a folder `photos`, of ten classes of one picture each."""
    import keras
    import numpy as np

    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for kind in range(10):
            Path("photos", str(kind)).mkdir(parents=True)
            picture = np.full((8, 8, 3), 25.0 * kind)
            keras.utils.save_img(f"photos/{kind}/one.png", picture, scale=False)
        try:
            yield
        finally:
            os.chdir(before)


def main(results: str, *pages: str) -> None:
    """Run the pages in this process; write each one's traceback, None where all is well."""
    import keras
    from graph_optimizer import unoptimized_if_quick

    from keras_multigpu import devices, replicas

    devices.require_logical_cpus(8)
    unoptimized_if_quick()
    errors: dict[str, str | None] = dict.fromkeys(pages)
    for page in pages:
        sys.stdout.write(f"{page}\n")  # Shows progress to whoever waits.
        keras.utils.clear_session()
        replicas._last_asked_for = None  # The next page chooses its own default.
        try:
            with folder_with_photos():
                run(Path(page))
        except Exception:  # Whatever a page's code raises is the result.
            errors[page] = traceback.format_exc()
    Path(results).write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
