import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from support.ranks import run_ranks
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    dynamic_module_utils,
)

from camshaft.checkpoint import Probe, check_export_path, export, export_hugging_face
from camshaft.config import EngineConfig, EngineModel
from camshaft.dataproto import DataProto
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import CheckpointError
from camshaft.models.loader import load_model


def trained(folder: Path, dtype: str = "float32") -> dict[str, Tensor]:
    """Return weights that differ from the folder's, under the names that engines use."""
    model = load_model(EngineModel(path=str(folder), random_init=True), dtype, "cpu", seed=7)
    return {name: parameter.detach() for name, parameter in model.hf.named_parameters()}


def model_in(folder: Path, **more: Any) -> EngineModel:
    return EngineModel(path=str(folder), **more)


@pytest.mark.parametrize("sizes", [{}, {"tie_embeddings": False}, {"family": "llama"}], ids=str)
def test_transformers_loads_the_export_with_weights_and_tokenizer(sizes: dict, tmp_path: Path) -> None:
    source = tiny_folder(**sizes)
    weights = trained(source)
    export_hugging_face(weights.items(), model_in(source), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(parameter, weights[name]) for name, parameter in exported.named_parameters())
    tokens = tiny_rows([9])[0][None]
    hf_model = AutoModelForCausalLM.from_pretrained(source)
    assert not torch.allclose(exported(tokens).logits, hf_model(tokens).logits)
    hf_model.load_state_dict(weights, strict=False)
    assert torch.equal(exported(tokens).logits, hf_model(tokens).logits)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_large_model_is_exported_as_several_files(tmp_path) -> None:
    source = tiny_folder()
    weights = trained(source)
    third = sum(tensor.nbytes for tensor in weights.values()) // 3
    export_hugging_face(weights.items(), model_in(source), tmp_path / "out", file_bytes=third)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(files)
    assert count >= 3
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(parameter, weights[name]) for name, parameter in exported.named_parameters())


def test_a_write_error_on_one_rank_reaches_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    names = []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        yield from trained(tiny_folder()).items()
        names.append("weights")

    def run(rows: DataProto) -> dict[str, Any]:
        names.append("numbers")
        return {}

    with pytest.raises(CheckpointError, match="already exists"):
        export_hugging_face(gathered(), model_in(tiny_folder()), tmp_path, check=Probe(run))
    assert names == ["weights", "numbers"]


def test_the_number_format_and_the_changed_config_are_kept(tmp_path: Path) -> None:
    source = tiny_folder()
    weights = trained(source, "bfloat16")
    export_hugging_face(
        weights.items(), model_in(source, override_config={"attention_dropout": 0.25}), tmp_path / "out"
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert exported.dtype == torch.bfloat16
    assert exported.config.attention_dropout == 0.25


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_weights_of_another_model_are_named_and_not_exported(change: str, tmp_path: Path) -> None:
    weights = trained(tiny_folder())
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {(f"wrapped.{n}" if n == name and change == "unknown" else n): w for n, w in weights.items()}
    if change == "missing":
        del weights[name]
    with pytest.raises(CheckpointError, match=name):
        export_hugging_face(weights.items(), model_in(tiny_folder()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_different_weight_in_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, name = trained(tiny_folder()), "model.layers.0.mlp.up_proj.weight"

    def careless(tensors: dict[str, Tensor], *args: Any, **more: Any) -> None:
        save_file({**tensors, name: tensors[name] * (1 + 1e-6)}, *args, **more)

    monkeypatch.setattr(export, "save_file", careless)
    with pytest.raises(CheckpointError, match=f"these weights differ after loading: {name}$"):
        export_hugging_face(weights.items(), model_in(tiny_folder()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_an_older_export_is_replaced(tmp_path: Path) -> None:
    source, weights = model_in(tiny_folder()), trained(tiny_folder())
    target, other, empty = tmp_path / "out", tmp_path / "other", tmp_path / "empty"
    for _ in range(2):
        check_export_path(target)
        export_hugging_face(weights.items(), source, target)
    other.mkdir()
    empty.mkdir()
    (other / "notes.txt").write_text("mine")
    for existing in (other, other / "notes.txt", tiny_folder()):
        with pytest.raises(CheckpointError, match="already exists"):
            check_export_path(existing)
    with pytest.raises(CheckpointError, match="already exists"):
        export_hugging_face(weights.items(), source, other)
    assert (other / "notes.txt").read_text() == "mine"
    export_hugging_face(weights.items(), source, empty)


def test_trusted_custom_model_code_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    source = Path(shutil.copytree(tiny_folder(), tmp_path / "source"))
    (source / "modeling_mine.py").write_text(
        "from transformers import Qwen2ForCausalLM\n\n\nclass MineForCausalLM(Qwen2ForCausalLM):\n    pass\n"
    )
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (source / "config.json").write_text(json.dumps(config))
    weights = trained(tiny_folder())
    export_hugging_face(weights.items(), model_in(source, trust_remote_code=True), tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(exported).__name__ == "MineForCausalLM"
    assert torch.equal(dict(exported.named_parameters())["model.norm.weight"], weights["model.norm.weight"])


# -- the same numbers -----------------------------------------------------------------------------


def engine_with(
    head: Literal["causal_lm", "value", "reward"], dtype: Any = "float32", **sizes: Any
) -> SingleDeviceEngine:
    model = EngineModel(path=str(tiny_folder(**sizes)), head=head, random_init=True)
    engine = SingleDeviceEngine(EngineConfig(model=model, dtype=dtype, seed=7))
    engine.init_model()
    return engine


@pytest.mark.parametrize(
    ("head", "loader"),
    [
        ("causal_lm", AutoModelForCausalLM),
        ("value", AutoModelForTokenClassification),
        ("reward", AutoModelForSequenceClassification),
    ],
)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_every_exported_head_reproduces_the_engine(
    head: Literal["causal_lm", "value", "reward"], loader: Any, family: str, tmp_path: Path
) -> None:
    engine = engine_with(head, family=family)
    export_hugging_face(engine.named_weights(), engine.config.model, tmp_path / "out", check=Probe(engine.infer_batch))
    exported = loader.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [type(exported).__name__]
    weights = dict(engine.named_weights())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in exported.named_parameters())
    if head != "causal_lm":
        assert exported(tiny_rows([9])[0][None]).logits.shape[-1] == 1


@pytest.mark.parametrize("head", ["causal_lm", "value"])
def test_export_preserves_the_random_state(head: Literal["causal_lm", "value"], tmp_path: Path) -> None:
    engine = engine_with(head)
    before = torch.get_rng_state()
    export_hugging_face(engine.named_weights(), engine.config.model, tmp_path / "out", check=Probe(engine.infer_batch))
    assert torch.equal(torch.get_rng_state(), before)


def shifted(engine: SingleDeviceEngine, by: float) -> Any:
    """Return the engine's numbers with one of them wrong."""

    def run(rows: DataProto) -> dict[str, Any]:
        log_probs: Any = engine.infer_batch(rows)["log_probs"]
        values = log_probs.values.clone()
        values[-1] += by
        return {"log_probs": log_probs.like(values)}

    return run


def test_an_export_with_different_log_probs_fails(tmp_path: Path) -> None:
    engine, source = engine_with("causal_lm"), model_in(tiny_folder())
    for dtype, by, off in (
        ("float32", 0.01, r"[0-9.]+e-0[34], which exceeds the tolerance of 1e-04"),
        ("bfloat16", 0.9, "5e-02"),
    ):
        with pytest.raises(CheckpointError, match=rf"log_probs of transformers and .* differ by .*{off}"):
            export_hugging_face(
                engine.named_weights(), source, tmp_path / "out", check=Probe(shifted(engine, by), dtype)
            )
        assert not (tmp_path / "out").exists()
    weights = dict(engine.named_weights())
    weights["model.norm.weight"] = 2 * weights["model.norm.weight"]
    with pytest.raises(CheckpointError, match="of transformers and of the engine differ"):
        export_hugging_face(weights.items(), source, tmp_path / "out", check=Probe(engine.infer_batch))
    export_hugging_face(
        engine.named_weights(), source, tmp_path / "out", check=Probe(shifted(engine, 0.01), "bfloat16")
    )


def test_numbers_that_are_none_are_not_taken_for_equal(tmp_path: Path) -> None:
    engine = engine_with("causal_lm")
    with pytest.raises(CheckpointError, match="differ by nan"):
        export_hugging_face(
            engine.named_weights(), model_in(tiny_folder()), tmp_path / "out", check=Probe(shifted(engine, torch.nan))
        )


def test_an_engine_that_computes_in_bfloat16_passes_its_looser_check(tmp_path: Path) -> None:
    engine = engine_with("causal_lm", "bfloat16")
    export_hugging_face(
        engine.named_weights(), model_in(tiny_folder()), tmp_path / "out", check=Probe(engine.infer_batch, "bfloat16")
    )
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def together(value: Tensor) -> Tensor:
    """Return the mean of a value over all ranks, with a collective that hangs unless every rank joins."""
    dist.all_reduce(value)
    return value / dist.get_world_size()


def export_from_ranks(source: str, target: str) -> bool:
    model = EngineModel(path=source, random_init=True)
    engine = SingleDeviceEngine(EngineConfig(model=model, seed=7))
    engine.init_model()

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, weight in engine.named_weights():
            yield name, together(weight.clone())

    def probe(rows: DataProto) -> dict[str, Any]:
        log_probs: Any = engine.infer_batch(rows)["log_probs"]
        return {"log_probs": log_probs.like(together(log_probs.values.clone()))}

    rank_folder = Path(target).with_name(f"rank_{dist.get_rank()}")
    export_hugging_face(weights(), model, rank_folder, check=Probe(probe), write=dist.get_rank() == 0)
    return rank_folder.exists()


def test_one_rank_writes_the_gathered_weights(tmp_path: Path) -> None:
    assert run_ranks(export_from_ranks, 2, str(tiny_folder()), str(tmp_path / "out")) == [True, False]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "rank_0")
    weights = trained(tiny_folder())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in exported.named_parameters())
