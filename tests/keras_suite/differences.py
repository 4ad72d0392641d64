"""The tests of Keras that fail on a distributed model, and why.

A page of the documentation lists `DIFFERENCES`. The suite fails if a test named here passes or
does not exist, unless the outcome depends on the machine.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Difference:
    """A behaviour of Keras that a distributed model does not share.

    Args:
        what: What a user would notice, as a sentence.
        why: The reason.
        tests: Patterns of the names of Keras's tests that show it.
        replicas: The numbers of replicas that show it.
        everywhere: Whether the tests fail on every machine.
    """

    what: str
    why: str
    tests: tuple[str, ...]
    replicas: tuple[int, ...] = (1, 2)
    everywhere: bool = True


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "With `steps_per_execution`, the last call of an epoch runs only the steps that are left.",
        "Keras reports batches to callbacks that do not exist, and runs more than "
        "`steps_per_epoch` steps when that is not a multiple.",
        (
            "trainers/trainer_test.py::TestTrainer::test_steps_per_execution_steps_count_3_*",
            "trainers/trainer_test.py::TestTrainer::test_steps_per_execution_steps_count_101_*",
            "trainers/trainer_test.py::TestTrainer::"
            "test_steps_per_execution_steps_count_unknown_dataset_size_*",
            "trainers/trainer_test.py::TestTrainer::"
            "test_steps_per_execution_steps_per_epoch_match_multi_epoch_*",
            "trainers/trainer_test.py::TestTrainer::"
            "test_steps_per_execution_unrolled_steps_steps_count_*",
        ),
    ),
    Difference(
        "A share of a batch may round differently from the whole batch.",
        "TensorFlow's kernels add in another order for another number of rows; here by 2e-6.",
        (
            "layers/preprocessing/stft_spectrogram_test.py::TestSpectrogram::"
            "test_spectrogram_channels_broadcasting",
        ),
        (2,),
        # The kernel depends on the processor: on some the difference stays below the 1e-6 that
        # the test allows.
        everywhere=False,
    ),
)

# Not ours: they fail without this package too, with the versions that are installed for tests.
KERAS_ALONE: tuple[Difference, ...] = (
    Difference(
        "A file of Keras's repository that its package does not hold.",
        "The test reads it.",
        (
            "saving/saving_lib_test.py::SavingBattleTest::"
            "test_legacy_load_skips_missing_nested_containers",
        ),
        (0, 1, 2),
    ),
)

# Tests that are to pass, by what is broken.
TO_BE_MENDED: tuple[Difference, ...] = ()
