"""Model folders next to checkpoints, written by runs on two ranks, load in transformers and PEFT."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from support.ppo_runs import ppo_config, run_ppo
from support.tiny import tiny_batch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from camshaft import storage
from camshaft.config import Topology, actor_engine, critic_engine
from camshaft.engine import EngineConfig
from camshaft.engine.single import SingleDeviceEngine

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("fork_server")]

ACTOR = "actor_rollout_ref.actor"
CONTENTS = "[model,optimizer,extra,hf_model]"
RANKS: dict[str, Any] = {
    f"{ACTOR}.strategy": "fsdp",
    "critic.strategy": "fsdp",
    "trainer.n_gpus_per_node": 2,
    "trainer.save_freq": 1,
    "data.train_batch_size": 4,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 4,
    "critic.ppo_micro_batch_size_per_gpu": 4,
    f"{ACTOR}.checkpoint.save_contents": CONTENTS,
    "critic.checkpoint.save_contents": CONTENTS,
}
LORA: dict[str, Any] = {
    "actor_rollout_ref.model.lora_rank": 4,
    "critic.model.lora_rank": 4,
    # One role waits for its files, the other does not; the actor's ranks share a row.
    f"{ACTOR}.checkpoint.async_save": True,
    f"{ACTOR}.ulysses_sequence_parallel_size": 2,
}
ALL = ["actor", "actor_huggingface", "critic", "critic_huggingface", "trainer"]
ROWS = tiny_batch([7, 4, 9])


def contents(root: Path) -> dict[int, list[str]]:
    return {step: sorted(path.name for path in folder.iterdir()) for step, folder in storage.step_folders(root)}


def resumed(config: EngineConfig, folder: Path) -> Tensor:
    """Return the outputs for `ROWS` of a single-process engine that loads a checkpoint written by two ranks."""
    engine = SingleDeviceEngine(config.model_copy(update={"optim": None, "options": {}}))
    engine.init_model()
    engine.load_checkpoint(str(folder))
    predictions: Any = engine.infer_batch(ROWS)
    name = "values" if config.model.head == "value" else "log_probs"
    return predictions[name].values[ROWS["loss_mask"].values]


def in_loss(numbers: Any) -> Tensor:
    """Return, for each row, the values of `numbers` (all tokens but the first) at the tokens in the loss."""
    rows, masks = ROWS.ragged("input_ids").rows(), ROWS.ragged("loss_mask").rows()
    with torch.no_grad():
        return torch.cat([numbers(ids)[mask[1:]] for ids, mask in zip(rows, masks, strict=True)])


def log_probs(model: Any) -> Tensor:
    def numbers(ids: Tensor) -> Tensor:
        return model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]

    return in_loss(numbers)


def values(model: Any) -> Tensor:
    return in_loss(lambda ids: model(ids[None]).logits[0, :-1, 0])


def test_transformers_loads_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    keep = {"trainer.max_actor_ckpt_to_keep": 1, "trainer.max_critic_ckpt_to_keep": 1}
    second = {"trainer.default_hdfs_dir": tmp_path / "second"}
    run_ppo(tmp_path, {**RANKS, **keep, **second}, steps=2)
    assert contents(tmp_path / "run") == {2: ALL}
    assert contents(tmp_path / "second") == {1: ALL, 2: ALL}
    config, step = ppo_config(tmp_path, RANKS), tmp_path / "run" / "global_step_2"
    for root in (step, tmp_path / "second" / "global_step_2"):
        actor = log_probs(AutoModelForCausalLM.from_pretrained(root / "actor_huggingface"))
        critic = values(AutoModelForTokenClassification.from_pretrained(root / "critic_huggingface"))
        torch.testing.assert_close(actor, resumed(actor_engine(config, Topology(2), 2), root / "actor"))
        torch.testing.assert_close(critic, resumed(critic_engine(config, Topology(2), 2), root / "critic"))
    assert not (step / "actor_huggingface" / "lora_adapter").exists()
    # These are the trained weights: the weights of the previous step differ.
    before = tmp_path / "second" / "global_step_1" / "actor_huggingface"
    assert not torch.allclose(actor, log_probs(AutoModelForCausalLM.from_pretrained(before)), atol=1e-4)


@pytest.mark.slow
def test_an_adapter_is_merged_and_also_saved_for_peft(tmp_path: Path) -> None:
    run_ppo(tmp_path, {**RANKS, **LORA}, steps=1)
    assert contents(tmp_path / "run") == {1: ALL}
    config, step = ppo_config(tmp_path, {**RANKS, **LORA}), tmp_path / "run" / "global_step_1"
    for role, loader, numbers, engine in (
        ("actor", AutoModelForCausalLM, log_probs, actor_engine(config, Topology(2), 1)),
        ("critic", AutoModelForTokenClassification, values, critic_engine(config, Topology(2), 1)),
    ):
        trained = resumed(engine, step / role)
        folder, base = step / f"{role}_huggingface", tmp_path / role
        torch.testing.assert_close(numbers(loader.from_pretrained(folder)), trained, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(numbers(loader.from_pretrained(base)), trained, atol=1e-4)
        adapted = peft.PeftModel.from_pretrained(loader.from_pretrained(base), folder / "lora_adapter")
        torch.testing.assert_close(numbers(adapted), trained, rtol=1e-4, atol=1e-5)
        assert adapted.peft_config["default"].base_model_name_or_path == str(base)


@pytest.mark.slow
def test_adapters_on_bfloat16_weights_are_merged_as_by_peft(tmp_path: Path) -> None:
    dtypes = dict.fromkeys((f"{ACTOR}.fsdp_config.model_dtype", "critic.model.fsdp_config.model_dtype"), "bfloat16")
    run_ppo(tmp_path, {**RANKS, **LORA, **dtypes}, steps=1)
    for role, loader in (("actor", AutoModelForCausalLM), ("critic", AutoModelForTokenClassification)):
        folder = tmp_path / "run" / "global_step_1" / f"{role}_huggingface"
        base = loader.from_pretrained(tmp_path / role, dtype=torch.bfloat16)
        adapted = peft.PeftModel.from_pretrained(base, folder / "lora_adapter").merge_and_unload()
        exported = loader.from_pretrained(folder, dtype="auto")
        assert exported.dtype == torch.bfloat16
        expected = dict(exported.named_parameters())
        # A value head is float32 in the adapter, and transformers loads it in the dtype of the other weights.
        assert all(torch.equal(weight.bfloat16(), expected[name]) for name, weight in adapted.named_parameters())
