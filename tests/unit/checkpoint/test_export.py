import json
import shutil
from pathlib import Path

import pytest
import torch
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, dynamic_module_utils

from camshaft.checkpoint import check_export_path, export_hugging_face
from camshaft.config import EngineModel
from camshaft.errors import CheckpointError
from camshaft.models.loader import load_model


def trained(folder: Path, dtype: str = "float32") -> dict[str, Tensor]:
    """Other weights than those of the folder, under the names that engines give."""
    model = load_model(EngineModel(path=str(folder), random_init=True), dtype, "cpu", seed=7)
    return {name: parameter.detach() for name, parameter in model.hf.named_parameters()}


@pytest.mark.parametrize("sizes", [{}, {"tie_embeddings": False}, {"family": "llama"}], ids=str)
def test_plain_transformers_loads_the_export_with_its_weights_and_tokenizer(sizes: dict, tmp_path: Path) -> None:
    source = tiny_folder(**sizes)
    weights = trained(source)
    export_hugging_face(weights.items(), str(source), tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(parameter, weights[name]) for name, parameter in found.named_parameters())
    tokens = tiny_rows([9])[0][None]
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert not torch.allclose(found(tokens).logits, plain(tokens).logits)
    plain.load_state_dict(weights, strict=False)
    assert torch.equal(found(tokens).logits, plain(tokens).logits)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (source, tmp_path / "out")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_number_format_and_the_changed_config_are_kept(tmp_path: Path) -> None:
    source = tiny_folder()
    weights = trained(source, "bfloat16")
    export_hugging_face(weights.items(), str(source), tmp_path / "out", {"attention_dropout": 0.25})
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert found.dtype == torch.bfloat16
    assert found.config.attention_dropout == 0.25


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_weights_that_are_not_those_of_the_model_are_named_and_nothing_appears(change: str, tmp_path: Path) -> None:
    weights = trained(tiny_folder())
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {(f"wrapped.{n}" if n == name and change == "unknown" else n): w for n, w in weights.items()}
    if change == "missing":
        del weights[name]
    with pytest.raises(CheckpointError, match=name):
        export_hugging_face(weights.items(), str(tiny_folder()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_an_older_export_is_replaced(tmp_path: Path) -> None:
    source, weights = str(tiny_folder()), trained(tiny_folder())
    target, other, empty = tmp_path / "out", tmp_path / "other", tmp_path / "empty"
    for _ in range(2):
        check_export_path(target)
        export_hugging_face(weights.items(), source, target)
    other.mkdir()
    empty.mkdir()
    (other / "notes.txt").write_text("mine")
    for taken in (other, other / "notes.txt", tiny_folder()):
        with pytest.raises(CheckpointError, match="is there already"):
            check_export_path(taken)
    with pytest.raises(CheckpointError, match="is there already"):
        export_hugging_face(weights.items(), source, other)
    assert (other / "notes.txt").read_text() == "mine"
    export_hugging_face(weights.items(), source, empty)


def test_a_model_with_code_of_its_own_takes_it_along_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    source = Path(shutil.copytree(tiny_folder(), tmp_path / "source"))
    (source / "modeling_mine.py").write_text(
        "from transformers import Qwen2ForCausalLM\n\n\nclass MineForCausalLM(Qwen2ForCausalLM):\n    pass\n"
    )
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    (source / "config.json").write_text(json.dumps(config))
    weights = trained(tiny_folder())
    export_hugging_face(weights.items(), str(source), tmp_path / "out", trust_remote_code=True)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(found).__name__ == "MineForCausalLM"
    assert torch.equal(dict(found.named_parameters())["model.norm.weight"], weights["model.norm.weight"])
