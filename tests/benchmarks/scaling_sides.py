"""What a worker of bench_scaling.py runs: one training, in one of three ways.

    python tests/benchmarks/scaling_sides.py ours|raw|ddp NETWORK RANK ADDRESS[,ADDRESS...]

It runs on the core with the number of its rank. After two steps it prints how many weights the
network has; then it reads numbers of steps from standard input, and prints how long a step took.
"""

import json
import os
import sys
import time

BATCH = 32
IMAGE = 32
CHANNELS = ((32, 64), (128, 128), (256,))
"""Filters of the convolutions; each group ends with a pooling that halves the image."""
HIDDEN, CLASSES = 256, 10
LAYERS, WIDTH = 100, 50
"""Many small layers of 10 kB each."""
WIDE = 1000
"""One large layer of 4 MB."""
WORDS, LENGTH, FEATURES = 100_000, 20, 16
"""An embedding of 6.4 MB, of which a batch needs a hundredth."""


def keras_network(name):
    """The network in Keras."""
    import keras

    if name == "layers":
        layers = [keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(LAYERS)]
        return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES)])
    if name == "dense":
        layers = [keras.layers.Dense(WIDE, "relu"), keras.layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input((WIDE,)), *layers])
    if name == "embedding":
        layers = [keras.layers.Embedding(WORDS, FEATURES), keras.layers.GlobalAveragePooling1D()]
        words = keras.Input((LENGTH,), dtype="int64")
        return keras.Sequential([words, *layers, keras.layers.Dense(CLASSES)])
    layers = [keras.Input((IMAGE, IMAGE, 3))]
    for group in CHANNELS:
        layers += [keras.layers.Conv2D(n, 3, padding="same", activation="relu") for n in group]
        layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), keras.layers.Dense(HIDDEN, activation="relu")]
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])


def torch_network(name):
    """The network in PyTorch."""
    from torch import nn

    if name == "layers":
        pairs = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)]
        return nn.Sequential(*(part for pair in pairs for part in pair), nn.Linear(WIDTH, CLASSES))
    if name == "dense":
        return nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, CLASSES))
    if name == "embedding":
        return nn.Sequential(nn.EmbeddingBag(WORDS, FEATURES), nn.Linear(FEATURES, CLASSES))
    layers, before = [], 3
    for group in CHANNELS:
        for channels in group:
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    pixels = (IMAGE // 2 ** len(CHANNELS)) ** 2 * before
    layers += [nn.Flatten(), nn.Linear(pixels, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*layers)


def examples(name, count):
    """Random inputs and labels."""
    import numpy as np

    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, count)
    if name == "embedding":
        return random.integers(0, WORDS, (count, LENGTH)), labels
    shape = {"layers": (WIDTH,), "dense": (WIDE,)}.get(name, (IMAGE, IMAGE, 3))
    return random.random((count, *shape), "float32"), labels


def ours(name, rank, addresses):
    """`fit` of a distributed model; the same script on each worker."""
    import keras

    import keras_multigpu as kmg

    class Ends(keras.callbacks.Callback):
        """When each step ended."""

        def on_train_begin(self, logs=None):
            self.times = []

        def on_train_batch_end(self, batch, logs=None):
            self.times.append(time.perf_counter())

    options = json.loads(os.environ.get("SCALING_OURS", "{}"))
    accumulates = {"gradient_accumulation_steps": options.pop("accumulates", None)}
    # Without hooks that may look at the model, sums of gradients may wait.
    Ends.async_safe = options.pop("waits", True)
    model = kmg.distribute(keras_network(name), kmg.strategy(), **options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001, **accumulates), loss)
    whole, ends = BATCH * len(addresses), Ends()

    def steps(count):
        x, y = examples(name, whole * (count + 1))
        model.fit(x, y, batch_size=whole, shuffle=False, verbose=0, callbacks=[ends])
        return (ends.times[-1] - ends.times[0]) / count

    return steps, model.count_params()


def raw(name, rank, addresses):
    """A custom loop under TensorFlow's strategy, as in its tutorial."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    images, labels = map(tf.constant, examples(name, BATCH))
    with strategy.scope():
        network = keras_network(name)
        weights = [tf.Variable(variable.value) for variable in network.trainable_variables]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def on_replica():
        with tf.GradientTape() as tape:
            predictions, _ = network.stateless_call(weights, [], images, training=True)
            value = loss(labels, predictions) / (BATCH * len(addresses))
        gradients = tape.gradient(value, weights)
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        for weight, gradient in zip(weights, summed, strict=True):
            # The gradient of an embedding is sparse.
            weight.assign_sub(0.001 * tf.convert_to_tensor(gradient))
        return value

    @tf.function
    def step():
        return strategy.run(on_replica)

    def steps(count):
        step()
        start = time.perf_counter()
        for _ in range(count):
            float(step())
        return (time.perf_counter() - start) / count

    return steps, network.count_params()


def ddp(name, rank, addresses):
    """PyTorch's DistributedDataParallel, summing with gloo."""
    import torch
    from torch import distributed
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    rendezvous = f"tcp://{addresses[0]}"
    distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=len(addresses)
    )
    network = torch.nn.parallel.DistributedDataParallel(torch_network(name))
    optimizer = torch.optim.SGD(network.parameters(), 0.001)
    images, labels = map(torch.tensor, examples(name, BATCH))
    if images.ndim == 4:
        images = images.permute(0, 3, 1, 2).contiguous()

    def step():
        optimizer.zero_grad()
        value = cross_entropy(network(images), labels)
        value.backward()
        optimizer.step()
        return float(value)

    def steps(count):
        step()
        start = time.perf_counter()
        for _ in range(count):
            step()
        return (time.perf_counter() - start) / count

    return steps, sum(weight.numel() for weight in network.parameters())


def main():
    """Train as many steps as standard input asks for."""
    side, name, rank, addresses = *sys.argv[1:3], int(sys.argv[3]), sys.argv[4].split(",")
    cores = sorted(os.sched_getaffinity(0))
    # Before anything starts one thread for each core.
    os.sched_setaffinity(0, {cores[rank]})
    if len(addresses) > 1 and side != "ddp":
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    steps, weights = {"ours": ours, "raw": raw, "ddp": ddp}[side](name, rank, addresses)
    steps(2)
    print(json.dumps(weights), flush=True)
    for line in sys.stdin:
        print(json.dumps(steps(int(line))), flush=True)
    # The other worker may have ended already; the shutdown must not wait for it.
    os._exit(0)


if __name__ == "__main__":
    main()
