"""Each rule is true: the parts, combined as it claims, are the whole.

And no rule is missing: an operation without one does not give rows or a sum when run on parts.
"""

from dataclasses import replace

import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from samples.operands import SAMPLES, B, floats, ints
from validator import Sample, Trial, validate

from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Block, Rows
from keras_multigpu.partition.program import CUDNN_RNNS
from keras_multigpu.partition.rules import FAILS_EMPTY
from keras_multigpu.partition.rules.plan import RULES, Plan

# Operations with many samples take half a second or more.
LONG = {kind for kind, samples in SAMPLES.items() if len(samples) > 3}

pytestmark = pytest.mark.usefixtures("graphs_that_run_twice")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] if k in LONG else []) for k in SAMPLES]
)
def test_rules_are_true_and_none_is_missing(kind):
    """With all combinations of layouts, uneven and empty shares, and NaN in one row."""
    samples = SAMPLES[kind]
    if not ALL_REPLICAS:
        # Only the first sample in all modes, and of many samples every second one.
        first, *others = samples[:: 2 if kind in LONG else 1]
        samples = [first, *(replace(sample, modes=sample.modes[:1]) for sample in others)]
    for sample in samples:
        findings = validate(sample)
        assert findings.type == kind
        assert findings.false == []
        assert findings.missing == []
        assert findings.unmeasured == [], (
            "facts/axes.py and lengths.py lack it, so the next operation gathers"
        )


def test_every_rule_has_a_sample():
    # Kernels for GPUs only: tests/partition/test_recurrent.py, and `keras-multigpu scoreboard`.
    others = RULES.keys() - CUDNN_RNNS
    assert others == SAMPLES.keys(), "samples are added in tests/partition/samples/"


@pytest.mark.parametrize("kind", sorted(FAILS_EMPTY))
def test_samples_left_out_for_empty_shares_fail_there(kind, monkeypatch):
    """Otherwise there is no reason to leave them out."""
    monkeypatch.setattr("keras_multigpu.partition.rules.FAILS_EMPTY", set())
    fails = any(validate(sample, wishes=False).false for sample in SAMPLES[kind])
    assert fails, "it works without rows, too"


def rows(ins):
    return next(layout for layout in ins if isinstance(layout, Rows))


# Plausible false rules, some of which other systems had: (operation, operands, claim).
FALSE = {
    "the absolute value of a sum": (
        lambda x: tf.raw_ops.Abs(x=x),
        (floats(B, 3),),
        lambda op, ins, facts: Plan(ins, (PARTIAL,)) if PARTIAL in ins else None,
    ),
    "a sum of rounded parts": (
        lambda x: tf.raw_ops.Round(x=x),
        (floats(B, 3),),
        lambda op, ins, facts: Plan(ins, (PARTIAL,)) if PARTIAL in ins else None,
    ),
    "parts cast to whole numbers": (
        lambda x: tf.raw_ops.Cast(x=x, DstT=tf.int32),
        (floats(B, 3, special=False),),
        lambda op, ins, facts: Plan(ins, (PARTIAL,)) if PARTIAL in ins else None,
    ),
    "what is whole is added by each": (
        lambda x, y: tf.raw_ops.AddV2(x=x, y=y),
        (floats(B, 3), floats(B, 3)),
        lambda op, ins, facts: Plan(ins, (PARTIAL,)) if set(ins) == {PARTIAL, REPLICATED} else None,
    ),
    "a sum of means": (
        lambda x: tf.raw_ops.Mean(input=x, axis=[0]),
        (floats(B, 3),),
        lambda op, ins, facts: Plan(ins, (PARTIAL,)) if ins[0] != PARTIAL else None,
    ),
    "global places in local rows": (
        lambda x, n: tf.raw_ops.GatherV2(params=x, indices=n, axis=0),
        (floats(B, 3), ints(1, B)),
        lambda op, ins, facts: Plan((ins[0], ins[0], REPLICATED), (ins[0],)),
    ),
    "the first rows of each": (
        lambda x: tf.raw_ops.StridedSlice(input=x, begin=[0], end=[1], strides=[1]),
        (floats(B, 3),),
        lambda op, ins, facts: Plan((rows(ins), *ins[1:]), (rows(ins),)),
    ),
    "running sums of rows": (
        lambda x: tf.raw_ops.Cumsum(x=x, axis=0),
        (floats(B, 3),),
        lambda op, ins, facts: Plan((rows(ins), REPLICATED), (rows(ins),)),
    ),
    "time before examples, flat": (
        lambda x: tf.raw_ops.Reshape(tensor=x, shape=[-1, 3]),
        (floats(2, B, 3),),
        lambda op, ins, facts: Plan(ins, (Rows(0, (Block("batch", 2),)),)),
    ),
    "the largest of a replica": (
        lambda x: tf.raw_ops.Max(input=x, axis=[0]),
        (floats(B, 3),),
        lambda op, ins, facts: Plan(ins, (REPLICATED,)),
    ),
}


@pytest.mark.parametrize("name", FALSE)
def test_the_validator_finds_false_rules(name, monkeypatch):
    """Some survived for years in other systems."""
    function, operands, wrong = FALSE[name]
    sample = Sample(function, operands, ("open",))
    kind = Trial(sample, "open").op.type

    def rule(op, ins, facts):
        try:
            return wrong(op, ins, facts)
        except StopIteration:
            return None

    monkeypatch.setitem(RULES, kind, rule)
    assert validate(sample, wishes=False).false


@pytest.mark.parametrize(
    ("kind", "function", "operands"),
    [
        ("Relu", lambda x: tf.raw_ops.Relu(features=x), (floats(B, 3),)),
        ("Sum", lambda x: tf.raw_ops.Sum(input=x, axis=[0]), (floats(B, 3),)),
        (
            "UnsortedSegmentSum",
            lambda x, n: tf.raw_ops.UnsortedSegmentSum(data=x, segment_ids=n, num_segments=3),
            (floats(B, 3), ints(3, B)),
        ),
    ],
)
def test_the_validator_finds_missing_rules(kind, function, operands, monkeypatch):
    monkeypatch.delitem(RULES, kind)
    assert validate(Sample(function, operands, ("open",))).missing
