"""How long a step will take on N GPUs: what each computes, and what all wait for.

A message over a link takes its latency and its bytes over the link's rate (the alpha-beta model).
Gradients are summed in buckets while the backward pass still runs, in whichever of two ways is
faster: around a ring of all GPUs, or inside each host first and then between hosts.
"""

import math
from typing import NamedTuple

# The part of a step in which gradients become ready: those by the inputs and those by the weights
# take as many operations each as the forward pass.
BACKWARD = 2 / 3

# These two were chosen once, so that published measurements are met; docs/api/plan.md lists them.
USABLE = 0.65
"""The part of a fast link's rate that sums of gradients reach."""

SLOW = 1e9 / 8
"""Bytes a second up to which sums reach the full rate of a link."""

# How much steps of equal GPUs differ: their standard deviation. All wait for the slowest.
SPREAD = 0.02

NOTICED = 0.05
"""The part of a step from which a loss is worth a word."""

Yielded = tuple[tuple[float, float], ...]
"""Of each layer, the last one first: what part of the gradients it has, and of the work."""

EVENLY: Yielded = ((1, 1),)


class Link(NamedTuple):
    """What connects GPUs, or hosts, in bytes a second and seconds."""

    rate: float
    latency: float


class Training(NamedTuple):
    """What is to be trained, on what.

    Attributes:
        step: Seconds of a step on one GPU.
        gradient: Bytes of all gradients.
        batch: Examples of a GPU's batch.
        gpus_per_host: GPUs of a host.
        inside: The link between the GPUs of a host.
        between: The link of a host to the others.
        input_rate: How many examples a second a host can read and decode.
        yielded: How the layers yield their gradients.
    """

    step: float
    gradient: float
    batch: int
    gpus_per_host: int
    inside: Link
    between: Link
    input_rate: float = math.inf
    yielded: Yielded = EVENLY


class Prediction(NamedTuple):
    """A step on some GPUs, in seconds.

    Attributes:
        gpus: How many.
        hosts: In how many hosts.
        step: All of it.
        lost: What is lost, by its cause.
        examples: Examples a second of all GPUs.
        efficiency: Those of one GPU, times the GPUs, are 1.
        host_examples: Examples a second that each host has to read.
    """

    gpus: int
    hosts: int
    step: float
    lost: dict[str, float]
    examples: float
    efficiency: float
    host_examples: float

    @property
    def bottleneck(self) -> str:
        cause, seconds = max(self.lost.items(), key=lambda item: item[1])
        return cause if seconds > NOTICED * self.step else "the GPUs"


def predicted(training: Training, gpus: int) -> Prediction:
    hosts = math.ceil(gpus / training.gpus_per_host)
    # About by how much the largest of so many normally distributed numbers exceeds their mean.
    slowest = training.step * (1 + SPREAD * math.sqrt(2 * math.log(gpus)))
    summed = end_of_sums(training, gpus, slowest)
    of_host = min(gpus, training.gpus_per_host) * training.batch
    step = max(summed, of_host / training.input_rate)
    link = "the link between hosts" if hosts > 1 else "the link inside a host"
    lost = {
        "the slowest GPU": slowest - training.step,
        link: summed - slowest,
        "the input": step - summed,
    }
    efficiency = training.step / step
    examples = gpus * training.batch / step
    return Prediction(gpus, hosts, step, lost, examples, efficiency, of_host / step)


def end_of_sums(training: Training, gpus: int, step: float) -> float:
    """When all buckets are summed; they become ready one after another in the backward pass."""
    from keras_multigpu.training.exchange.packing import filling

    if gpus == 1:
        return step
    left_hosts = end = 0.0
    left = training.gradient
    while left > 0:
        bucket = min(left, filling(left))
        left -= bucket
        inside, between = sum_of_bucket(training, bucket, gpus)
        worked = work_done(training.yielded, 1 - left / training.gradient)
        ready = step * (1 - BACKWARD * (1 - worked))
        # One bucket is inside the hosts while another one is between them.
        left_hosts = max(left_hosts, ready) + inside
        end = max(end, left_hosts) + between
    return end


def work_done(yielded: Yielded, gradients: float) -> float:
    """What part of the backward pass is done when such a part of the gradients is there."""
    done = 0.0
    for part, work in yielded:
        done += work * min(1, gradients / part)
        gradients -= part
        if gradients <= 0:
            break
    return done


def sum_of_bucket(training: Training, size: float, gpus: int) -> tuple[float, float]:
    """Seconds that a sum over all GPUs takes inside hosts and between them, the faster way."""
    inside, between = training.inside, training.between
    in_host = min(gpus, training.gpus_per_host)
    hosts = math.ceil(gpus / in_host)
    if hosts == 1:
        return ring(size, gpus, inside), 0.0
    slower = Link(min(inside.rate, between.rate), max(inside.latency, between.latency))
    around_all = 0.0, ring(size, gpus, slower)
    # By the longer of two times: while one bucket is inside hosts another is between them.
    return min(around_all, (ring(size, in_host, inside), halving(size, hosts, between)), key=max)


def ring(size: float, ranks: int, link: Link) -> float:
    """A sum around a ring: each rank sends a piece to its neighbour `2 (ranks - 1)` times."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / reached(link.rate))


def halving(size: float, ranks: int, link: Link) -> float:
    """A sum by halves with ever nearer ranks, and back: as many bytes as a ring, fewer messages."""
    messages = 2 * math.ceil(math.log2(ranks))
    sent = 2 * (ranks - 1) / ranks * size
    return messages * link.latency + sent / reached(link.rate)


def reached(rate: float) -> float:
    return max(min(rate, SLOW), USABLE * rate)
