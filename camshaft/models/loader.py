"""Loads a `PackedModel` and its tokenizer from a Hugging Face folder.

    model = load_model(EngineModel(path="models/tiny", head="value"), dtype="float32", device="cpu", seed=0)
    tokenizer = load_tokenizer("models/tiny")

Names and shapes of the weights in the folder must match those of the model. Only the head of a value model, or of a
reward model that is to be trained, may be missing; it is then initialized from the seed. Paths with a URL scheme
(`hdfs://`, `s3://`, ...) are downloaded. A model name (`owner/name`) is looked up in the local Hugging Face cache, and
downloaded from the hub only if it is written as a URL, `hf://owner/name`.
"""

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from camshaft import hub
from camshaft.config.checks.model import machine_memory
from camshaft.config.engine import EngineModel
from camshaft.errors import EngineError
from camshaft.fetch import fetch
from camshaft.models import composite
from camshaft.models.attention import PACKED, reject_unsupported
from camshaft.models.classes import model_class
from camshaft.models.folders import (
    GENERATION_CONFIG,
    check_config,
    complete_index,
    convert_errors,
    convert_folder_errors,
    convert_model_errors,
    quantization_message,
    reason,
)
from camshaft.models.lora import add_adapter, merged_weights
from camshaft.models.packed import Head, PackedModel, logit_factor, scalar_head
from camshaft.models.padded_rows import runs_padded

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load_model(model: EngineModel, dtype: str, device: str, seed: int) -> PackedModel:
    """Load the model that `model` describes, in eval mode on `device`. The global random state does not change."""
    folder, config = _load_packable_config(model, weights=not model.random_init)
    # The model is built on the CPU, so that a seed gives the same weights on every device.
    with torch.random.fork_rng(devices=[]):
        if not model.trust_remote_code:  # whose code may require weights with values
            _check_memory(folder, config, model, DTYPES[dtype])
        torch.default_generator.manual_seed(seed)
        if model.random_init:
            hf = _random_model(folder, config, model, DTYPES[dtype])
        else:
            hf = _pretrained_model(folder, config, model, DTYPES[dtype])
    return _build_packed(hf, model, seed).to(device).eval()


def stored_weights(model: EngineModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the names in `transformers` and the weights of a model folder, in the dtype of its files.

    Tied weights are yielded once. The model need not support packing.
    """
    import_external(model.external_lib)
    folder = model_folder(model.path)
    config = load_config(folder, model.trust_remote_code, model.override_config)
    _reject_quantized(folder, config)
    yield from merged_weights(_pretrained_model(folder, config, model, "auto", attention="eager"))


def file_layout(
    config: PreTrainedConfig, trust_remote_code: bool, head: Head = "causal_lm", folder: Path | None = None
) -> Callable[[str, Tensor], Mapping[str, Tensor]]:
    """Return a function that maps a weight of the model to the tensors that transformers stores in files.

    transformers stacks the experts of a layer in one tensor of the model. Files contain one tensor per expert. If
    `folder` contains other parts besides the language model, names are those in its files.
    """
    config = composite.language_config(config)
    with quiet_transformers(), torch.device("meta"):
        hf = model_class(config, head).from_config(config, trust_remote_code=trust_remote_code)
    in_files = composite.file_names(folder) if folder is not None and composite.is_composite(folder) else str
    return lambda name, tensor: {in_files(n): t for n, t in revert_weight_conversion(hf, {name: tensor}).items()}


def skeleton(model: EngineModel, dtype: str) -> PackedModel:
    """Build the model on the meta device, for an engine that shards it before loading weights."""
    folder, config = _load_packable_config(model, weights=False)
    with torch.device("meta"):
        hf = _random_model(folder, config, model, DTYPES[dtype])
        return _build_packed(hf, model, seed=0).eval()


def _load_packable_config(model: EngineModel, weights: bool) -> tuple[Path, PreTrainedConfig]:
    """Return the folder and the config of a model; raise `EngineError` if the model does not support packing.

    If it is a model of the Hugging Face hub, its weights are downloaded only if `weights` is True.
    """
    import_external(model.external_lib)
    folder = model_folder(model.path, weights)
    config = load_config(folder, model.trust_remote_code, model.override_config)
    _reject_quantized(folder, config)
    reject_unsupported(config, "training")
    if model.head == "causal_lm":
        logit_factor(config)
    else:
        config.num_labels = 1
    return folder, config


def _build_packed(hf: PreTrainedModel, model: EngineModel, seed: int) -> PackedModel:
    """Add the adapter to `hf` and wrap it in a `PackedModel`, with gradient checkpointing if configured."""
    if model.lora is not None:
        add_adapter(hf, model.lora, seed)
    packed = PackedModel(hf, model.head)
    if model.enable_gradient_checkpointing:
        packed.enable_gradient_checkpointing(model.gradient_checkpointing_mode)
    return packed


def has_tokenizer(folder: Path) -> bool:
    """Return True if the model folder contains tokenizer files."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def load_tokenizer(
    path: str, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder. If it has no pad token, the end-of-sequence token is used.

    `chat_template` is a file with a template that replaces that of the tokenizer.
    """
    folder = local_folder(path, weights=False)
    check_config(folder, {})
    problem = f"transformers cannot read a tokenizer from {folder}"
    with convert_folder_errors(folder, problem, "Add tokenizer.json and tokenizer_config.json to the folder"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    # Without tokenizer files, transformers returns a tokenizer with special tokens only.
    if len(tokenizer) <= len(tokenizer.added_tokens_encoder):
        raise EngineError(f"{folder} has no tokenizer; add tokenizer.json and tokenizer_config.json to the folder")
    if not isinstance(tokenizer.model_max_length, int | float):  # compared with the length of each text
        raise EngineError(
            f"{folder}/tokenizer_config.json has model_max_length={tokenizer.model_max_length!r}; set it to a number"
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise EngineError(
                f"the tokenizer in {folder} has neither a pad_token nor an eos_token; set one of them in "
                "tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
    return tokenizer


def import_external(modules: str | None) -> None:
    """Import the modules of a comma-separated list. They may register models with transformers."""
    for name in (modules or "").split(","):
        if not name.strip():
            continue
        try:
            importlib.import_module(name.strip())
        except ModuleNotFoundError as error:
            raise EngineError(
                f"external_lib={name.strip()} cannot be imported, because there is no module '{error.name}'; install "
                "its package or add its folder to PYTHONPATH"
            ) from error


def local_folder(path: str, weights: bool = True) -> Path:
    """Resolve `path` to a local folder. It may be a folder, a URL, or a model name in the Hugging Face cache.

    A download from the Hugging Face hub includes the weights unless `weights` is False.
    """
    folder = fetch(path, weights)
    if folder.is_dir():
        return folder
    cached = hub.cached_folder(path, weights=False)  # a model with random weights requires only its config
    if cached is None:
        hint = f", or to {hub.SCHEME}{path} to download it" if hub.is_model_name(path) else ""
        raise EngineError(
            f"'{path}' is neither a folder nor a model in the local Hugging Face cache ({hub.cache_path()}); set the "
            f"path to a folder with config.json{hint}"
        )
    return cached


def model_folder(path: str, weights: bool = True) -> Path:
    """Resolve `path` with `local_folder`; raise `EngineError` if the folder has no config.json."""
    folder = local_folder(path, weights)
    if not (folder / "config.json").is_file():
        inside = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise EngineError(
            f"{folder} has no config.json (it contains {inside}); set the path to a folder that save_pretrained wrote"
        )
    return folder


def load_config(folder: Path, trust_remote_code: bool, override: Mapping[str, Any]) -> PreTrainedConfig:
    """Load the config of a folder's language model and apply `override`; raise `EngineError` for unknown keys."""
    check_config(folder, override)
    problem = f"{folder}/config.json cannot be read"
    with convert_folder_errors(folder, problem, "Set the path to a folder that save_pretrained wrote"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        config = composite.language_config(config)
    if hasattr(config, "rescale_every"):
        config.rescale_every = 0  # in eval mode, RWKV would divide its weights in place, against overflow in float16
    if not override:
        return config
    values = config.to_dict()
    names = {**{key: key for key in values}, **config.attribute_map}
    for key in override:
        if key not in names:
            matches = difflib.get_close_matches(key, names, n=1)
            hint = f"; did you mean '{matches[0]}'?" if matches else f"; its keys are {', '.join(sorted(names))}"
            raise EngineError(f"override_config is invalid: a {config.model_type} config has no key '{key}'{hint}")
    changes = {names[key]: value for key, value in override.items()}
    if "num_hidden_layers" in changes and "layer_types" not in changes:
        values.pop("layer_types", None)  # holds one entry per layer; the config class derives it again
    problem = f"override_config={dict(override)} is invalid for a {config.model_type} model"
    with convert_errors(lambda error: f"{problem}: {reason(error)}"):
        return type(config).from_dict({**values, **changes})


def load_generation_eos(folder: Path) -> int | list[int] | None:
    """Return the end-of-sequence tokens in the generation config of a folder; None if it sets none."""
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        return None
    fix = "Correct the file, or delete it, because it is optional"
    with convert_folder_errors(folder, f"{file} cannot be read", fix):
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    if eos is not None and not all(isinstance(item, int) for item in (eos if isinstance(eos, list) else [eos])):
        raise EngineError(f"{file} has eos_token_id={eos!r}; set it to a token id or a list of token ids")
    return eos


def _reject_quantized(folder: Path, config: PreTrainedConfig) -> None:
    if message := quantization_message(folder, config.to_dict()):
        raise EngineError(message)


def _check_memory(folder: Path, config: PreTrainedConfig, model: EngineModel, dtype: torch.dtype) -> None:
    """Raise `EngineError` if the weights exceed the memory of this machine, before any of them is allocated."""
    with torch.device("meta"):
        hf = _random_model(folder, config, model, dtype)
    count = sum(parameter.numel() for parameter in hf.parameters())
    if count * dtype.itemsize > machine_memory():
        text = config.get_text_config().to_dict()
        keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        sizes = ", ".join(f"{key}={text[key]}" for key in keys if key in text)
        raise EngineError(
            f"the model in {folder} has {count:,} parameters ({sizes} in config.json), which take "
            f"{count * dtype.itemsize / 2**30:,.0f} GiB of memory in {str(dtype).removeprefix('torch.')}, but this "
            f"machine has {machine_memory() / 2**30:,.0f} GiB; use a smaller model, or correct config.json"
        )


def _random_model(folder: Path, config: PreTrainedConfig, model: EngineModel, dtype: torch.dtype) -> PreTrainedModel:
    with convert_model_errors(folder, config.model_type, model.head):
        return model_class(config, model.head).from_config(
            config,
            dtype=dtype,
            attn_implementation=_attention(config),
            trust_remote_code=model.trust_remote_code,
            **experts_option(dtype),
        )


def _pretrained_model(
    folder: Path, config: PreTrainedConfig, model: EngineModel, dtype: torch.dtype | str, attention: str | None = None
) -> PreTrainedModel:
    # transformers ignores mismatched sizes, so that the error below lists all problems with the weights at once.
    errors = convert_model_errors(folder, config.model_type, model.head)
    renamed = _renamed_head(folder, config, model) if model.head == "value" else None
    with quiet_transformers(), errors, complete_index(folder) as readable:
        hf, info = model_class(config, model.head).from_pretrained(
            readable,
            config=config,
            dtype=dtype,
            attn_implementation=attention or _attention(config),
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=(composite.key_mapping(folder) or {}) | (renamed or {}) or None,
            **experts_option(dtype),
        )
    initialized = ("score.", "classifier.", "head.") if model.head == "value" or model.new_head else ()
    unused = () if model.head == "causal_lm" else ("lm_head.", "embed_out.", "head.", "decoder.weight", "decoder.bias")
    problems = [f"{key} is missing" for key in sorted(info["missing_keys"]) if not key.startswith(initialized)]
    kept = composite.OTHER_PARTS.match if composite.is_composite(folder) else lambda _: False
    unknown = (key for key in info["unexpected_keys"] if not key.startswith(unused) and not kept(key))
    problems += [f"{key} is unknown" for key in sorted(unknown)]
    problems += [
        f"{key} has shape {tuple(actual)}, not {tuple(expected)}"
        for key, actual, expected in sorted(info["mismatched_keys"])
    ]
    if problems:
        listed = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise EngineError(
            f"the weights in {folder} do not match {type(hf).__name__} (head={model.head}): {listed}; set a path "
            "whose weights match, or another head"
        )
    return hf


def _attention(config: PreTrainedConfig) -> str | None:
    """Return the attention implementation for engines; None for the default of transformers."""
    return None if runs_padded(config) else PACKED


def experts_option(dtype: torch.dtype | str) -> dict[str, str]:
    """Return the argument that selects a loop over experts if the grouped matrix product does not support `dtype`."""
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def _renamed_head(folder: Path, config: PreTrainedConfig, model: EngineModel) -> dict[str, str] | None:
    """Return the key mapping that loads the head of a reward model, `score`, into that of a value model."""
    with torch.device("meta"):
        name = scalar_head(_random_model(folder, config, model, torch.float32))
    return None if name == "score" else {r"^score\.": f"{name}."}


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and warnings of transformers about weights; `_pretrained_model` raises errors instead."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
