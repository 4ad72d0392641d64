"""The process in which the script runs; `rehearse` starts it."""

import os
import runpy
import sys
import traceback
from pathlib import Path

from keras_multigpu.checks import in_one_line
from keras_multigpu.cluster.failures import WorkerFailure
from keras_multigpu.cluster.managers import find_cluster
from keras_multigpu.rehearsal import guard
from keras_multigpu.rehearsal.findings import Finding, to_install
from keras_multigpu.rehearsal.overlay import FREE, Overlay, is_users
from keras_multigpu.rehearsal.shortened_fit import shorten_fits

ENDED = Finding("script", "to its end", "ok", "no error")


def run(folder: str, start: str, script: str, *arguments: str) -> None:
    cluster = find_cluster()
    overlay = Overlay(Path(folder), cluster[1].index if cluster else 0)
    overlay.install()
    if not guard.restrict((folder, *FREE)):
        overlay.notes.add("unguarded")
    shorten_fits(overlay, is_second=start == "1")
    sys.argv = [script, *arguments]
    try:
        if os.path.exists(script):
            sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
            runpy.run_path(script, run_name="__main__")
        else:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except (WorkerFailure, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            overlay.notes.add("found", *ENDED)
            raise
        trace = error.__traceback__
        while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        frames = [each for each in traceback.extract_tb(trace) if is_users(each.filename)]
        where = f", {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        says, do = in_one_line(error) + where, to_install(error)
        overlay.notes.add("found", *ENDED._replace(verdict="fails", says=says, do=do))
        if isinstance(error, SystemExit):
            raise
        # Only the frames of the script.
        traceback.print_exception(error.with_traceback(trace))
        sys.exit(1)
    overlay.notes.add("found", *ENDED)
