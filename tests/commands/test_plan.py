"""`keras-multigpu plan` predicts published measurements and names the bottleneck."""

import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it

from keras_multigpu.commands import main, plan
from keras_multigpu.commands.plan import (
    SPREAD,
    USABLE,
    Link,
    Training,
    halving,
    predicted,
    ring,
    work_done,
)

TESTS = Path(__file__).parents[1]
NVLINK, PCIE = Link(20e9, 1e-5), Link(10e9, 1e-5)
GRADIENTS = {  # MB, from each model's number of weights.
    "AlexNet": 244,
    "InceptionV3": 95.4,
    "ResNet-50": 102.2,
    "ResNet-101": 178.6,
    "ResNet-152": 241,
    "VGG16": 553.4,
}


def ethernet(gigabits):
    return Link(gigabits * 1e9 / 8, 2e-5)


def curve(model, batch, inside, between, rates):
    """Points `(training, gpus, base, efficiency)` of a curve of examples per second."""
    training = Training(batch / rates[1], GRADIENTS[model] * 1e6, batch, 8, inside, between)
    return [(training, n, 1, rate / n / rates[1]) for n, rate in rates.items() if n > 1]


# tensorflow.org/performance/benchmarks, 2017: images per second, synthetic data.
TENSORFLOW = {
    "DGX-1 P100": {
        "InceptionV3": (64, {1: 142, 2: 284, 4: 569, 8: 1131}),
        "ResNet-50": (64, {1: 238, 2: 479, 4: 948, 8: 1886}),
        "ResNet-152": (64, {1: 95.6, 2: 187, 4: 374, 8: 744}),
        "AlexNet": (512, {1: 2987, 2: 5658, 4: 10509, 8: 17822}),
        "VGG16": (64, {1: 132, 2: 259, 4: 511, 8: 959}),
    },
    "EC2 K80": {  # 10 Gbit/s; 8 GPUs a host.
        "InceptionV3": (64, {1: 29.7, 8: 229, 16: 459, 32: 902, 64: 1783}),
        "ResNet-50": (64, {1: 55.0, 8: 410, 16: 825, 32: 1468, 64: 3051}),
        "ResNet-152": (32, {1: 19.8, 8: 150, 16: 300, 32: 575, 64: 1004}),
    },
}
INSIDE = {"DGX-1 P100": NVLINK, "EC2 K80": PCIE}

# Goyal et al. 2017, arXiv 1706.02677, 5.5: from 8 to 352 GPUs, 50 Gbit/s, the time per iteration
# increases by 12%; to 256 about 90% efficiency. 352 see 1.28 million images in 30 s.
GOYAL = Training(0.23, 102.2e6, 32, 8, NVLINK, ethernet(50))

# Sergeev and Del Balso 2018, arXiv 1802.05799, and Horovod's docs/benchmarks: 512 Pascal GPUs in
# 128 hosts, 25 Gbit/s. One GPU as above; ResNet-101 as their 1656.82 images a second on 16.
HOROVOD = {"InceptionV3": (142, 0.90), "ResNet-101": (112, 0.90), "VGG16": (132, 0.68)}

POINTS = {
    **{
        (machine, model, point[1]): point
        for machine, models in TENSORFLOW.items()
        for model, (batch, rates) in models.items()
        for point in curve(model, batch, INSIDE[machine], ethernet(10), rates)
    },
    **{
        ("Horovod", model, 512): (
            Training(64 / rate, GRADIENTS[model] * 1e6, 64, 4, PCIE, ethernet(25)),
            512,
            1,
            efficiency,
        )
        for model, (rate, efficiency) in HOROVOD.items()
    },
    ("Goyal", "ResNet-50", 256): (GOYAL, 256, 8, 0.9),
    ("Goyal", "ResNet-50", 352): (GOYAL, 352, 8, 1 / 1.12),
}

# What the model leaves out: a step of 0.17 s in which 512 images for each GPU pass through the
# host; gradients of eight hosts that go through four servers; a figure below that for 64 GPUs.
MISSED = {
    ("DGX-1 P100", "AlexNet", 8),
    ("EC2 K80", "ResNet-152", 64),
    ("EC2 K80", "ResNet-50", 32),
}


@pytest.mark.parametrize("name", sorted(POINTS), ids=lambda name: " ".join(map(str, name)))
def test_published_measurements_are_predicted_within_ten_percent(name):
    training, gpus, base, efficiency = POINTS[name]
    found = predicted(training, gpus).efficiency / predicted(training, base).efficiency
    assert (abs(found / efficiency - 1) > 0.1) == (name in MISSED)


def test_sums_take_the_time_of_the_textbook_formulas():
    """Four ranks, 100 bytes, 10 bytes a second, 1 s of latency."""
    link = Link(10, 1)
    assert ring(100, 4, link) == pytest.approx(6 * (1 + 25 / 10))
    assert halving(100, 4, link) == pytest.approx(4 * 1 + 150 / 10)


def test_sums_are_hidden_behind_the_backward_pass():
    """All but the last bucket; on a link a hundred times slower, none of them."""
    fast = predicted(Training(1, 32 * 2**20, 8, 1, NVLINK, ethernet(10)), 2)
    slow = predicted(Training(1, 32 * 2**20, 8, 1, NVLINK, ethernet(0.1)), 2)
    slowest = 1 + SPREAD * math.sqrt(2 * math.log(2))
    assert fast.step == pytest.approx(slowest + 2**20 / (1.25e9 * USABLE), rel=1e-3)
    first = slowest * (1 - 2 / 3 / 2)
    assert slow.step == pytest.approx(first + 32 * 2**20 / 0.0125e9, rel=1e-3)
    assert (fast.bottleneck, slow.bottleneck) == ("the GPUs", "the link between hosts")


def with_two_workers():
    """Seconds of a step and of a message for each link, from what `bench_scaling.py` writes."""
    page = (TESTS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    link, time = r"(\w+)(?:, (\d+) ms)?", r"([\d.]+)"
    row = rf"\| convolutions \| {link} \| keras_multigpu \| {time} \| {time}"
    return {
        name: (float(step) / 1e3, 1e-4 + int(delay or 0) / 1e3)
        for name, delay, _, step in re.findall(row, page)
    }


@pytest.mark.parametrize("link", ["1gbit", "200mbit"])
def test_steps_over_shaped_links_are_predicted_within_ten_percent(link):
    """Predicted from a step over loopback, where the cores that compute also send and add."""
    sides = runpy.run_path(str(TESTS / "benchmarks" / "scaling_sides.py"))
    network = sides["keras_network"]("convolutions")
    measured = with_two_workers()
    step, latency = measured[link]
    training = Training(
        step=measured["loopback"][0],
        gradient=4 * network.count_params(),
        batch=32,
        gpus_per_host=1,
        inside=NVLINK,
        between=Link(plan.rate_of("link", link), latency),
        yielded=plan.in_backward_order(network),
    )
    assert predicted(training, 2).step == pytest.approx(step, rel=0.1)


def test_gradients_are_ready_when_their_layers_are():
    """Here two thirds of the bytes take a tenth of the work, and the others the rest."""
    yielded = ((2 / 3, 0.1), (1 / 3, 0.9))
    assert [work_done(yielded, part / 6) for part in (0, 2, 4, 5, 6)] == pytest.approx(
        [0, 0.05, 0.1, 0.55, 1]
    )


def test_a_slow_input_pipeline_is_the_bottleneck():
    one = predicted(Training(0.1, 1e6, 32, 8, NVLINK, ethernet(10), input_rate=512), 8)
    assert (one.step, one.bottleneck) == (0.5, "the input")
    assert one.host_examples == 512


def test_the_command_prints_a_table_and_draws_a_picture(tmp_path, capsys):
    numbers = ["--step-ms", "485", "--gradient-mb", "553.4", "--gpus-per-host", "4"]
    picture = tmp_path / "plan.png"
    assert main(["plan", "--gpus", "1..16", *numbers, "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [
        ["1", "1", "485.0"],
        ["2", "1", "496.5"],
        ["4", "1", "501.3"],
        ["8", "2", "517.7"],
    ]
    assert lines[-2] == (
        "From 16 GPUs on, waiting for the link between hosts takes more than a tenth of a step."
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.in_test_all("no test can check what is measured on a machine")
def test_the_step_of_a_model_is_measured():
    words = ["--model", "MobileNetV3Small", "--batch", "1", "--gpus", "1,2", "--link", "1gbit"]
    command = [sys.executable, "-m", "keras_multigpu", "plan", *words]
    done = subprocess.run(
        command,
        env=as_users_start_it(),
        check=True,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )
    steps = re.findall(r"^Measuring MobileNetV3Small, step (\d) of 5", done.stdout, re.MULTILINE)
    assert steps == list("012345")
    assert "\nMobileNetV3Small: 10.2 MB of gradients, " in done.stdout
    assert not done.stderr


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--step-ms", "1"], "training is not specified.*--gradient-mb 102"),
        (["--model", "Nothing"], "no such model .* ResNet50"),
        (["--step-ms", "1", "--gradient-mb", "1", "--link", "nvlin"], "`--link` is not a rate"),
        (["--step-ms", "1", "--gradient-mb", "1", "--gpus", "8..1"], "is not a number of GPUs"),
        (["--step-ms", "1", "--gradient-mb", "1", "--picture", "a.jpg"], "not a PNG"),
    ],
)
def test_contradictory_arguments_are_named(words, what, capsys):
    assert main(["plan", *words]) == 2
    assert re.search(what, capsys.readouterr().err)


def test_numbers_of_gpus_are_ranges_or_lists():
    assert plan.numbers_of_gpus("3..20") == [3, 4, 8, 16, 20]
    assert plan.numbers_of_gpus("24,8") == [8, 24]
    assert plan.numbers_of_gpus("7") == [7]
