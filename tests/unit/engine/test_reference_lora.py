"""The reference engine with an adapter: trained weights, exported weights, checkpoint contents."""

import itertools
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from support.tiny import tiny_batch, tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config.engine import EngineConfig, EngineModel, LoRAConfig, OptimConfig
from camshaft.dataproto import DataProto
from camshaft.engine.context import StepContext
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import CheckpointError, EngineError
from camshaft.models.lora import save_adapter

LORA = LoRAConfig(rank=4, alpha=8)


def mean_of(name: str) -> Any:
    def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        return -predictions[name].values.sum() / ctx["num_tokens"], ctx

    return loss_fn


def folder() -> str:
    return str(tiny_folder(hidden=32, initializer_range=0.1))


def engine(head: str = "causal_lm", lora: LoRAConfig | None = LORA, **changes: Any) -> SingleDeviceEngine:
    model = EngineModel(path=folder(), head=head, lora=lora)  # pyright: ignore[reportArgumentType]
    settings: dict[str, Any] = {"optim": OptimConfig(lr=1e-2), "seed": 3}
    built = SingleDeviceEngine(EngineConfig(model=model, **(settings | changes)))
    built.init_model()
    built.set_loss_fn(mean_of("values" if head == "value" else "log_probs"))
    return built


def train(actor: SingleDeviceEngine, steps: int = 3) -> list[float]:
    with actor.train_mode():
        return [actor.train_batch(tiny_batch()).loss for _ in range(steps)]


def infer(actor: SingleDeviceEngine, name: str = "log_probs") -> Tensor:
    with actor.eval_mode():
        return actor.infer_batch(tiny_batch())[name].values


def names_in(saved: Path) -> set[str]:
    return {name for path in saved.rglob("*.safetensors") for name in load_file(path)}


def parameters(actor: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in actor.module.hf.named_parameters()}


@pytest.mark.parametrize("head", ["causal_lm", "value"])
def test_training_changes_only_the_adapter(head: str) -> None:
    actor = engine(head)
    before = parameters(actor)
    losses = train(actor)
    assert all(later < sooner for sooner, later in itertools.pairwise(losses))
    for name, parameter in parameters(actor).items():
        moved = not torch.equal(parameter, before[name])
        assert moved is (".lora_" in name or name.startswith("score.")), name
    num_optimized = sum(len(group["params"]) for group in actor.optimizer.param_groups)
    assert num_optimized == 2 * 14 + 2 * (head == "value")


def test_training_takes_the_steps_of_peft_and_torch() -> None:
    actor = engine(optim=OptimConfig(lr=1e-2, weight_decay=0.1), grad_clip=1e9)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    reference: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder()), settings)
    initial = dict(actor.named_weights(adapter_only=True))
    peft.set_peft_model_state_dict(reference, {name: tensor.clone() for name, tensor in initial.items()})
    trained = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    ids = tiny_batch().ragged("input_ids").rows()
    for norm in train(actor):
        gradients = []
        for row in ids:  # the loss counts all tokens but the first two of each row
            log_p = torch.log_softmax(reference(input_ids=row[None]).logits[0, :-1], dim=-1)
            gradients.append(log_p.gather(1, row[1:, None])[1:, 0])
        loss = -torch.cat(gradients).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert norm == pytest.approx(loss.item(), abs=1e-5)


def test_the_reference_policy_is_the_actor_without_its_adapter() -> None:
    actor, base = engine(), infer(engine(lora=None))
    assert torch.equal(infer(actor), base)
    train(actor)
    trained = infer(actor)
    assert (trained - base).abs().max() > 0.05
    with actor.disable_adapter():
        assert torch.equal(infer(actor), base)
    assert torch.equal(infer(actor), trained)
    train(actor, steps=1)
    assert not torch.equal(infer(actor), trained)


def test_merged_weights_have_the_base_models_names() -> None:
    actor = engine()
    train(actor)
    hf_model = AutoModelForCausalLM.from_pretrained(folder())
    merged = dict(actor.named_weights())
    assert list(merged) == [name for name, _ in hf_model.named_parameters()]
    hf_model.load_state_dict(merged, strict=False)  # a tied head has no separate entry
    row = tiny_batch().ragged("input_ids").rows()[0]
    log_p = torch.log_softmax(hf_model(row[None]).logits[0, :-1], dim=-1).gather(1, row[1:, None])[:, 0]
    torch.testing.assert_close(infer(actor)[2 : len(row)], log_p[1:], rtol=0, atol=1e-5)
    kept = {name: tensor.clone() for name, tensor in merged.items()}
    train(actor)
    assert all(torch.equal(merged[name], tensor) for name, tensor in kept.items())  # the receiver may keep references


def test_an_exported_adapter_initializes_another_engine(tmp_path: Path) -> None:
    actor = engine()
    train(actor)
    save_adapter(actor.named_weights(adapter_only=True), tmp_path, LORA, folder())
    restored = engine(lora=LORA.model_copy(update={"adapter_path": str(tmp_path)}), seed=9)
    assert torch.equal(infer(restored), infer(actor))
    reference = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder()), str(tmp_path))
    row = tiny_batch().ragged("input_ids").rows()[0]
    log_p = torch.log_softmax(reference(input_ids=row[None]).logits[0, :-1], dim=-1).gather(1, row[1:, None])[:, 0]
    torch.testing.assert_close(infer(actor)[2 : len(row)], log_p[1:], rtol=0, atol=1e-5)


def test_an_engine_without_adapter_is_an_error() -> None:
    actor = engine(lora=None)
    with pytest.raises(EngineError, match="no adapter"), actor.disable_adapter():
        pass
    with pytest.raises(EngineError, match="no adapter"):
        next(iter(actor.named_weights(adapter_only=True)))


@pytest.mark.parametrize("head", ["causal_lm", "value"])
def test_a_checkpoint_restores_trained_weights_and_training(head: str, tmp_path: Path) -> None:
    straight: Any = engine(head)
    expected = train(straight, steps=4)
    actor: Any = engine(head)
    train(actor, steps=2)
    actor.save_checkpoint(str(tmp_path / "saved"))
    trained = {name for name, p in actor.module.hf.named_parameters() if p.requires_grad}
    model_names = {
        name for name in names_in(tmp_path / "saved") if "/" not in name and name.endswith((".weight", "bias"))
    }
    assert model_names == trained
    restored = engine(head)
    restored.load_checkpoint(str(tmp_path / "saved"))
    assert train(restored, steps=2) == expected[2:]
    for name, parameter in parameters(restored).items():
        assert torch.equal(parameter, straight.module.hf.get_parameter(name)), name


def test_a_checkpoint_with_an_adapter_is_not_one_without(tmp_path: Path) -> None:
    engine().save_checkpoint(str(tmp_path / "adapter"))
    engine(lora=None).save_checkpoint(str(tmp_path / "whole"))
    with pytest.raises(CheckpointError):
        engine(lora=None).load_checkpoint(str(tmp_path / "adapter"))
    with pytest.raises(CheckpointError):
        engine().load_checkpoint(str(tmp_path / "whole"))


def test_a_forward_only_engine_loads_a_training_checkpoint(tmp_path: Path) -> None:
    actor = engine()
    train(actor)
    actor.save_checkpoint(str(tmp_path / "saved"))
    reader = engine(optim=None)
    reader.load_checkpoint(str(tmp_path / "saved"))
    assert torch.equal(infer(reader), infer(actor))
