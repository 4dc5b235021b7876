"""Checks that engines with models of transformers have in common.

list(packed_conflicts({"model_type": "gpt_oss"}, EngineModel(path="models/mine")))
"""

from collections.abc import Iterator, Mapping
from typing import Any

from camshaft.config.engine import Conflict, EngineModel
from camshaft.config.families.known import missing_feature
from camshaft.config.families.support import Feature, alternative, refusal


def packed_conflicts(values: Mapping[str, Any], model: EngineModel) -> Iterator[Conflict]:
    """Yield why an engine cannot train models with these values."""
    features: tuple[Feature, ...] = ("training", "fused log-probs") if model.head == "causal_lm" else ("training",)
    if messages := [message for feature in features if (message := refusal(feature, values))]:
        yield Conflict("model.path", "; ".join([*messages, alternative(values)]))
    if model.lora is not None and (reason := missing_feature("LoRA", values)):
        message = f"LoRA is not supported for {values['model_type']} models: {reason}"
        yield Conflict("model.path", f"{message}; train all weights, or choose another model family")


def sequence_conflicts(values: Mapping[str, Any], option: str, size: int) -> Iterator[Conflict]:
    """Yield why Ulysses sequence parallelism over `size` ranks, the value of `option`, does not support a model."""
    if size > 1 and (message := refusal("sequence parallelism", values)):
        yield Conflict(option, message, (f"{option}=1",))
    yield from size_conflicts(values, ("num_attention_heads",), option, size)


def size_conflicts(values: Mapping[str, Any], keys: tuple[str, ...], option: str, size: int) -> Iterator[Conflict]:
    """Yield the sizes of a model that `size` ranks, the value of `option`, cannot split evenly."""
    for key in keys:
        if isinstance(number := values.get(key), int) and number % size:
            yield Conflict(
                option, f"{key}={number} of this {values['model_type']} model is not divisible by {option}={size}"
            )
