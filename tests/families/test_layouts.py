"""Training of `fsdp` on two ranks equals transformers, for every layout that the table of families lists.

`make test` trains one type of each kind, and `make test-slow` all types. `checks.py` states the batch and the measure.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import run_warm_ranks

from camshaft.config.engine import Head
from camshaft.config.families.table import known_families

from .checks import HEADS, Outcome, check_head, float64_code, write_model

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("language-model head", {}),
    "sequence": ("sequence parallelism", {"ulysses_sequence_parallel_size": 2}),
    "tensor": ("tensor parallelism", {"tensor_parallel_size": 2}),
}
"""Feature of the table and options of the engine, by layout of two ranks."""
KINDS = {
    "qwen3": "tensor",  # dense
    "gemma3_text": "tensor",  # sliding windows
    "phi3": "tensor",  # fused matrices
    "gpt2": "sequence",  # learned positions
    "biogpt": "sharded",  # layers without a declared class
    "qwen3_moe": "sequence",  # experts
    "qwen2_moe": "tensor",  # and a shared expert
    "deepseek_v3": "sharded",  # latent attention and experts
    "deepseek_v4": "sharded",  # weights that short rows do not use
    "youtu": "tensor",  # latent attention
    "gemma2": "sequence",  # soft-caps
    "gpt_oss": "sequence",  # attention sinks
    "qwen3_next": "sharded",  # gated linear attention and experts
    "qwen3_5_text": "tensor",  # gated linear attention
    "falcon": "sharded",  # right-padded rows with attention
    "mamba": "sharded",  # right-padded rows with a recurrent state
    "falcon_h1": "sharded",  # right-padded rows with both
}
"""One type of each kind, with the layout in which `make test` trains it."""

KEEPS_FLOAT32 = ("ernie4_5_moe", "hunyuan_v1_moe", "olmo_hybrid", "zamba")
"""Types with some float32 weights in a float64 model. FSDP trains them in float32, which is not compared here."""


def cases() -> Iterator[Any]:
    """Yield each supported layout of each type, for one type of each kind with all heads."""
    for model_type, family in known_families().items():
        for layout, (feature, _) in LAYOUTS.items():
            if family.support(feature)["fsdp"]:
                continue
            for head in HEADS if model_type in KINDS else HEADS[:1]:
                is_fast = KINDS.get(model_type) == layout and head == "causal_lm"
                marks = () if is_fast else pytest.mark.slow
                yield pytest.param(model_type, layout, head, marks=marks, id=f"{model_type}-{layout}-{head}")


def check_on_ranks(model_type: str, folder: str, head: Head, options: dict[str, Any]) -> Outcome:
    with float64_code(model_type):
        return check_head(Path(folder), head, options)


@pytest.mark.parametrize(
    "classes",
    [
        "DeepseekV4Attention,DeepseekV4DecoderLayer",  # compressors in an inner unit
        pytest.param("DeepseekV4SparseMoeBlock", marks=pytest.mark.slow),  # and in the root unit
    ],
)
def test_weights_that_short_rows_do_not_use_are_reduced_in_any_unit(classes: str, tmp_path: Path) -> None:
    write_model("deepseek_v4", tmp_path)
    options = {"wrap_policy": {"transformer_layer_cls_to_wrap": classes}}
    for outcome in run_warm_ranks(check_on_ranks, 2, "deepseek_v4", str(tmp_path), "causal_lm", options, timeout=300):
        assert outcome.status == "equal", outcome.detail


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
@pytest.mark.parametrize(("model_type", "layout", "head"), list(cases()))
def test_training_on_two_ranks_equals_transformers(model_type: str, layout: str, head: Head, tmp_path: Path) -> None:
    write_model(model_type, tmp_path)
    options = LAYOUTS[layout][1]
    for outcome in run_warm_ranks(check_on_ranks, 2, model_type, str(tmp_path), head, options, timeout=300):
        assert outcome.status == ("refused" if model_type in KEEPS_FLOAT32 else "equal"), outcome.detail
