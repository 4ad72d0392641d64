"""The tests of Keras that fail on a distributed model, and why.

A page of the documentation is made of `DIFFERENCES`. The suite fails where a test that is named
here passes, or does not exist, unless whether it passes is up to the machine.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Difference:
    """Something of Keras that does not hold for a distributed model.

    Args:
        what: What a user would miss, as a sentence.
        why: The reason.
        tests: Patterns of the names of Keras's tests that show it.
        replicas: On how many replicas.
        everywhere: Whether the tests fail on each machine.
    """

    what: str
    why: str
    tests: tuple[str, ...]
    replicas: tuple[int, ...] = (1, 2)
    everywhere: bool = True


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "With `steps_per_execution`, the last call of an epoch runs the steps that are left of it.",
        "Keras tells callbacks of batches that do not exist, and where `steps_per_epoch` is not a "
        "multiple, it takes more steps than that.",
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
        "A share of a batch rounds as the whole batch does.",
        "TensorFlow's kernels add in another order for another number of rows; it is 2e-6 here.",
        (
            "layers/preprocessing/stft_spectrogram_test.py::TestSpectrogram::"
            "test_spectrogram_channels_broadcasting",
        ),
        (2,),
        # Kernels are chosen by what the processor can: on some the difference is below the 1e-6
        # that the test allows.
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
