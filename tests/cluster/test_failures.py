"""When one worker fails or stops, all end, and the others say which worker it was and why."""

import re
import time
from pathlib import Path

import pytest
from helpers.all_replicas import ALL_REPLICAS
from helpers.processes_left import PATIENCE
from worker_processes import Workers

from keras_multigpu.cluster import failures

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("failing_worker.py")
TIMEOUTS = {"KERAS_MULTIGPU_EXCHANGE_TIMEOUT": "40", "KERAS_MULTIGPU_HEARTBEAT_TIMEOUT": "10"}


def outcome(what, who=1):
    """The other worker's output, both exit codes, and its time as a share of the promised one."""
    for _ in range(3):
        printed, codes, taken, again = one_outcome(what, who)
        if not again:
            break
    return printed, codes, taken


def one_outcome(what, who):
    began = time.time()
    other = 1 - who
    with Workers(SCRIPT, 2, (what, who), TIMEOUTS) as workers:
        workers.processes[other].join(PATIENCE)
        assert workers.processes[other].exitcode is not None, f"it hangs: {workers.output(other)}"
        if what in LONG:
            workers.kill()
        codes, printed = workers.wait(), list(map(workers.output, (who, other)))
        return printed[1], codes, share_of_promise(what, began, *printed), workers.lost_a_port()


def share_of_promise(what, began, of_who_acts, of_other):
    """The time that the other worker took to end, as a share of the promised time."""
    acted, ended = re.search(r"acts at (\S+)", of_who_acts), re.search(r"ends at (\S+)", of_other)
    if not (acted and ended and what in PROMISED):
        return 0
    # On an idle machine, a worker misbehaves within two seconds.
    slowness = max((float(acted[1]) - began) / 2, 1)
    return (float(ended[1]) - float(acted[1])) / (PROMISED[what] * slowness)


LONG = ["freeze", "sleep", "loop, sleep"]
"""One worker does not end by itself, and the other waits for a timeout."""

CASES = [
    ("raise", r"WorkerFailure: worker 1 \(.*\) failed: ZeroDivisionError: a bug in a callback"),
    ("kill", r"WorkerFailure: worker 1 \(.*\) is gone"),
    ("other data", r"The workers read different batches"),
    ("loop, break", r"WorkerFailure: worker 1 \(.*\) has come to the end of its script"),
    ("other code", r"The workers have traced different steps: the first operation that differs is"),
    ("freeze", r"WorkerFailure: worker 1 \(.*\) is gone, or gave no sign of life"),
    # It runs the service that notices who is missing, and must not be asked.
    ("freeze", r"WorkerFailure: worker 0 \(.*\) is gone, or gave no sign of life"),
    ("sleep", r"WorkerFailure: worker 1 \(.*\) did not come to an exchange within 40 seconds"),
    ("loop, sleep", r"WorkerFailure: worker 1 \(.*\) did not come to an exchange within 40 seco"),
    ("other optimizer", r"ValueError: Worker 1 \(.*\) and the chief differ in the model's optim"),
    ("other rate", r"ValueError: Worker 1 \(.*\) and the chief differ in the learning rate"),
    ("other exchange", r"WorkerFailure: The workers have come to different exchanges"),
    ("other method", r"ValueError: Worker 1 \(.*\) and the chief differ in the method that"),
    ("no validation", r"ValueError: Worker 1 \(.*\) and the chief differ in `validation_freq`"),
    ("predict, raise", r"worker 1 \(.*\) failed: ZeroDivisionError: a bug at the end"),
    ("short generator", r"The data of worker 1 \(.*\) ended before that of others"),
]

PROMISED = {"kill": 15, "raise": 10, "freeze": 15}
"""Seconds; TensorFlow's heartbeats have ten."""


# Workers report failures in one way.
@pytest.mark.parametrize(("what", "expected"), CASES if ALL_REPLICAS else CASES[:2])
def test_the_other_worker_ends_and_says_why(what, expected):
    who = int("worker 0" in expected)
    printed, codes, taken = outcome(what, 1 - who)
    assert re.search(expected, printed), printed
    assert codes[who] == 1
    assert taken < 1


WORKERS = ["a:1", "b:2", "c:3"]


# TensorFlow's messages, as worker 1 sees them.
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("UNAVAILABLE: connection to CoordinationService/Heartbeat: Deadline", "worker 0 (a:1) is"),
        ("/job:worker/replica:0/task:2 is unhealthy", "worker 2 (c:3) is gone, or gave no sign"),
        ("/job:worker/replica:0/task:1: socket closed", "Another worker, or the link to it, is go"),
        (
            "x keras_multigpu: worker 2 (c:3) failed: no :keras_multigpu y",
            "worker 2 (c:3) failed: no.",
        ),
        ("Collective instance 3 expected 4", "The workers have come to different exchanges"),
    ],
)
def test_an_error_of_tensorflow_becomes_a_sentence(error, expected):
    assert failures.describe_error(error, WORKERS, 1).startswith(expected)


def test_a_worker_that_stops_training_stops_all():
    printed, codes, _ = outcome("stop")
    assert "ended after epochs: 1, steps: 2\nand after 6\n" in printed, printed
    assert codes == [0, 0]
