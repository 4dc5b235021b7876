"""`camshaft export`: checkpoints of the reference engine and of two ranks become folders for transformers and PEFT."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.command_line import Run, camshaft
from support.ppo_runs import run_ppo, saved_weights
from support.ranks import run_warm_ranks
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from camshaft import storage
from camshaft.checkpoint import CheckpointManager
from camshaft.cli.export import file_bytes
from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig
from camshaft.engine.fsdp import FSDPEngine
from camshaft.engine.single import SingleDeviceEngine

LOADERS: dict[str, Any] = {
    "causal_lm": AutoModelForCausalLM,
    "value": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
TOKENS = tiny_rows([9])[0][None]


def model_of(head: Any = "causal_lm", rank: int = 0, **sizes: Any) -> EngineModel:
    """Return a model with weights that differ from the folder's; with an adapter, with the folder's base weights."""
    lora = LoRAConfig(rank=rank, alpha=8) if rank else None
    return EngineModel(path=str(tiny_folder(**sizes)), head=head, random_init=not rank, lora=lora)


def moved(engine: Any) -> None:
    """Change every trained weight as training would, including B, which starts at zero."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))


def saved(folder: Path, model: EngineModel, role: str = "actor", step: int = 3, state: Any = None) -> Path:
    """Write a step as a trainer does; return the folder of the run."""
    engine = SingleDeviceEngine(EngineConfig(model=model, seed=7))
    engine.init_model()
    moved(engine)
    CheckpointManager(folder).save(step, {role: lambda path, _: engine.save_checkpoint(path)}, state or {}, {})
    return folder


def save_on_ranks(model: EngineModel, folder: str) -> None:
    engine = FSDPEngine(EngineConfig(model=model, seed=7))
    engine.init_model()
    moved(engine)
    engine.save_checkpoint(folder)


def export(*args: Any) -> Run:
    return camshaft("export", *map(str, args))


def succeeded(*args: Any) -> Run:
    run = export(*args)
    assert run.status == 0, run.err
    return run


def assert_same(model: Any, weights: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    assert [name for name in parameters if not torch.equal(parameters[name], weights[name])] == []


# -- contents of the folder -----------------------------------------------------------------------


@pytest.mark.parametrize("head", ["causal_lm", "value", "reward"])
@pytest.mark.parametrize("tie_embeddings", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_transformers_finds_every_weight_of_the_checkpoint(head: str, tie_embeddings: bool, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of(head, tie_embeddings=tie_embeddings), role="critic")
    out = tmp_path / "out"
    succeeded(run, out)
    exported = LOADERS[head].from_pretrained(out)
    assert_same(exported, saved_weights(run / "global_step_3" / "critic"))
    assert exported.dtype == torch.float32
    source = tiny_folder(tie_embeddings=tie_embeddings)
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(source).get_vocab()
    assert storage.verify(out)["kind"] == "huggingface"
    if head != "causal_lm":
        assert exported(TOKENS).logits.shape[-1] == 1


def test_shards_of_two_ranks_are_joined(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_1"
    run_warm_ranks(save_on_ranks, 2, model_of(), str(step / "actor"))
    succeeded(step / "actor", tmp_path / "out")
    assert len(list((step / "actor" / "model").glob("shard-*"))) == 2
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), saved_weights(step / "actor"))


def test_weights_are_rounded_once_to_the_requested_dtype(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of())
    succeeded(run, tmp_path / "out", "--dtype", "bfloat16")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = saved_weights(run / "global_step_3" / "actor")
    assert_same(exported, {name: weight.to(torch.bfloat16) for name, weight in weights.items()})


def test_files_do_not_exceed_the_size_limit(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of())
    succeeded(run, tmp_path / "out", "--max-shard-size", "100KB")
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*.safetensors")]
    assert len(sizes) > 1
    largest = max(weight.nbytes for weight in saved_weights(run / "global_step_3" / "actor").values())
    assert max(sizes) < max(100_000, largest) + 4096  # and the header of the file
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), saved_weights(run / "global_step_3" / "actor"))


@pytest.mark.parametrize("head", ["causal_lm", pytest.param("value", marks=pytest.mark.slow)])
def test_a_merged_adapter_matches_peft(head: str, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step_1"
    run_warm_ranks(save_on_ranks, 2, model_of(head, rank=4), str(step / "actor"))
    succeeded(step / "actor", tmp_path / "merged")
    succeeded(step / "actor", tmp_path / "adapter", "--adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    more = {} if head == "causal_lm" else {"num_labels": 1}
    base = LOADERS[head].from_pretrained(tiny_folder(), **more)
    base_logits = base(TOKENS).logits.detach().clone()
    expected = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(TOKENS).logits
    actual = LOADERS[head].from_pretrained(tmp_path / "merged")(TOKENS).logits
    assert torch.allclose(actual, expected, atol=1e-5)
    assert not torch.allclose(actual, base_logits, atol=1e-2)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["base_model_name_or_path"]) == (4, str(tiny_folder()))


def test_an_adapter_in_bfloat16_is_the_rounded_one(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of(rank=4))
    succeeded(run, tmp_path / "out", "--adapter", "--dtype", "bfloat16")
    base = AutoModelForCausalLM.from_pretrained(tiny_folder())
    expected = peft.get_peft_model_state_dict(peft.PeftModel.from_pretrained(base, str(tmp_path / "out")))
    weights = saved_weights(run / "global_step_3" / "actor")
    assert len(expected) == len(weights) > 0
    for name, weight in weights.items():
        rounded = weight.to(torch.bfloat16).float()
        assert torch.equal(expected[f"base_model.model.{name.replace('.default.', '.')}"], rounded), name


def test_export_of_a_run_folder_includes_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = Path(shutil.copytree(tiny_folder(), tmp_path / "tokenizer"))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 77}))
    (run,) = run_ppo(tmp_path, {"trainer.save_freq": 1, "data.tokenizer": tokenizer}, steps=1)
    (tmp_path / "actor" / "generation_config.json").write_text('{"top_k": 33}')
    succeeded(tmp_path / "run", tmp_path / "policy")
    succeeded(tmp_path / "run" / "global_step_1" / "critic", tmp_path / "values")
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert_same(policy, run.actor)
    assert policy.generation_config.top_k == 33
    assert AutoTokenizer.from_pretrained(tmp_path / "policy").model_max_length == 77
    assert_same(AutoModelForTokenClassification.from_pretrained(tmp_path / "values"), run.critic)
    tokenizer.rename(tmp_path / "gone")
    refused = export(tmp_path / "run", tmp_path / "later")
    assert refused.status == 1
    assert f"with the tokenizer {tokenizer}" in refused.err
    succeeded(tmp_path / "run", tmp_path / "later", "--model", tmp_path / "actor")
    assert AutoTokenizer.from_pretrained(tmp_path / "later").model_max_length != 77


# -- choice of the checkpoint ---------------------------------------------------------------------


def test_a_run_folder_means_its_newest_complete_step(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of(), step=2)
    saved(run, model_of(tie_embeddings=False), step=10)
    succeeded(run, tmp_path / "newest")
    (run / "global_step_10" / "trainer" / "manifest.json").unlink()  # killed before the step was complete
    assert "global_step_2/actor" in succeeded(run, tmp_path / "whole").out
    for name, step in (("newest", 10), ("whole", 2)):
        weights = saved_weights(run / f"global_step_{step}" / "actor")
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / name), weights)


def test_a_moved_model_is_given_on_the_command_line(tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_folder(), tmp_path / "source"))
    state = {"tokenizer": str(source)}
    run = saved(tmp_path / "run", EngineModel(path=str(source), lora=LoRAConfig(rank=4)), state=state)
    source.rename(tmp_path / "moved")
    refused = export(run, tmp_path / "out")
    assert refused.status == 1
    assert f"of the model {source}" in refused.err
    assert "--model FOLDER" in refused.err
    succeeded(run, tmp_path / "out", "--model", tmp_path / "moved")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    engine = SingleDeviceEngine(
        EngineConfig(model=EngineModel(path=str(tmp_path / "moved"), lora=LoRAConfig(rank=4)), seed=7)
    )
    engine.init_model()
    moved(engine)
    assert_same(exported, dict(engine.named_weights()))


# -- errors ---------------------------------------------------------------------------------------


def test_a_damaged_file_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of())
    file = run / "global_step_3" / "actor" / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    refused = export(run, tmp_path / "out")
    assert refused.status == 1
    assert "is damaged: 'model/model.safetensors' does not match its checksum" in refused.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_folder_without_checkpoint_is_an_error(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of())
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "read.me").touch()
    half = shutil.copytree(run / "global_step_3" / "actor", tmp_path / "half")
    (half / "manifest.json").unlink()
    none = tmp_path / "none"
    shutil.copytree(run, none)
    (none / "global_step_3" / "trainer" / "manifest.json").unlink()
    foreign = shutil.copytree(run / "global_step_3" / "actor", tmp_path / "foreign")
    (foreign / "state.json").write_text('{"engine": {}}')
    for place, says in {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "notes": "is not a checkpoint (it contains read.me); use the folder of a run",
        tiny_folder(): "is not a checkpoint",
        half: "is not a complete checkpoint: it contains no manifest.json",
        none: "contains no complete checkpoint",
        none / "global_step_3": "is not a complete checkpoint",
        foreign: "does not record its model",
    }.items():
        refused = export(place, tmp_path / "out")
        assert refused.status == 1, place
        assert says in refused.err, place
    succeeded(none / "global_step_3" / "actor", tmp_path / "out")


def test_only_an_older_export_is_replaced_with_overwrite(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    (tmp_path / "empty").mkdir()
    assert "already exists" in export(run, tmp_path / "mine", "--force").err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    succeeded(run, tmp_path / "empty")
    (tmp_path / "empty" / "of_the_first").touch()
    refused = export(run, tmp_path / "empty")
    assert refused.status == 2
    assert "replace the export (--force" in refused.err
    assert (tmp_path / "empty" / "of_the_first").exists()
    succeeded(run, tmp_path / "empty", "--force")
    assert not (tmp_path / "empty" / "of_the_first").exists()


def test_unavailable_checkpoint_contents_are_errors_with_a_fix(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", model_of())
    assert "remove --adapter" in export(run, tmp_path / "out", "--adapter").err
    assert "is not a valid size; use for example 5GB" in export(run, tmp_path / "out", "--max-shard-size", "many").err
    drawn = model_of(rank=4).model_copy(update={"random_init": True})
    drawn_run = saved(tmp_path / "drawn", drawn)
    assert "initialized from a seed" in export(drawn_run, tmp_path / "out", "--adapter").err
    succeeded(drawn_run, tmp_path / "merged")
    code = saved(tmp_path / "code", model_of().model_copy(update={"external_lib": "json"}))
    assert "add --trust-remote-code" in export(code, tmp_path / "out").err
    succeeded(code, tmp_path / "trusted", "--trust-remote-code")
    assert not (tmp_path / "out").exists()


def test_sizes_are_read_as_transformers_reads_them() -> None:
    assert [file_bytes(size) for size in ("5GB", "4GiB", "1.5 MB", "700")] == [5 * 10**9, 4 * 2**30, 1_500_000, 700]
