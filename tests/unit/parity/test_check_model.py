"""`camshaft check-model`: models that agree with transformers, and one engine for each kind of defect."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Run, camshaft
from support.model_folders import edit_json
from support.tiny import tiny_folder

from camshaft.models.tiny import make_tiny_model
from camshaft.parity.model import folders

SMALL: dict[str, Any] = {"hidden": 32, "layers": 2, "initializer_range": 0.2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mha": SMALL | {"kv_heads": 4},
    "qwen3": SMALL | {"kv_heads": 4, "tie_embeddings": False},
    "mistral": SMALL | {"sliding_window": 64},
    "gemma3_text": {"hidden": 32, "layers": 6},
    "gpt2": {"hidden": 32},
    "mixtral": SMALL | {"num_local_experts": 4, "tie_embeddings": False},
    "qwen3_moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
FAMILIES = {"mha": "llama"}


def model(name: str) -> Path:
    return tiny_folder(FAMILIES.get(name, name), **MODELS[name])


def check_model(folder: Path | str, *args: str, engine: str = "reference") -> Run:
    engine = engine if engine == "reference" else f"support.broken_models:{engine}"
    return camshaft("check-model", str(folder), "--engine", engine, *args)


def language_model(folder: Path, engine: str) -> list[dict[str, Any]]:
    """Return the results of the comparisons with a language-model head that differ."""
    run = check_model(folder, "--head", "causal_lm", "--rollout", "none", "--json", engine=engine)
    results = [result for result in json.loads(run.out)["results"] if result["status"] == "different"]
    assert run.status == bool(results), run.err
    return results


# -- models that agree -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma3_text",
        "mixtral",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gpt2", "qwen3_moe")),
    ],
)
def test_a_right_model_has_no_finding(name: str) -> None:
    run = check_model(model(name))
    assert run.status == 0, run.out
    assert "18 of 18 comparisons are equal, 0 findings" in run.out


def test_a_float32_engine_agrees_within_its_rounding() -> None:
    run = check_model(model("llama"), "--dtype", "float32")
    assert run.status == 0, run.out


# -- planted defects -------------------------------------------------------------------------------

DEFECTS: Mapping[str, tuple[str, str, str]] = {
    "RopeTheta": ("llama", "rope theta", "with rope_theta=500000 instead of 10000"),
    "AttentionScale": ("llama", "attention scale", "times 2.828"),
    "QueryAndKeyExchanged": ("llama", "q and k swapped", "queries and keys exchanged"),
    "NormEps": ("llama", "norm eps", "with rms_norm_eps=1e-05 instead of 1e-06"),
    "MissingGate": ("llama", "missing gate", "without the gate of its MLPs"),
    "MaskOffByOne": ("llama", "mask off by one", "also attends to the next token"),
    "WindowOffByOne": ("mistral", "window off by one", "with sliding_window=7 instead of 8"),
    "LeakyAttention": ("llama", "state that leaks between rows", "the tokens of the row before it"),
    "UntiedHead": ("llama", "a tied head untied", "model.embed_tokens.weight lacks the share of the output layer"),
    "ExpertDispatch": ("mixtral", "expert order", "in the order 1, 2, 3, 0"),
    "OddRopeTheta": ("llama", "rope theta", "with rope_theta=43000 instead of 10000"),
    "OddAttentionScale": ("llama", "attention scale", "times 1.3"),
    "QueryAndKeySwapped": ("mha", "q and k swapped", "q_proj.weight has the values of"),
    "RandomHead": ("llama", "a tied head untied", "lm_head.weight with values of its own"),
    "ExpertOrder": ("mixtral", "expert order", "in the order [2, 0, 3, 1]"),
    "LeakyMask": ("llama", "state that leaks between rows", "the tokens of the row before it"),
    "LeakyCalls": ("llama", "state that leaks between rows", "with the rows of earlier calls"),
    "LeakyPositions": ("gpt2", "positions of packed rows", "do not start again at each row"),
}
"""Model, cause and part of the sentence. The first ten run in `make test`."""


@pytest.mark.parametrize(
    "name", [*list(DEFECTS)[:10], *(pytest.param(name, marks=pytest.mark.slow) for name in list(DEFECTS)[10:])]
)
def test_a_defect_is_named(name: str) -> None:
    folder, cause, sentence = DEFECTS[name]
    first, *others = language_model(model(folder), name)
    assert first["cause"] == cause
    assert sentence in first["sentence"]
    assert {other["cause"] for other in others} <= {cause, "prompt sharing"}


def test_an_unknown_defect_is_narrowed_down() -> None:
    first, *_ = language_model(model("llama"), "ShiftedTokens")
    assert first["cause"] == "unknown"
    assert "the cause is in queries, keys, positions, scores or mask" in first["sentence"]


# -- code of the folder ----------------------------------------------------------------------------

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnLlama(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.scaling *= SCALE
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """Return a folder with a model type and a class of its own, whose attention scores are doubled."""
    folder = tmp_path / "own"
    shutil.copytree(model("llama"), folder)
    auto_map = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnLlama"}
    edit_json(folder / "config.json", {"model_type": "own_llama", "auto_map": auto_map})
    (folder / "modeling_own.py").write_text(OWN_CODE.replace("SCALE", "2.0"), encoding="utf-8")
    return folder


def test_code_of_a_folder_is_compared_with_a_type_of_transformers(own_code: Path) -> None:
    arguments = ("--trust-remote-code", "--head", "causal_lm", "--rollout", "none")
    run = check_model(own_code, "--oracle", "llama", *arguments)
    assert run.status == 1
    assert (
        "Likely cause: attention scale. The log-probs equal those of the model with attention scores times 2" in run.out
    )
    run = check_model(own_code, *arguments)
    assert run.status == 0, run.out
    assert "the folder's own code" in run.out


# -- folders ---------------------------------------------------------------------------------------


def test_layers_and_windows_are_reduced_and_said(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "gemma3_text", hidden=32, layers=8, sliding_window=512)
    run = check_model(folder, "--layers", "7", "--head", "causal_lm")
    assert run.status == 0, run.out
    assert "layers: the first 7 of 8" in run.out
    assert "sliding window: 8 instead of 512 tokens" in run.out


def test_the_vocabulary_and_layers_of_a_large_model_are_reduced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_PARAMETERS", 1000)
    monkeypatch.setattr(folders, "VOCABULARY", 80)
    folder = make_tiny_model(tmp_path / "model", "gemma3_text", hidden=32, layers=8)
    run = check_model(folder, "--head", "causal_lm")
    assert run.status == 0, run.out
    assert "vocabulary: the first 80 of 112 tokens" in run.out
    assert "layers: the first 6 of 8" in run.out


def test_a_folder_without_weights_gets_random_ones(tmp_path: Path) -> None:
    shutil.copy(model("llama") / "config.json", tmp_path)
    run = check_model(tmp_path, "--head", "causal_lm", "--rollout", "none")
    assert run.status == 0, run.out
    assert "weights: random, from seed 0 (there are none)" in run.out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "contains quantized weights"),
        ({"model_type": "nothing"}, "model type `nothing`"),
        ({"hidden_act": "nothing"}, "nothing"),
        ({"is_causal": False}, "attention that is not causal"),
    ],
)
def test_an_unsuitable_folder_is_refused_in_a_sentence(changes: Any, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model("llama"), folder)
    edit_json(folder / "config.json", changes)
    run = check_model(folder)
    assert run.status in (1, 2)
    assert message in run.err
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/folder",), "is neither a folder nor a model"),
        (("no-folder", "--layers", "0"), "--layers 0 is too small"),
        (("no-folder", "--engine", "nothing"), "unknown name 'nothing'"),
    ],
)
def test_invalid_arguments_are_errors(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    run = camshaft("check-model", *arguments)
    assert run.status == 2
    assert message in run.err
