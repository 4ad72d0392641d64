"""The process in which the script runs; `rehearse` starts it."""

import os
import runpy
import sys
import traceback
from pathlib import Path

from keras_multigpu.cluster.failures import WorkerFailure
from keras_multigpu.cluster.managers import find_cluster
from keras_multigpu.rehearsal import guard
from keras_multigpu.rehearsal.findings import Finding, in_words
from keras_multigpu.rehearsal.overlay import FREE, Overlay, is_users
from keras_multigpu.rehearsal.shortened_fit import shorten_fits


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
    except Exception as error:
        traceback.print_exc()
        frames = [
            each for each in traceback.extract_tb(error.__traceback__) if is_users(each.filename)
        ]
        where = f", {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
        overlay.notes.add(
            "found", *Finding("script", "to its end", "fails", in_words(error) + where)
        )
        sys.exit(1)
    overlay.notes.add("found", *Finding("script", "to its end", "ok", "no error"))
