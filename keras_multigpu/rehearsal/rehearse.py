"""`rehearse`: starts the script, again once it has killed itself, and collects what was found."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_multigpu.checks import runtime_error
from keras_multigpu.cluster.launcher import (
    ENDING,
    Printer,
    WorkerCommand,
    on_this_machine,
    run_once,
)
from keras_multigpu.processes import new_process
from keras_multigpu.processes.groups import Interrupts
from keras_multigpu.rehearsal.findings import Finding, Notes

RUN = "import sys; from keras_multigpu.rehearsal.script import run; run(*sys.argv[1:])"

NO_FIT = "no `fit` was called: a loop of your own runs whole, and nothing is tried"


def rehearse_instead() -> None:
    """Become the command, which rehearses the script of this process."""
    main, folder = sys.modules["__main__"], os.environ.pop("KMG_REHEARSE")
    module = getattr(main, "__spec__", None)
    if not hasattr(main, "__file__"):
        raise runtime_error(
            "`KMG_REHEARSE` is set where there is no script to start again.",
            "Expected a script or a module that Python runs, and no notebook.",
            "Save the notebook as a script, or unset the variable.",
            KMG_REHEARSE=folder,
        )
    options = [] if folder == "1" else ["--folder", folder]
    script = module.name.removesuffix(".__main__") if module else sys.argv[0]
    words = new_process.command("keras_multigpu", "rehearse", *options, script, *sys.argv[1:])
    path = new_process.environment()["PYTHONPATH"]
    sys.stdout.flush()
    os.execve(words[0], words, {**os.environ, "PYTHONPATH": path})


class PlainPrinter(Printer):
    """Prints the lines of a script that has no other workers."""

    def print(self, line: str) -> None:
        super().print(line.removeprefix("[worker 0] "))


def rehearse(
    folder: Path, script: Sequence[str], variables: Sequence[Mapping[str, str]]
) -> list[Finding] | int:
    """Run a script with its arguments; return what was found, or the code of a signal.

    Args:
        folder: A folder that all workers share.
        variables: Those of each worker. A single one may also be of a cluster, whose other workers
            are rehearsed elsewhere.
    """
    notes = Notes(folder)
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    common = {
        "PYTHONPATH": new_process.environment()["PYTHONPATH"],
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(temporary),
        "CUDA_CACHE_PATH": str(temporary),
    }
    with Interrupts(ENDING) as interrupts:
        printer = (PlainPrinter if len(variables) == 1 else Printer)(interrupts)
        for start in range(2):
            command = new_process.code(RUN, str(folder), str(start), *script)
            workers = [{**common, **each} for each in variables]
            if len(workers) == 1:
                commands = [WorkerCommand(command, workers[0])]
            else:
                commands = on_this_machine([command] * len(workers), workers)
            failure = run_once(commands, printer, interrupts, grace=0)
            if interrupts.first is not None:
                return 128 + interrupts.first
            if start or not notes.read("killed"):
                break
            printer.print("[worker 0] Rehearsal: killed after a step; the second start:")
    found = [Finding(*each) for each in notes.read("found")]
    if failure is not None and not any(each.where == "script" for each in found):
        what = failure.what if len(variables) > 1 else failure.what.replace("worker 0", "it")
        found.append(Finding("script", "to its end", "fails", what, "See its last lines."))
    if failure is None and not any(each.where.startswith("fit ") for each in found):
        found.insert(0, Finding("script", "training", "note", NO_FIT))
    every = [decided(each, notes) for each in [*found, *several_writers(notes)]]
    # What is not an error is said of the first `fit` alone.
    once = {each[1:] if each.verdict == "note" else each: each for each in reversed(every)}
    return [*reversed(once.values())]


def several_writers(notes: Notes) -> list[Finding]:
    """What is found about files that more than one worker writes."""
    workers: dict[tuple[str, str], set[int]] = {}
    for user, by, worker in notes.read("written"):
        workers.setdefault((user, by), set()).add(worker)
    do = "Distribute the model, and write on the chief alone: `if kmg.cluster.is_chief():`."
    return [
        Finding("script", "one writer", "fails", f"{by} writes {user} on each worker", do)
        for (user, by), who in workers.items()
        if len(who) > 1
    ]


def decided(finding: Finding, notes: Notes) -> Finding:
    """A model that cannot be saved whole matters to scripts that do so."""
    if finding.verdict != "if saved":
        return finding
    files = [user for user, _, _ in notes.read("written")]
    saves = any(file.endswith((".keras", ".h5")) and ".weights." not in file for file in files)
    return finding._replace(verdict="fails" if saves else "note")
