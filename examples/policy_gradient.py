"""Learn from rewards with a policy gradient, whose actions are drawn inside the step.

    python examples/policy_gradient.py                  # all GPUs, or one CPU
    python examples/policy_gradient.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import tensorflow as tf

import keras_multigpu as kmg


def load():
    """The digits as `(images, labels)`."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels.astype("int32")


def build_policy():
    """The logits of ten actions."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def main(epochs=40, replicas=None):
    """Train; returns the mean reward of the last epoch."""
    images, labels = load()
    # --8<-- [start:loop]
    kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    policy = build_policy()
    optimizer = keras.optimizers.Adam(0.01)
    seeds = keras.random.SeedGenerator(1)
    mean_reward = keras.metrics.Mean()
    baseline = tf.Variable(0.0)

    @kmg.function
    def train_step(states, answers):
        with tf.GradientTape() as tape:
            logits = policy(states, training=True)
            actions = keras.random.categorical(logits, 1, seed=seeds)[:, 0]
            rewards = tf.cast(tf.equal(tf.cast(actions, tf.int32), answers), tf.float32)
            chosen = tf.nn.sparse_softmax_cross_entropy_with_logits(actions, logits)
            loss = tf.reduce_mean(chosen * (rewards - baseline))
        gradients = tape.gradient(loss, policy.trainable_variables)
        optimizer.apply(gradients, policy.trainable_variables)
        # The mean of the whole batch, on any number of replicas.
        baseline.assign(0.9 * baseline + 0.1 * tf.reduce_mean(rewards))
        mean_reward.update_state(rewards)

    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000).batch(64)
    for epoch in range(epochs):
        mean_reward.reset_state()
        for states, answers in dataset:
            train_step(states, answers)
        print(f"epoch {epoch + 1}: mean reward {mean_reward.result():.3f}")
    # --8<-- [end:loop]
    return float(mean_reward.result())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
