"""What the installed transformers and the engines say about every model type: `camshaft/config/families/known.json`.

    python -m tests.families.known          # writes the file

For each decoder-only type: the class, the checkpoint that transformers documents, the values of the default config that
decide what is supported, why its layers cannot be split (tensor parallelism) or adapted (LoRA), and the test that
compares all heads with transformers.
"""

import ast
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from camshaft.config.engine import EngineModel, LoRAConfig
from camshaft.config.families.known import KNOWN
from camshaft.engine.fsdp.tensor_parallel import check_tensor_parallel
from camshaft.errors import EngineError
from camshaft.models.attention import config_values
from camshaft.models.loader import skeleton
from camshaft.models.lora import adapter_shapes
from camshaft.models.packed import PackedModel

from .configs import MOST_USED, PADDED, decoder_types, tiny_config

DECISIVE = re.compile(
    r"layer_types|sliding_window|use_sliding_window|keep_window_size|no_rope_layers|is_causal|use_bidirectional_attention"
    r"|att.*_(softcapping|temperature_tuning)|.*logit.*|lm_head_multiplier|.*drop.*|rope_parameters|.*max_position_emb.*"
    r"|(v_|qk_nope_|qk_rope_)?head_dim|hidden_size|num_(hidden_layers|attention_heads|key_value_heads)"
    r"|intermediate_size|hidden_act|(attention|mlp)_bias|num_(local_)?experts|n_routed_experts|mlp_only_layers"
    r"|decoder_sparse_step|router_jitter_noise"
)
"""Matches the config keys that decide what is supported."""


def known_types() -> dict[str, dict[str, Any]]:
    """Return the facts about every decoder-only type."""
    return {name: _facts(name) for name in decoder_types()}


def write(path: Path = KNOWN) -> None:
    """Write the facts, one type per line."""
    lines = [f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in known_types().items()]
    content = f'{{"transformers": "{transformers.__version__}",\n"types": {{\n' + ",\n".join(lines) + "\n}}\n"
    path.write_text(content, encoding="utf-8")


def _facts(model_type: str) -> dict[str, Any]:
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    checkpoint = documented_checkpoint(CONFIG_MAPPING[model_type])
    values = dict(decisive_values(CONFIG_MAPPING[model_type]()))
    if kinds := dict(decisive_values(tiny_config(model_type))).get("layer_types"):  # of which a default may have one
        values["layer_types"] = list(dict.fromkeys([*values.get("layer_types", ()), *kinds]))
    facts = {"architecture": architecture, "checkpoint": checkpoint, "values": values}
    try:
        with tempfile.TemporaryDirectory() as folder:
            tiny_config(model_type).save_pretrained(folder)
            packed = skeleton(EngineModel(path=folder, random_init=True), "float32")
    except EngineError:  # `unsupported` states the reasons
        return facts
    test = "make test" if model_type in (*MOST_USED, *PADDED) else "make test-families"
    return facts | {"lacks": dict(_missing_features(packed)), "tested": test}


def documented_checkpoint(config_class: type[PreTrainedConfig]) -> str | None:
    """Return the checkpoint in the documentation of a config class."""
    for node in ast.walk(ast.parse(Path(inspect.getfile(config_class)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == config_class.__name__:
            keywords = [item for call in node.decorator_list if isinstance(call, ast.Call) for item in call.keywords]
            return next((ast.literal_eval(item.value) for item in keywords if item.arg == "checkpoint"), None)
    return None


def decisive_values(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config that decide what is supported. Kinds of layers are listed once."""
    for key, value in config_values(config).items():
        if key == "layer_types" and value:
            yield key, list(dict.fromkeys(value))
        elif value is not None and DECISIVE.fullmatch(key):
            yield key, value


def _missing_features(packed: PackedModel) -> Iterator[tuple[str, str]]:
    """Yield the features that depend on the layers of a model and that it lacks, with the reason."""
    checks = {
        "tensor parallelism": partial(check_tensor_parallel, packed, 2),
        "LoRA": partial(adapter_shapes, packed.hf, LoRAConfig(rank=1)),
    }
    for feature, check in checks.items():
        try:
            check()
        except EngineError as error:
            yield feature, str(error).partition(": ")[2].rpartition("; set ")[0] or str(error)


if __name__ == "__main__":
    write()
