"""Folders that combine a language model with other parts, such as a vision tower.

    config = language_config(config)                       # the config of the language model
    model_class(config, head).from_pretrained(folder, config=config, key_mapping=key_mapping(folder))

    rename = file_names(folder)                            # for an export
    rename("model.norm.weight")                            # "model.language_model.norm.weight"
    for name, tensor in other_weights(folder): ...         # of the vision tower

Engines train the language model. An export of a causal language model contains the other parts unchanged.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from camshaft.config.families.support import COMPOSITE
from camshaft.errors import EngineError
from camshaft.storage import read_json_object

KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""Prefixes of weights in files, as patterns, and in the language model."""

OTHER_PARTS = re.compile(r"(model\.)?(visual|vision_tower|multi_modal_projector)\.|mtp\.")
"""Matches the names of other weights. Those of `mtp` predict further tokens; transformers does not load them."""

EMBEDDING = "embed_tokens.weight"


def is_composite(folder: Path) -> bool:
    """Return True if the folder contains a language model and other parts."""
    return read_json_object(folder / "config.json").get("model_type") in COMPOSITE


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the language model in a composite config; return other configs unchanged."""
    if config.model_type not in COMPOSITE:
        return config
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings  # the value for the weights in the files
    text.name_or_path = config.name_or_path
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def full_config(folder: Path, text: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of a composite folder with another config of the language model."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    config.text_config, config.dtype = text, text.dtype
    config.tie_word_embeddings = text.tie_word_embeddings
    return config


def key_mapping(folder: Path) -> dict[str, str] | None:
    """Return the renaming of weights with which transformers loads the language model of a folder."""
    return KEY_MAPPING if is_composite(folder) else None


def file_names(folder: Path) -> Callable[[str], str]:
    """Return a function that maps names of the language model to the names in the files of a composite folder.

    If it has no safetensors files, the names are those of new versions of transformers.
    """
    names = (name for file in folder.glob("*.safetensors") for name in _names(file))
    embedding = next((name for name in names if name.endswith(EMBEDDING)), f"model.language_model.{EMBEDDING}")
    prefix = embedding.removesuffix(EMBEDDING)
    head = "language_model." if prefix == "language_model.model." else ""
    return lambda name: prefix + name.removeprefix("model.") if name.startswith("model.") else head + name


def other_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of the other parts of a composite folder, as they are in its files."""
    if not (files := sorted(folder.glob("*.safetensors"))):
        raise EngineError(f"{folder} has no safetensors files, which an export with the vision tower requires")
    for file in files:
        with safe_open(file, "pt") as weights:
            for name in _names(file):
                if OTHER_PARTS.match(name):
                    yield name, weights.get_tensor(name)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as weights:
        return list(weights.keys())
