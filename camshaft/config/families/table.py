"""Support of a family of models by engines and rollouts, found out by the code that rejects.

    explain("qwen3")                                        # `camshaft engines explain --model qwen3`
    find_family("models/mine").support("LoRA")              # reasons by engine, empty for engines that support it

`tools/families_page.py` writes the table of all families, docs/families.md.
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from camshaft.config.backends import ENGINES
from camshaft.config.engine_features import FEATURES, find_support
from camshaft.config.families.known import KnownType, complete_values, known_types, served_models, tested_transformers
from camshaft.config.families.support import INSTEAD, runs_padded, unsupported
from camshaft.config.model_settings import read_settings
from camshaft.errors import ConfigError

OMITTED = ("fsdp2", "fsdp1")
"""Engines that train the same families as `fsdp`; `fsdp1` lacks tensor parallelism and LoRA."""
LIBRARIES = {"vllm": "vLLM", "sglang": "SGLang"}
HEADS = {"language-model head": "train float32 weights", "value head": "value head", "reward head": "reward head"}
"""Features of `engine_features.py` that train a model with each head."""
FEATURES_OF_ENGINES = {
    "tensor parallelism": "tensor parallelism",
    "sequence parallelism": "sequence parallelism (Ulysses)",
    "pipeline parallelism": "pipeline parallelism",
    "expert parallelism": "expert parallelism",
    "LoRA": "LoRA",
    "prefix sharing": "prefix sharing",
}
"""Features of `engine_features.py` that depend on the family, by the name in the tables."""

Support = Mapping[str, str]
"""Reason of a rejection by engine; empty for an engine that supports the feature."""


class Family:
    """Support of a family, by the values of a config."""

    def __init__(self, values: Mapping[str, Any], known: KnownType | None):
        self.model_type, self.values, self.known = str(values["model_type"]), values, known

    @property
    def is_trained(self) -> bool:
        """True if at least one engine trains the language model."""
        return bool(supporting(self.support("language-model head")))

    def support(self, feature: str) -> Support:
        """Return the support of a key of `HEADS` or `FEATURES_OF_ENGINES` by each engine."""
        name = {**HEADS, **FEATURES_OF_ENGINES}[feature]
        found = {
            engine: find_support(FEATURES[name], backend.capabilities, self.values)
            for engine, backend in ENGINES.items()
            if engine not in OMITTED
        }
        return {
            engine: "" if support.status == "supported" else support.reason or str(support.status)
            for engine, support in found.items()
        }

    def is_served(self, library: str) -> bool:
        """Return True if the registry of a library for generation lists the class of the language model."""
        return self.known is not None and self.known.architecture in served_models()[library].architectures

    def reasons(self) -> list[str]:
        """Return why engines with models of transformers do not train the language model of this family."""
        return [*unsupported("training", self.values), *unsupported("fused log-probs", self.values)]


def known_families() -> dict[str, Family]:
    """Return the decoder-only families of the tested transformers, with their default configs."""
    return {name: Family({**known.values, "model_type": name}, known) for name, known in known_types().items()}


def find_family(model: str) -> Family:
    """Return the family of a model type, of a folder with config.json, or of a model in the Hugging Face cache."""
    if model in known_types():
        return known_families()[model]
    settings = read_settings(model, {})
    if settings is None or "model_type" not in settings.values:
        matches = difflib.get_close_matches(model, known_types(), n=1)
        hint = f" Did you mean {matches[0]}?" if matches else ""
        raise ConfigError(
            f"--model {model} is neither a decoder-only model type of transformers {tested_transformers()} nor a model "
            f"on this machine; set a type such as qwen3, or a folder with config.json.{hint}"
        )
    values = complete_values(settings.values)
    return Family(values, known_types().get(str(values["model_type"])))


def supporting(support: Support) -> list[str]:
    """Return the engines that support a feature."""
    return [engine for engine, reason in support.items() if not reason]


def explain(model: str) -> str:
    """Describe what engines and rollouts support for a model type, a folder, or a model in the Hugging Face cache."""
    family = find_family(model)
    known, reasons = family.known, family.reasons()
    lines = [f"{family.model_type} models" + (f" ({known.architecture}, {known.checkpoint})" if known else "")]
    if reasons:
        instead = INSTEAD.get(family.model_type)
        lines.append(f"rejected, because they have {' and '.join(reasons)}")
        lines += [f"use instead: {instead}"] if instead else []
    elif runs_padded(family.values):
        lines.append("trained on right-padded rows, because packed rows do not support them")
    supported = {feature: family.support(feature) for feature in (*HEADS, *FEATURES_OF_ENGINES)}
    for feature, support in supported.items():
        if supporting(support) or not reasons:
            lines.append(f"{feature}: {', '.join(supporting(support)) or 'no engine'}")
            lines += [f"  not {engine}: {reason}" for engine, reason in _own_reasons(feature, support, supported)]
    packed = unsupported("packed rows", family.values)
    lines.append(f"rollout.name=torch: {'rejected, because of ' + ' and '.join(packed) if packed else 'supported'}")
    for library, title in LIBRARIES.items():
        listed = "listed" if family.is_served(library) else "not listed"
        lines.append(f"{title} {served_models()[library].version}: {listed} in its registry (not run)")
    tested = known.tested if known else None
    lines.append(f"training compared with transformers: {tested or 'no'}")
    return "\n".join(lines).replace("`", "")


def _own_reasons(feature: str, support: Support, supported: Mapping[str, Support]) -> Iterator[tuple[str, str]]:
    """Yield the engines that support a feature only for other families, with the reason, which is given once."""
    for engine, reason in support.items():
        general = find_support(FEATURES[{**HEADS, **FEATURES_OF_ENGINES}[feature]], ENGINES[engine].capabilities)
        is_new = feature == "language-model head" or reason != supported["language-model head"][engine]
        if reason and is_new and general.status == "supported":
            yield engine, reason
