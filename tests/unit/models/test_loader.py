"""Model folders are loaded and saved: weights by name, seeds, overrides, and every kind of invalid folder."""

import json
import logging
import multiprocessing
import shutil
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import tiny_folder, tiny_rows
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from camshaft.config.engine import EngineModel
from camshaft.errors import EngineError, StorageError
from camshaft.models.loader import load_config, load_model, load_tokenizer, stored_weights
from camshaft.models.packed import PackedModel
from camshaft.plugins import install_command


def load(folder: Path | str, seed: int = 0, dtype: str = "float32", **described: Any) -> PackedModel:
    return load_model(EngineModel(path=str(folder), **described), dtype, "cpu", seed)


def weights(model: PackedModel) -> dict[str, torch.Tensor]:
    return dict(model.hf.named_parameters())


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def edit_weights(folder: Path, change: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_weights_match_the_folder(tied: bool):
    folder = tiny_folder("llama", tie_embeddings=tied)
    model, stored = load(folder), load_file(folder / "model.safetensors")
    assert weights(model).keys() == stored.keys()
    assert ("lm_head.weight" in stored) is not tied
    assert all(torch.equal(tensor, stored[name]) for name, tensor in weights(model).items())


def test_tied_embeddings_stay_one_tensor_in_every_dtype():
    for dtype in ("float32", "bfloat16", "float64"):
        hf: Any = load(tiny_folder(), dtype=dtype).hf
        assert hf.get_output_embeddings().weight is hf.get_input_embeddings().weight
        assert hf.dtype == getattr(torch, dtype)


def test_random_init_depends_only_on_the_seed():
    torch.manual_seed(1)
    first = weights(load(tiny_folder(), seed=7, random_init=True))
    torch.manual_seed(2)
    second = weights(load(tiny_folder(), seed=7, random_init=True))
    other = weights(load(tiny_folder(), seed=8, random_init=True))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_random_state_of_the_caller_is_unchanged():
    before = torch.get_rng_state()
    load(tiny_folder(), random_init=True)
    load(tiny_folder(), head="value")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_new_value_head_depends_on_the_seed(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = tiny_folder()
    first, same, other = (weights(load(folder, seed=seed, head="value")) for seed in (3, 3, 4))
    stored = load_file(folder / "model.safetensors")
    assert first.keys() - stored.keys() == {"score.weight", "score.bias"}
    assert all(torch.equal(first[name], tensor) for name, tensor in stored.items())
    assert torch.equal(first["score.weight"], same["score.weight"])
    assert not torch.equal(first["score.weight"], other["score.weight"])
    assert first["score.weight"].shape == (1, 64)
    assert first["score.weight"].std() > 0
    assert caplog.text == ""


def test_loading_writes_nothing_to_the_terminal(capfd):
    load(tiny_folder(), head="value")
    assert capfd.readouterr() == ("", "")


def test_an_untied_causal_lm_also_loads_as_a_value_model():
    assert "score.weight" in weights(load(tiny_folder("llama", tie_embeddings=False), head="value"))


def test_a_saved_value_model_is_read_back_bit_for_bit(tmp_path: Path):
    model = load(tiny_folder(), head="value", seed=5)
    model.hf.save_pretrained(tmp_path)
    again = load(tmp_path, head="value", seed=6)
    assert all(torch.equal(tensor, weights(again)[name]) for name, tensor in weights(model).items())
    hf_model = AutoModelForTokenClassification.from_pretrained(tmp_path)
    assert hf_model.num_labels == 1


@pytest.mark.parametrize(("family", "head"), [("qwen2", "score"), ("gpt2", "classifier"), ("gemma3_text", "score")])
def test_a_critic_may_start_from_a_reward_model(family: str, head: str, tmp_path: Path):
    reward = load(tiny_folder(family), head="reward", random_init=True)
    reward.hf.save_pretrained(tmp_path)
    value = load(tmp_path, head="value")
    assert torch.equal(weights(value)[f"{head}.weight"], weights(reward)["score.weight"])


def test_an_exported_folder_loads_in_transformers(tmp_path: Path):
    folder = tiny_folder("llama", tie_embeddings=False)
    model = load(folder, dtype="bfloat16")
    model.hf.save_pretrained(tmp_path)
    load_tokenizer(str(folder)).save_pretrained(tmp_path)
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hf_model.config._attn_implementation == "sdpa"
    assert hf_model.dtype == torch.bfloat16
    assert all(torch.equal(tensor, weights(model)[name]) for name, tensor in hf_model.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path).encode("1+2") == load_tokenizer(str(folder)).encode("1+2")
    assert hf_model(tiny_rows([4])[0][None]).logits.shape == (1, 4, 112)


def test_override_config_changes_the_model():
    model = load(tiny_folder(), random_init=True, override_config={"num_hidden_layers": 3, "attention_dropout": 0.25})
    assert len(model.hf.model.layers) == 3
    assert model.hf.model.layers[0].self_attn.attention_dropout == 0.25
    assert load_config(tiny_folder(), False, {}).num_hidden_layers == 2


def test_an_unknown_override_names_the_nearest_key():
    with pytest.raises(EngineError, match=r"no key 'atention_dropout'; did you mean 'attention_dropout'\?"):
        load(tiny_folder(), override_config={"atention_dropout": 0.1})
    with pytest.raises(EngineError, match=r"no key 'zzz'; its keys are .*hidden_size"):
        load(tiny_folder(), override_config={"zzz": 1})


def test_a_rejected_override_shows_its_reason():
    with pytest.raises(EngineError, match=r"(?s)override_config.*hidden_size.*many"):
        load(tiny_folder(), override_config={"hidden_size": "many"})


def test_external_lib_is_imported_before_the_model_is_built(tmp_path: Path, monkeypatch):
    (tmp_path / "registers_a_model.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM\n"
        "class TinyConfig(LlamaConfig):\n    model_type = 'tiny_external'\n"
        "class TinyModel(LlamaForCausalLM):\n    config_class = TinyConfig\n"
        "AutoConfig.register('tiny_external', TinyConfig)\n"
        "AutoModelForCausalLM.register(TinyConfig, TinyModel)\n"
    )
    folder = copy_of(tiny_folder("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "tiny_external"}))
    with pytest.raises(EngineError, match=r"config.json cannot be read.*tiny_external"):
        load(folder)
    monkeypatch.syspath_prepend(tmp_path)
    assert type(load(folder, external_lib="json, registers_a_model").hf).__name__ == "TinyModel"


def test_a_missing_external_lib_is_named():
    with pytest.raises(EngineError, match="external_lib=no_such_module cannot be imported"):
        load(tiny_folder(), external_lib="no_such_module")


def test_a_missing_folder_reports_the_fix():
    with pytest.raises(
        EngineError,
        match=r"'nobody/no-model' is neither a folder nor a model in .* cache.*hf://nobody/no-model to download",
    ):
        load("nobody/no-model")
    with pytest.raises(EngineError, match="'/no/such/folder' is neither a folder nor a model") as exc_info:
        load("/no/such/folder")
    assert "hf://" not in str(exc_info.value)


def test_a_folder_without_config_lists_its_files(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(EngineError, match=r"has no config.json \(it contains model.safetensors\)"):
        load(tmp_path)


def test_a_broken_config_is_an_error(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json is not valid JSON"):
        load(tmp_path)


def test_a_folder_without_weights_suggests_random_init(tmp_path: Path):
    folder = copy_of(tiny_folder(), tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match=r"(?s)cannot read the weights.*random_init=True"):
        load(folder)
    load(folder, random_init=True)


def test_missing_unknown_and_misshapen_weights_are_all_named(tmp_path: Path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.extra"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(65)

    folder = edit_weights(copy_of(tiny_folder(), tmp_path), change)
    for head in ("causal_lm", "value"):
        with pytest.raises(EngineError) as exc_info:
            load(folder, head=head)
        assert "model.layers.1.mlp.up_proj.weight is missing" in str(exc_info.value)
        assert "model.extra is unknown" in str(exc_info.value)
        assert "model.norm.weight has shape (65,), not (64,)" in str(exc_info.value)


def test_a_reward_model_needs_a_score_head():
    with pytest.raises(EngineError, match=r"head=reward\): score.weight is missing"):
        load(tiny_folder(), head="reward")


def test_a_value_model_does_not_load_as_a_causal_lm(tmp_path: Path):
    load(tiny_folder(), head="value").hf.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"score.bias is unknown; score.weight is unknown"):
        load(tmp_path)


def test_a_value_head_of_another_width_is_an_error(tmp_path: Path):
    AutoModelForTokenClassification.from_pretrained(tiny_folder(), num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"score.weight has shape \(2, 64\), not \(1, 64\)"):
        load(tmp_path, head="value")


def test_a_tokenizer_without_pad_token_pads_with_its_end_token(tmp_path: Path):
    tokenizer = load_tokenizer(str(tiny_folder("llama")))
    tokenizer.pad_token = None
    folder = copy_of(tiny_folder("llama"), tmp_path)
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).pad_token == "<|im_end|>"
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(EngineError, match="neither a pad_token nor an eos_token"):
        load_tokenizer(str(folder))


def test_a_tokenizer_needs_no_model_next_to_it(tmp_path: Path):
    of_model = load_tokenizer(str(tiny_folder("llama")))
    of_model.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    alone = load_tokenizer(str(tmp_path))
    assert alone.get_vocab() == of_model.get_vocab()
    assert alone.encode("12+3=15") == of_model.encode("12+3=15")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineError, match=r"cannot read a tokenizer from .*empty"):
        load_tokenizer(str(tmp_path / "empty"))


def test_a_folder_without_tokenizer_is_an_error(tmp_path: Path):
    shutil.copy(tiny_folder("llama") / "config.json", tmp_path)
    with pytest.raises(EngineError, match="transformers cannot read a tokenizer from"):
        load_tokenizer(str(tmp_path))


# -- loading weights only ---------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen2", False), ("gemma2", True)])
def test_stored_weights_equal_the_files_and_appear_once(family: str, tied: bool) -> None:
    folder = tiny_folder(family, tie_word_embeddings=tied)
    stored, tensors = list(stored_weights(EngineModel(path=str(folder)))), load_file(folder / "model.safetensors")
    assert len(stored) == len(dict(stored))
    assert dict(stored).keys() == tensors.keys()
    assert ("lm_head.weight" in tensors) == (not tied)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in stored)


def test_stored_weights_have_the_number_format_of_the_files(tmp_path: Path) -> None:
    folder = copy_of(tiny_folder(), tmp_path)
    edit_weights(folder, lambda tensors: tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert {tensor.dtype for _, tensor in stored_weights(EngineModel(path=str(folder)))} == {torch.bfloat16}


def test_incomplete_stored_weights_are_an_error(tmp_path: Path) -> None:
    folder = edit_weights(copy_of(tiny_folder(), tmp_path), lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(EngineError, match=r"model\.norm\.weight is missing"):
        list(stored_weights(EngineModel(path=str(folder))))


def test_a_url_is_a_folder_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAMSHAFT_CACHE", str(tmp_path / "cache"))
    folder, files = tiny_folder(), fsspec.filesystem("memory")
    for path in (path for path in folder.rglob("*") if path.is_file()):
        files.pipe_file(f"/bucket/tiny/{path.relative_to(folder)}", path.read_bytes())
    try:
        remote, local = weights(load("memory://bucket/tiny")), weights(load(folder))
        assert all(torch.equal(remote[name], weight) for name, weight in local.items())
        assert load_tokenizer("memory://bucket/tiny").get_vocab() == load_tokenizer(str(folder)).get_vocab()
        with pytest.raises(StorageError, match="memory://bucket/none does not exist"):
            load_tokenizer("memory://bucket/none")
    finally:
        files.rm("/bucket", recursive=True)


def load_without_peft(folder: str, result: Connection) -> None:
    """Import the package again without PEFT, load a model, and send the error of a model with an adapter."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("camshaft", "peft"):
            del sys.modules[name]
    sys.modules["peft"] = None  # pyright: ignore[reportArgumentType] (import peft: ModuleNotFoundError)
    from camshaft.config.engine import EngineModel, LoRAConfig
    from camshaft.errors import EngineError
    from camshaft.models.linear_logprob import linear_logprob
    from camshaft.models.loader import load_model
    from camshaft.models.lora import merged_weights

    model = EngineModel(path=folder)
    assert dict(merged_weights(load_model(model, "float32", "cpu", 0).hf))
    linear_logprob(torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64))
    assert "camshaft.models.triton.linear_logprob" not in sys.modules
    try:
        load_model(model.model_copy(update={"lora": LoRAConfig(rank=2)}), "float32", "cpu", 0)
    except EngineError as error:
        result.send(str(error))


def test_optional_libraries_are_imported_only_on_demand() -> None:
    """PEFT may be missing without adapters, and CPU builds of torch do not include Triton."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=load_without_peft, args=(str(tiny_folder()), sender))
    process.start()
    sender.close()
    assert receiver.poll(100)
    assert receiver.recv() == f"LoRA requires the package 'peft'; run: {install_command('peft')}"
    process.join()
