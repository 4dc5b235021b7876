"""Facts about the model types of the tested transformers, and the architectures that vLLM and SGLang list.

    known_types()["qwen3"].checkpoint                       # "Qwen/Qwen3-8B"
    "Qwen3ForCausalLM" in served_models()["vllm"].architectures

`known.json` is written by `python -m tests.families.known`, and `served.json` by `python tools/served_models.py`.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).with_name("known.json")
SERVED = Path(__file__).with_name("served.json")
SIZES = re.compile(r"hidden_size|intermediate_size|num_.*|.*head_dim|.*max_position_embeddings|rope_parameters")
"""Matches the keys of sizes. Their defaults may depend on other values of a config."""


@dataclass(frozen=True)
class KnownType:
    """Facts about a decoder-only model type of transformers."""

    architecture: str
    """Class of the causal language model."""
    checkpoint: str | None
    """Model of the hub that transformers documents."""
    values: Mapping[str, Any]
    """Values of the default config that decide what is supported. Kinds of layers are listed once."""
    lacks: Mapping[str, str] = field(default_factory=dict[str, str])
    """Features that the layers of the model do not support, with the reason."""
    tested: str | None = None
    """Command that compares training with transformers; None for a refused type."""


@dataclass(frozen=True)
class ServedModels:
    """Architectures in the registry of a library for generation."""

    version: str
    architectures: frozenset[str]


@functools.cache
def known_types() -> Mapping[str, KnownType]:
    """Return the decoder-only types of the tested transformers."""
    types = json.loads(KNOWN.read_text(encoding="utf-8"))["types"]
    return {name: KnownType(**facts) for name, facts in types.items()}


@functools.cache
def tested_transformers() -> str:
    """Return the version of transformers that `known_types` describes."""
    return json.loads(KNOWN.read_text(encoding="utf-8"))["transformers"]


@functools.cache
def served_models() -> Mapping[str, ServedModels]:
    """Return the architectures in the registries of the tested vLLM and SGLang."""
    content = json.loads(SERVED.read_text(encoding="utf-8"))
    return {name: ServedModels(item["version"], frozenset(item["architectures"])) for name, item in content.items()}


def complete_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a config.json with the defaults of keys that it omits, except sizes."""
    known = known_types().get(str(values.get("model_type")))
    return values if known is None else {k: v for k, v in known.values.items() if not SIZES.fullmatch(k)} | dict(values)


def missing_feature(feature: str, values: Mapping[str, Any]) -> str | None:
    """Return why the layers of models of this type do not support `feature`; None if they do or are not known."""
    known = known_types().get(str(values.get("model_type")))
    return None if known is None else known.lacks.get(feature)
