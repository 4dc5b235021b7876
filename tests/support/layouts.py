"""The layouts and features of the sharded engine that the tests combine, one by one and in pairs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from camshaft.config.engine import LoRAConfig


@dataclass(frozen=True)
class Layout:
    """A number of ranks and the config fields of the engine on them."""

    world: int
    common_fields: dict[str, Any] = field(default_factory=dict)
    strategy: str = "fsdp2"


def _options(**options: Any) -> dict[str, Any]:
    return {"options": options}


FEATURES: dict[str, dict[str, Any]] = {
    "hsdp": _options(fsdp_size=2),
    "sp2": _options(ulysses_sequence_parallel_size=2),
    "tp2": _options(tensor_parallel_size=2),
    "lora": {"lora": LoRAConfig(rank=2, alpha=6)},
    "offload": _options(param_offload=True, grad_offload=True, optimizer_offload=True),
    "offload_policy": _options(offload_policy=True),
    "checkpointing": {"enable_gradient_checkpointing": True},
    "selective": {"enable_gradient_checkpointing": True, "gradient_checkpointing_mode": "selective"},
    "activation_offload": _options(activation_offload=True),
    "dynamic": {"max_tokens": 24, "infer_max_tokens": 24},
    "gathered": _options(reshard_after_forward=False, forward_prefetch=True),
    "wrap_by_size": _options(wrap_policy={"min_num_params": 2000}),
    "async_save": _options(async_save=True),
    "compiled": _options(use_torch_compile=True),
}

REFUSED = {
    ("sp2", "tp2"): "both shard the attention heads",
    ("tp2", "lora"): "LoRA is not supported with tensor_parallel_size",
    ("offload", "offload_policy"): "Set either offload_policy or the others",
    ("tp2", "compiled"): "does not compile",
    ("selective", "compiled"): "single operators",
    ("selective", "wrap_by_size"): "gathers units inside a layer",
}
"""Unsupported pairs, with a part of the error message at construction."""

SAME = {("checkpointing", "selective")}
"""Equivalent pairs."""


def together(*names: str) -> dict[str, Any]:
    """Return one config with the fields of several features."""
    fields: dict[str, Any] = {}
    for name in names:
        for key, value in FEATURES[name].items():
            fields[key] = {**fields.get(key, {}), **value} if key == "options" else value
    return fields


MESH = ("hsdp", "sp2", "tp2")
"""Features that need more than two ranks in combination with data parallelism."""

ALONE = {
    "one": Layout(1),
    "two": Layout(2),
    "four": Layout(4),
    **{name: Layout(4 if name in MESH else 2, together(name)) for name in FEATURES},
}
OLDER = {
    f"fsdp1_{name}": Layout(4 if name == "hsdp" else 2, together(*names), "fsdp1")
    for name, names in {
        "two": (), "hsdp": ("hsdp",), "sp2": ("sp2",), "gathered": ("gathered",), "selective": ("selective",),
        "dynamic": ("dynamic",), "wrap_by_size": ("wrap_by_size",), "activation_offload": ("activation_offload",),
        "async_save": ("async_save",), "hsdp+sp2": ("hsdp", "sp2"),
    }.items()
}  # fmt: skip
"""Features of the older wrapper."""

PAIRS = {
    f"{a}+{b}": Layout(4 if a in MESH or b in MESH else 2, together(a, b))
    for a, b in itertools.combinations(FEATURES, 2)
    if (a, b) not in REFUSED and (a, b) not in SAME
}
