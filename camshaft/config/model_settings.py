"""Read the config.json of a model on the driver, without transformers.

settings = read_settings("models/tiny", {"attn_pdrop": 0.0})    # None if this machine lacks the file
settings.positions()                                            # ("n_positions", 1024)
settings.dropout()                                              # {"resid_pdrop": 0.1, "embd_pdrop": 0.1}
"""

import os.path
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from camshaft import hub
from camshaft.config.families.support import text_values
from camshaft.config.guards import is_list, is_mapping
from camshaft.storage import is_url, read_json_object

POSITION_KEYS = ("n_positions", "max_position_embeddings")
"""Keys of the number of positions. transformers accepts both names for a model with the first one."""
LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "biogpt")
"""Model types with a learned embedding for each position."""

DEFAULT_DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "gpt_bigcode": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "openai-gpt": {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "opt": {"dropout": 0.1},
    "biogpt": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "gpt_neox_japanese": {"attention_dropout": 0.1},
    "seed_oss": {"attention_dropout": 0.1, "residual_dropout": 0.1},
    "xglm": {"dropout": 0.1, "attention_dropout": 0.1},
}
"""Dropout probabilities of transformers' decoders for keys that config.json omits."""


@dataclass(frozen=True)
class ModelSettings:
    """Settings of a language model, which are those of the text model of a multimodal model."""

    values: Mapping[str, Any]

    def positions(self) -> tuple[str, int] | None:
        """Return the key and the number of positions of the model; None if it is unlimited, unknown or scaled.

        A model that scales its rotary embedding (`rope_scaling`) is not limited to its original positions.
        """
        scaling = [self.values.get(name) for name in ("rope_scaling", "rope_parameters")]
        if any(kind not in (None, "default") for kind in _rope_types(scaling)) or self.values.get("alibi"):
            return None
        key = next((key for key in POSITION_KEYS if _is_size(self.values.get(key))), None)
        return None if key is None else (key, self.values[key])

    def has_learned_positions(self) -> bool:
        """Return True if each position has a learned embedding, so that no setting adds positions."""
        return self.values.get("model_type") in LEARNED_POSITIONS

    def dropout(self) -> dict[str, float]:
        """Return the dropout probabilities that are not 0, by key."""
        values = {**DEFAULT_DROPOUT.get(str(self.values.get("model_type")), {}), **self.values}
        return {
            key: value
            for key, value in values.items()
            if is_dropout(key) and not key.startswith(("summary", "classifier"))
            if isinstance(value, float) and value > 0
        }

    def cache_bytes(self, tokens: int, item_size: int) -> int | None:
        """Return the size of the KV cache of one sequence; None if the model is not a decoder with attention."""
        layers, heads = self._number("num_hidden_layers", "n_layer"), self._number("num_attention_heads", "n_head")
        hidden = self.hidden_size()
        if layers is None or heads is None or hidden is None:
            return None
        kv_heads, head_dim = self._number("num_key_value_heads") or heads, self._number("head_dim") or hidden // heads
        return 2 * layers * kv_heads * head_dim * item_size * tokens

    def dtype(self) -> str | None:
        """Return the dtype of the weights; None if config.json does not have it."""
        value = self.values.get("dtype", self.values.get("torch_dtype"))
        return value if isinstance(value, str) else None

    def vocabulary_size(self) -> int | None:
        """Return the number of rows of the token embedding."""
        return self._number("vocab_size")

    def hidden_size(self) -> int | None:
        """Return the number of features of a token between two layers."""
        return self._number("hidden_size", "n_embd", "d_model")

    def _number(self, *keys: str) -> int | None:
        return next((self.values[key] for key in keys if _is_size(self.values.get(key))), None)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def is_dropout(key: str) -> bool:
    """Return True for a key of a dropout probability."""
    return "dropout" in key or key.endswith("pdrop")


def quantization(values: Mapping[str, Any]) -> str | None:
    """Return the method with which the weights of a model are quantized, from its config.json; None if they are not."""
    settings = values.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if is_mapping(settings) else settings
    return str(method or "quantization_config")


def quantization_problem(method: str) -> str:
    """Return the problem of a model with quantized weights, with the fix."""
    return (
        f"contains quantized weights (quantization_config of config.json: {method}), but QLoRA and training of "
        "quantized weights are not implemented. Use the unquantized model."
    )


def _rope_types(value: Any) -> Iterator[Any]:
    """Yield the types of rotary embeddings. Some models have one per kind of layer."""
    if is_mapping(value):
        yield value.get("rope_type", value.get("type"))
        yield from (kind for item in value.values() if is_mapping(item) for kind in _rope_types(item))
    elif is_list(value):
        yield from (kind for item in value for kind in _rope_types(item))


def local_model(path: str) -> Path | None:
    """Return the folder of a model or tokenizer on this machine, or None if it must be downloaded first."""
    if os.path.isdir(path):
        return Path(path)
    return None if is_url(path) else hub.cached_folder(path, weights=False)


def read_json(path: str, name: str) -> dict[str, Any] | None:
    """Return a JSON file of a model; None if it is missing or damaged, which the loader of the model reports."""
    folder = local_model(path)
    try:
        return None if folder is None else read_json_object(folder / name)
    except (OSError, ValueError):
        return None


def read_settings(path: str, override: Mapping[str, Any]) -> ModelSettings | None:
    """Return the settings of a model with `override_config`; None if its config.json cannot be read."""
    values = read_json(path, "config.json")
    if values is None:
        return None
    aliased = POSITION_KEYS if set(POSITION_KEYS) & override.keys() else ()
    values = {key: value for key, value in values.items() if key not in aliased} | dict(override)
    return ModelSettings(text_values(values))


class TokenizerSettings:
    """Entries of a tokenizer.json that define token IDs. Entries of the wrong type are omitted."""

    def __init__(self, content: Mapping[str, Any]):
        model, added = content.get("model"), content.get("added_tokens")
        self.vocabulary: Any = model.get("vocab") if is_mapping(model) else None
        """IDs by token, or a list of tokens; None if the file has none."""
        tokens = [token for token in added if is_mapping(token)] if is_list(added) else []
        self.added: dict[str, int] = {
            token["content"]: token["id"]
            for token in tokens
            if isinstance(token.get("content"), str) and isinstance(token.get("id"), int)
        }
        """IDs of the added tokens."""

    def token_id(self, token: Any) -> int | None:
        """Return the ID of a token; None if it is unknown."""
        if not isinstance(token, str):
            return None
        known = self.vocabulary.get(token) if is_mapping(self.vocabulary) else None
        index = self.added.get(token, known)
        return index if isinstance(index, int) else None

    def largest_id(self) -> int:
        """Return the largest ID of the vocabulary, without added tokens, which ordinary text does not produce."""
        if is_list(self.vocabulary):
            return len(self.vocabulary) - 1
        ids = self.vocabulary.values() if is_mapping(self.vocabulary) else ()
        return max((index for index in ids if isinstance(index, int)), default=-1)


def read_tokenizer(path: str) -> TokenizerSettings | None:
    """Return the tokenizer.json of a folder; None if it is missing or damaged."""
    content = read_json(path, "tokenizer.json")
    return None if content is None else TokenizerSettings(content)
