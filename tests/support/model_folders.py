"""Damaged and unusual model folders.

    folder = damaged_folder("num_hidden_layers=3", tmp_path)

Each kind of `DAMAGES` edits one file of a copy of a tiny qwen2 model.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from support.tiny import tiny_folder

WEIGHTS, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
BRACKETS = "[" * 100_000 + "]" * 100_000


class Damage(NamedTuple):
    """A file of a model folder, and the function that changes it."""

    file: str
    edit: Callable[[Path], object]
    words: str = ""
    """Words of the error besides the file, separated by spaces."""


def edit_json(file: Path, changes: Mapping[str, Any]) -> None:
    """Replace values of a JSON object in a file. The file may be missing."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def values(words: str = "", file: str = "config.json", **changes: Any) -> Damage:
    """Return the damage that replaces values of a JSON file."""
    return Damage(file, lambda path: edit_json(path, changes), words)


def content(file: str, text: str, words: str = "") -> Damage:
    """Return the damage that replaces the content of a file."""
    return Damage(file, lambda path: path.write_text(text, encoding="utf-8"), words)


def _use_bin(file: Path) -> None:
    """Put an empty pytorch_model.bin in the place of the safetensors file."""
    (file.parent / WEIGHTS).unlink()
    file.write_bytes(b"")


QUANTIZED = "QLoRA unquantized"

DAMAGES: dict[str, Damage] = {
    "gptq": values(QUANTIZED, quantization_config={"quant_method": "gptq", "bits": 4}),
    "awq": values(QUANTIZED, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128}),
    "bitsandbytes": values(QUANTIZED, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "quantization_config is a word": values(QUANTIZED, quantization_config="4bit"),
    "num_hidden_layers=1": values("num_hidden_layers=1 layer_types", num_hidden_layers=1),
    "num_hidden_layers=3": values("num_hidden_layers=3 layer_types", num_hidden_layers=3),
    "num_hidden_layers=1e9": values("num_hidden_layers=1000000000", num_hidden_layers=10**9, layer_types=None),
    "config is a list": content("config.json", "[]", "list"),
    "config is null": content("config.json", "null", "null"),
    "config is 100,000 brackets": content("config.json", BRACKETS, "nest"),
    "config is cut off": content("config.json", '{"model_type": "qwen2", ', "JSON"),
    "config is not UTF-8": Damage("config.json", lambda path: path.write_bytes(b'{"model_type": "\xff"}')),
    "rms_norm_eps is a word": values("rms_norm_eps", rms_norm_eps="small"),
    "use_cache is a word": values("use_cache", use_cache="often"),
    "hidden_act is unknown": values("hidden_act='nope'", hidden_act="nope"),
    "rope type is unknown": values("rope_type='nope'", rope_parameters={"rope_type": "nope", "rope_theta": 1e4}),
    "dtype is unknown": values("dtype='nope'", dtype="nope"),
    "layer_types is unknown": values("layer_types='nope'", layer_types=["nope", "nope"]),
    "intermediate_size=-1": values("intermediate_size=-1", intermediate_size=-1),
    "num_attention_heads=0": values("num_attention_heads=0", num_attention_heads=0),
    "attention_dropout=2": values("attention_dropout=2", attention_dropout=2.0),
    "vocab_size=1e9": values("vocab_size=1000000000 memory", vocab_size=10**9),
    "hidden_size=1e7": values("hidden_size=10000000 memory", hidden_size=10**7),
    "model_type is unknown": values("model_type='nope'", model_type="nope"),
    "eos_token_id of config is a word": values("eos_token_id", eos_token_id="end"),
    "generation config is damaged": content("generation_config.json", "{", "JSON"),
    "generation config is a list": content("generation_config.json", "[]", "list"),
    "eos_token_id is a word": values("eos_token_id", "generation_config.json", eos_token_id="end"),
    "tokenizer config is a list": content("tokenizer_config.json", "[]", "list"),
    "tokenizer config is cut off": content("tokenizer_config.json", '{"a": ', "JSON"),
    "model_max_length is a word": values("model_max_length='long'", "tokenizer_config.json", model_max_length="long"),
    "tokenizer is a list": content("tokenizer.json", "[]", "list"),
    "tokenizer is 100,000 brackets": content("tokenizer.json", BRACKETS, "nest"),
    "tokenizer has no model": content("tokenizer.json", "{}"),
    "index is a list": content(INDEX, "[]", "list"),
    "index lists nothing": content(INDEX, '{"weight_map": []}', "weight_map"),
    "index lists a missing file": content(INDEX, '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}', "b.safe"),
    "pytorch_model.bin is empty": Damage(BIN, _use_bin),
    "safetensors file is empty": Damage(WEIGHTS, lambda path: path.write_bytes(b"")),
    "safetensors file is cut off": Damage(WEIGHTS, lambda path: path.write_bytes(path.read_bytes()[:5000])),
}
"""Folders that cannot be used, by kind."""


def damaged_folder(kind: str, parent: Path) -> Path:
    """Copy the tiny model to a folder in `parent`, and change it."""
    damage, folder = DAMAGES[kind], copy_model(parent)
    if damage.file == INDEX:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    damage.edit(folder / damage.file)
    return folder


def copy_model(parent: Path) -> Path:
    """Copy the tiny model to a folder in `parent`."""
    folder = parent / "model"
    shutil.copytree(tiny_folder(), folder)
    return folder
