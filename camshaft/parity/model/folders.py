"""The model folders that a check compares: the given one, or a copy that a laptop can compute.

    with prepare(source, layers=2) as prepared:
        prepared.folder, prepared.oracle_folder, prepared.notes

A copy links the files of the source. It has its own config.json and, with fewer layers or random weights, its own
weights.
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from camshaft.config.checks.model import machine_memory
from camshaft.config.model_settings import is_dropout
from camshaft.errors import ConfigError, EngineError
from camshaft.models.folders import CONFIG, convert_model_errors, quantization_message, read_config
from camshaft.models.loader import load_config, quiet_transformers

WINDOW = 8
"""Sliding window of the compared model. The rows are longer."""
BYTES_PER_PARAMETER = 40
"""Float64 weights of oracle and engine, their gradients, and a copy of the weights."""
MAX_PARAMETERS = 100e6
"""Number of parameters above which vocabulary and layers are reduced."""
VOCABULARY = 4096
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
NOISE = 0.6
"""Standard deviation of random weights, divided by the square root of their columns. Scores and gates then vary."""


@dataclass(frozen=True)
class Prepared:
    """Folders of the engine and of the oracle."""

    folder: Path
    oracle_folder: Path
    own_oracle: bool
    """True if the oracle runs the code of the folder, because transformers has no class for the model type."""
    notes: list[str]


@contextlib.contextmanager
def prepare(
    source: Path,
    layers: int | None = None,
    random_weights: bool = False,
    oracle: str | None = None,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> Iterator[Prepared]:
    """Yield the folders to compare, and delete the copies afterwards.

    Without `layers`, all layers of a small model are compared, and at least one of each kind of a large one. `oracle`
    is the model type whose class in transformers is the oracle, by default that of config.json.
    """
    values = read_config(source)
    if message := quantization_message(source, values):
        raise EngineError(message)
    with tempfile.TemporaryDirectory(prefix="camshaft-model-") as scratch:
        plain_values = _plain_values(values, oracle)
        plain = _copy(source, Path(scratch, "config"), plain_values, weights=False)
        config = load_config(plain, trust_remote_code, {}).get_text_config()
        own_oracle = config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        with convert_model_errors(source, config.model_type, "causal_lm"):
            changes, notes = _changes(config, layers, own_oracle)
        has_weights = any(any(source.glob(name)) for name in WEIGHTS)
        is_random = random_weights or not has_weights
        if is_random:
            notes.append(f"weights: random, from seed {seed}" + ("" if has_weights else " (there are none)"))
        is_written = is_random or "vocab_size" in changes or _layers_key(config) in changes
        folder = oracle_folder = source
        if changes or is_written or plain_values != values:
            changed = _updated(plain_values, changes)
            folder = oracle_folder = _copy(source, Path(scratch, "oracle"), changed, weights=not is_written)
        if is_written:
            _write_weights(source, folder, own_oracle, seed if is_random else None)
        if plain_values != values:
            folder = _copy(oracle_folder, Path(scratch, "engine"), _updated(values, changes), weights=True)
        try:
            yield Prepared(folder, oracle_folder, own_oracle, notes)
        except EngineError as error:  # with the path of a copy
            text = str(error).replace(str(folder), str(source))
            raise EngineError(text.replace(str(oracle_folder), str(source))) from error


def _plain_values(values: Mapping[str, Any], oracle: str | None) -> dict[str, Any]:
    """Return the content of config.json for the class of transformers, without code of the folder if possible."""
    if oracle is not None and oracle not in CONFIG_MAPPING:
        raise ConfigError(f"--oracle {oracle} is not a model type of transformers; use for example --oracle llama")
    model_type = oracle or values.get("model_type")
    kept = {key: value for key, value in values.items() if key != "auto_map" or model_type not in CONFIG_MAPPING}
    return {**kept, "model_type": model_type} if model_type else kept


def _updated(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Apply changes to the config of the language model, which a folder of several models has in an entry."""
    if isinstance(text := values.get("text_config"), Mapping):
        return {**values, "text_config": {**text, **changes}}
    return {**values, **changes}


def _copy(source: Path, target: Path, values: Mapping[str, Any], weights: bool) -> Path:
    """Create a folder with links to the files of another and its own config.json."""
    target.mkdir()
    omitted = {CONFIG, *(file.name for name in (*WEIGHTS, "*.index.json") if not weights for file in source.glob(name))}
    for file in source.absolute().iterdir():
        if file.name not in omitted:
            (target / file.name).symlink_to(file)
    (target / CONFIG).write_text(json.dumps(values), encoding="utf-8")
    return target


# -- layers and windows ----------------------------------------------------------------------------


def _changes(config: PreTrainedConfig, layers: int | None, own_code: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the values of config.json that a copy changes, with a note on each."""
    values, total = config.to_dict(), config.num_hidden_layers
    changes: dict[str, Any] = {}
    notes: list[str] = []
    is_large = not own_code and _count_parameters(config, {}) > MAX_PARAMETERS
    if is_large and config.vocab_size > VOCABULARY:
        tokens = [key for key, value in values.items() if key.endswith("_token_id") and _exceeds(value, VOCABULARY)]
        changes |= {"vocab_size": VOCABULARY, **dict.fromkeys(tokens)}
        notes.append(f"vocabulary: the first {VOCABULARY} of {config.vocab_size} tokens")
    per_layer = {key: value for key, value in values.items() if isinstance(value, list) and len(value) == total}
    if layers is None and is_large:  # the smallest number, at least 2, with every kind of layer
        firsts = [kinds.index(kind) + 1 for kinds in per_layer.values() for kind in kinds]
        layers = max([2, *firsts, values.get("first_k_dense_replace", 0) + 1])
    if layers is not None and layers < total:
        changes |= {key: value[:layers] for key, value in per_layer.items()} | {_layers_key(config): layers}
        notes.append(f"layers: the first {layers} of {total} (--layers sets the number)")
    needed = BYTES_PER_PARAMETER * _count_parameters(config, changes) if is_large else 0
    if needed > machine_memory():
        raise ConfigError(
            f"the comparison of {layers} layers takes about {needed / 2**30:.0f} GiB of memory, but this machine has "
            f"{machine_memory() / 2**30:.0f} GiB; set fewer layers with --layers, or use a smaller model of the family"
        )
    window = values.get("sliding_window")
    if isinstance(window, int) and window > WINDOW:
        changes["sliding_window"] = WINDOW
        notes.append(f"sliding window: {WINDOW} instead of {window} tokens, so that short rows exceed it")
    dropout = [key for key, value in values.items() if is_dropout(key) and isinstance(value, float) and value]
    if dropout:
        changes |= dict.fromkeys(dropout, 0.0)
        notes.append(f"dropout: 0 instead of {values[dropout[0]]} ({', '.join(dropout)})")
    return changes, notes


def _exceeds(tokens: Any, size: int) -> bool:
    """Return True if a value of a config contains a token id that is not below `size`."""
    return any(token >= size for token in (tokens if isinstance(tokens, list) else [tokens]) if token is not None)


def _layers_key(config: PreTrainedConfig) -> str:
    return config.attribute_map.get("num_hidden_layers", "num_hidden_layers")


def _count_parameters(config: PreTrainedConfig, changes: Mapping[str, Any]) -> int:
    changed = type(config).from_dict({**config.to_dict(), **changes})
    with quiet_transformers(), torch.device("meta"):
        return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(changed).parameters())


# -- weights ---------------------------------------------------------------------------------------


def _write_weights(source: Path, folder: Path, own_code: bool, seed: int | None) -> None:
    """Write the weights of fewer layers and tokens or, with a seed, random weights, to a folder with a config."""
    content = (folder / CONFIG).read_text(encoding="utf-8")  # which `save_pretrained` replaces
    config = load_config(folder, own_code, {})
    options: dict[str, Any] = {"trust_remote_code": True} if own_code else {}
    with quiet_transformers(), convert_model_errors(source, config.model_type, "causal_lm"):
        if seed is not None:
            model = _random_model(config, seed, options)
        else:
            size, config.vocab_size = config.vocab_size, load_config(source, own_code, {}).get_text_config().vocab_size
            auto: Any = AutoModelForCausalLM
            model, info = auto.from_pretrained(source, config=config, dtype="auto", output_loading_info=True, **options)
            model.resize_token_embeddings(size)
            if missing := sorted(info["missing_keys"]):
                raise EngineError(f"the weights in {source} lack {', '.join(missing[:4])}; copy the files again")
        model.save_pretrained(folder)
    (folder / CONFIG).write_text(content, encoding="utf-8")


def _random_model(config: PreTrainedConfig, seed: int, options: Mapping[str, Any]) -> Any:
    """Build a model with wide random weights, biases and norms."""
    random = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            scaled = noise * NOISE / max(parameter.shape[-1], 16) ** 0.5
            parameter.copy_(scaled if parameter.ndim > 1 else parameter + 0.1 * noise)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                module.weight[module.padding_idx] = 0  # as some families do when they load a file
    return model
