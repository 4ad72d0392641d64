"""Models of keras-hub, of one block with random weights, train on replicas as on one device.

Only where keras-hub is installed, which the tests do not ask for. They gather nothing but the rows
of embeddings that change.
"""

from typing import Any

import keras
import numpy as np
import pytest
from helpers.all_replicas import ALL_REPLICAS, first_rows
from keras import layers

from exactness.cases import Case
from exactness.runs import require_equal

keras_hub = pytest.importorskip("keras_hub")
pytestmark = [
    # Keras says so of layers of keras-hub that take masks in their own way, and of weights that
    # only its heads use.
    pytest.mark.filterwarnings("ignore:Layer '.* was passed an input with a mask"),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

ROWS, WORDS, KINDS = 6, 6, 20
BLOCK = {"vocabulary_size": KINDS, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16}
HEADS = {**BLOCK, "num_heads": 2}
SHORT = {**HEADS, "max_sequence_length": WORDS}
GROUPED = {**BLOCK, "num_query_heads": 2, "num_key_value_heads": 1}
EXPERTS = {**GROUPED, "num_experts": 3, "top_k": 2}
PATCHES = {"image_shape": (16, 16, 3), "patch_size": 8, "num_layers": 1, "num_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "Albert": {**SHORT, "embedding_dim": 8},
    "Bart": SHORT,
    "Bert": SHORT,
    "DebertaV3": {**SHORT, "bucket_size": 4},
    "DeiT": {**PATCHES, "hidden_dim": 8, "intermediate_dim": 16},
    "DenseNet": {
        "stackwise_num_repeats": [1, 1],
        "growth_rate": 4,
        "image_shape": (32, 32, 3),
    },
    "FNet": {**BLOCK, "max_sequence_length": WORDS},
    "GPT2": SHORT,
    "Gemma": {**GROUPED, "head_dim": 4},
    "Llama": GROUPED,
    "Mixtral": {**EXPERTS, "sliding_window": 4},
    "QwenMoe": {**EXPERTS, "moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 8},
    "RWKV7": {
        "vocabulary_size": KINDS,
        "num_layers": 1,
        "hidden_size": 8,
        "head_size": 4,
        "intermediate_dim": 16,
    },
    "SwinTransformer": {
        "image_shape": (32, 32, 3),
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
    },
    "T5": HEADS,
    "ViT": {**PATCHES, "hidden_dim": 8, "mlp_dim": 16},
    "XLNet": HEADS,
}
# Its mask is reshaped, not transposed, so that examples are torn apart.
TORN = {"XLNet": "Reshape"}


def model_of(name: str) -> keras.Model:
    body = getattr(keras_hub.models, f"{name}Backbone")(**MODELS[name])
    out = body.output
    if isinstance(out, dict):
        out = out.get("decoder_sequence_output", out.get("sequence_output"))
    pooled = layers.GlobalAveragePooling1D() if None in out.shape[1:] else layers.Flatten()
    return keras.Model(body.input, layers.Dense(2)(pooled(out)))


def values(name: str, x: Any) -> np.ndarray:
    """Numbers for an input of this name; every second sentence is shorter."""
    draw, shape = (
        np.random.default_rng(0),
        (ROWS, *(WORDS if n is None else n for n in x.shape[1:])),
    )
    if "mask" in name:
        mask = np.ones(shape, "int32")
        mask[::2, -2:] = 0
        return mask
    if "int" in x.dtype:
        return draw.integers(0, 2 if "segment" in name else KINDS, shape).astype("int32")
    return draw.uniform(0, 1, shape).astype("float32")


# Its layers are tried in test_every_layer.py.
@pytest.mark.parametrize("replicas", (2, 3) if ALL_REPLICAS else (2,))
@pytest.mark.parametrize("name", first_rows(MODELS))
def test_a_model(name, replicas):
    """Trained on a batch of five examples and on one, and asked for predictions."""
    given = model_of(name).input
    x = {n: values(n, each) for n, each in given.items()} if isinstance(given, dict) else None
    x = values("", given) if x is None else x
    case = Case(
        "",
        lambda: model_of(name),
        lambda: {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse"},
        lambda: (x, np.ones((ROWS, 2), "float32"), None),
        batch_size=5,
        fit=lambda directory: {"epochs": 1},
        after=("predict",),
        gathers=f"{'ResourceScatterSub ' * isinstance(given, dict)}{TORN.get(name, '')}",
    )
    require_equal(case, replicas)
