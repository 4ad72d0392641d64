"""Published steps train on replicas as on one device, and gather no more than they must.

With the environment variable `KMG_ALL_REPLICAS=1` each runs on 2 and on 3 replicas.
"""

import pytest
from exactness.runs import alone, differences, run
from helpers.all_replicas import ALL_REPLICAS, first_rows
from helpers.cpu_replicas import replicas_of
from published.table import BY_NAME, PUBLISHED, Published

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of

ROWS = [
    (name, replicas)
    for place, name in enumerate(first_rows(BY_NAME, len(PUBLISHED)))
    for replicas in ((2, 3) if ALL_REPLICAS else ((2, 3)[place % 2],))
]


@pytest.mark.slow
@pytest.mark.usefixtures("optimized_graphs")
@pytest.mark.parametrize(("name", "replicas"), ROWS)
def test_a_published_step_is_that_of_one_device(name, replicas):
    case = BY_NAME[name]
    expected = run(case, Published.compiled if case.in_graph else alone)
    found = run(case, lambda case: kmg.distribute(case.compiled(), replicas_of(replicas)))
    differing = {
        what: difference
        for what, difference in differences(expected, found).items()
        if difference > case.tolerance
    }
    assert not differing
    runners = replication_of(found.model).step_functions(found.model, "train").runners
    split = [runner.step for runner in runners if runner.step is not None]
    assert split and all(bool(step.unsplit_because) == case.alone for step in split)
    gathered = {
        moved.op.type if moved.op else "result"
        for step in split
        for moved in step.cost.moved
        if moved.kind == "gathered"
    }
    assert gathered == case.gathers
