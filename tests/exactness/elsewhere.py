"""What `make test` leaves out of the table of trainings, and where it is proven."""

BY_PROOF = {
    "test_a_last_batch_may_have_any_size": (
        "partial last batch; convnet; BatchNorm, convnet; batch smaller than the replicas"
    ),
    "test_assigned_in_steps.py": "Loss subclass; jit_compile; run_eagerly; metric owned by a layer",
    "test_callbacks_of_workers.py": "TensorBoard",
    "test_every_loss_and_optimizer.py": (
        "SGD, momentum; Adam, amsgrad; AdamW; Lamb; Nadam; Lion; RMSprop; Adafactor; "
        "global_clipnorm; clipvalue; AUC, Precision, Recall, F1Score; top-k, MeanIoU; "
        "R2Score, root of the mean; metrics that add up, and others beside them; loss that "
        "relates examples; Muon; MultiOptimizer"
    ),
    "test_killed_training.py": "CSVLogger",
    "test_own_train_steps.py": "train_step calls super",
    "test_rates.py": "learning rate schedule",
    "test_resumed_state.py": "SwapEMAWeights",
    "test_saving.py": "ModelCheckpoint; BackupAndRestore",
    "test_step overridden": "predict_step overridden",
    "test_trainings.py": "float64",
    "BatchNorm, masked": "masked words, pooling",
    "BatchNorm, partial batches": "BatchNorm, full batches; BatchNorm(synchronized=True)",
    "EMA with overwrite": "EMA",
    "ReduceLROnPlateau": "validation data; LearningRateScheduler; EarlyStopping",
    "a loss of each kind, one for each output": (
        "reduction mean; reduction sum; function loss; function loss, sample weights; "
        "scalar-valued function loss; Loss subclass with its own `__call__`"
    ),
    "an output without a loss": (
        "outputs as list, loss weights; outputs as dict, sample weights, loss weights"
    ),
    "central storage, train_step and BatchNorm": (
        "central storage, predict_step; central storage, jit_compile"
    ),
    "class weights": "loss and metrics as strings; crossentropy and accuracy as strings",
    "full batches": "odd batch",
    "gradient accumulation, clipnorm, EMA": "clipnorm; gradient accumulation",
    "loss object": (
        "loss object of the whole batch; sums over a mask, penalties, clipping by hand; WGAN-GP"
    ),
    "mask in the loss, GRU": "masked words, LSTM; embedding",
    "mask in the loss, mean_with_sample_weight": "reduction mean_with_sample_weight",
    "mask in the loss, sample weights": "mask in the loss; sample weights for each timestep",
    "metric owned by the model": (
        "subclassed model; compute_metrics overridden; custom metrics, a maximum and a count "
        "of batches"
    ),
    "mixed_float16, overflow on one replica": "mixed_float16, loss scaling",
    "penalties of weights, activities and a layer": (
        "kernel regularizers; activity regularizer; add_loss in a layer"
    ),
    "train_step overridden, sample weights": (
        "train_step overridden; train_step overridden, mask in the loss"
    ),
    "trainable toggled between fits": "frozen layer; BatchNorm, frozen; fit twice",
    "weighted metrics": "sample weights; reduction sum_over_batch_size",
}
"""By a test, or by the row that runs: the rows that it proves."""

ELSEWHERE = {name: proof for proof, names in BY_PROOF.items() for name in names.split("; ")}
