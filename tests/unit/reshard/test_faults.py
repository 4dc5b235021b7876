"""A weight that changes between engine and rollout gives an error that names it, for any cause.

Each fault is realistic: the built-in rollout with a bug between the engine's weight stream and its model.
"""

from collections.abc import Iterable, Iterator

import pytest
import torch
from safetensors.torch import load_file
from support.tiny import tiny_folder
from torch import Tensor

from camshaft.config import EngineConfig, EngineModel, RolloutEngineConfig
from camshaft.config.engine import LoRAConfig
from camshaft.dataproto import DataProto
from camshaft.digest import digest
from camshaft.engine import BaseEngine, build_engine
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.reshard import rollout_mode
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.rollout import TorchRollout

NAME = "model.layers.0.self_attn.q_proj.weight"
"""A matrix of 64 x 64, which keeps its shape when it is transposed."""


class FaultyTransfer(TorchRollout):
    """Load the weights that `fault` returns."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(self.fault(weights))

    def fault(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield from self.one(tensor) if name == NAME else [(name, tensor)]

    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        raise NotImplementedError


class Drops(FaultyTransfer):
    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return []


class Transposes(FaultyTransfer):
    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(NAME, tensor.t())]


class Cuts(FaultyTransfer):
    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(NAME, tensor[:, :-1])]


class Adds(FaultyTransfer):
    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(NAME, tensor), (NAME + "_too", tensor)]


class Rounds(FaultyTransfer):
    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        return [(NAME, tensor.bfloat16().float())]


class SwapsNames(FaultyTransfer):
    """Swap two weights of one shape."""

    OTHER = "model.layers.1.self_attn.q_proj.weight"

    def fault(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        swapped = {NAME: self.OTHER, self.OTHER: NAME}
        yield from ((swapped.get(name, name), tensor) for name, tensor in weights)


class StaleWeight(FaultyTransfer):
    first: Tensor | None = None

    def one(self, tensor: Tensor) -> list[tuple[str, Tensor]]:
        self.first = tensor.clone() if self.first is None else self.first
        return [(NAME, self.first)]


class OverwritesAfterwards(TorchRollout):
    """Receive correct weights and generate with different ones."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name, tensor.clone()) for name, tensor in weights)
        with torch.no_grad():
            self.model.hf.get_parameter(NAME)[3, 5] += 1e-3


class OmitsDigest(TorchRollout):
    def weight_digests(self) -> dict[str, int]:
        return {name: number for name, number in super().weight_digests().items() if name != NAME}


class ReportsExtraWeight(TorchRollout):
    def weight_digests(self) -> dict[str, int]:
        return {**super().weight_digests(), NAME + "_too": 1}


@pytest.fixture
def engine() -> BaseEngine:
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=str(tiny_folder()))))
    engine.init_model()
    return engine


def change(engine: BaseEngine) -> None:
    """Update the weights like a fused optimizer, without incrementing the version of the tensors."""
    for _, weight in engine.named_weights():
        weight.data.mul_(1.01)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Drops, f"weights are missing: {NAME}"),
        (Transposes, f"{NAME}: different from the weights sent by the engine"),
        (Cuts, rf"'{NAME}' has shape \(64, 63\)"),
        (Adds, f"no weight '{NAME}_too'"),
        (Rounds, f"{NAME}: different from the weights sent by the engine"),
        (SwapsNames, f"{NAME}, {SwapsNames.OTHER}: different from the weights sent by the engine"),
        (OverwritesAfterwards, f"{NAME}: different from the weights sent by the engine"),
        (OmitsDigest, f"{NAME}: missing in the rollout"),
        (ReportsExtraWeight, f"{NAME}_too: in the rollout, but never sent"),
    ],
)
def test_a_weight_sync_fault_names_the_weight(broken: type[TorchRollout], message: str, engine: BaseEngine) -> None:
    rollout = broken(RolloutEngineConfig(model_path=str(tiny_folder())))
    with pytest.raises(RolloutError, match=message), rollout_mode(engine, rollout):
        pytest.fail("generated despite the fault")
    with pytest.raises(RolloutError, match="is asleep"):
        rollout.generate_sequences(Ragged.from_rows([[5]]), SamplingParams(1))


def test_a_stale_weight_is_named_and_reported_as_stale(engine: BaseEngine) -> None:
    rollout = StaleWeight(RolloutEngineConfig(model_path=str(tiny_folder())))
    for _ in range(2):
        with rollout_mode(engine, rollout):
            pass  # nothing has changed, so nothing is stale
    change(engine)
    message = f"weight sync 3: .*: {NAME}: stale, unchanged since the previous weight sync"
    with pytest.raises(RolloutError, match=message.replace(": .*: ", ": .*")), rollout_mode(engine, rollout):
        pytest.fail("generated despite the fault")


def test_many_mismatched_weights_are_counted(engine: BaseEngine) -> None:
    class Scales(TorchRollout):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
            super().load_weights((name, tensor + 1) for name, tensor in weights)

    rollout = Scales(RolloutEngineConfig(model_path=str(tiny_folder())))
    total = len(dict(engine.named_weights()))
    with pytest.raises(RolloutError, match=f"and {total - 8} more: different from"), rollout_mode(engine, rollout):
        pytest.fail("generated despite the fault")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma3_text"])
def test_a_correct_weight_sync_passes_the_check(dtype: str, family: str) -> None:
    folder = str(tiny_folder(family, tie_embeddings=family != "llama"))
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=folder)))
    engine.init_model()
    rollout = TorchRollout(RolloutEngineConfig(model_path=folder, dtype=dtype))  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        with rollout_mode(engine, rollout) as sync:
            assert rollout.weight_digests() == sync.digests
        change(engine)


def test_the_rollout_receives_merged_or_base_weights() -> None:
    folder = str(tiny_folder())
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=folder, lora=LoRAConfig(rank=4))))
    engine.init_model()
    with torch.no_grad():
        for _, weight in engine.named_weights(adapter_only=True):
            weight.normal_(std=0.1, generator=torch.Generator().manual_seed(7))
    base = {name: digest(weight) for name, weight in load_file(f"{folder}/model.safetensors").items()}
    rollout = TorchRollout(RolloutEngineConfig(model_path=folder))
    prompts = Ragged.from_rows([[5, 6, 7], [8]], torch.int64)
    with rollout_mode(engine, rollout) as sync:
        out = rollout.generate_sequences(prompts, SamplingParams(6, ignore_eos=True))
    changed = {name for name in sync.digests if sync.digests[name] != base[name]}
    assert changed == {name for name in base if "_proj.weight" in name}
    rows = [torch.cat(pair) for pair in zip(prompts.rows(), out.responses.rows(), strict=True)]
    ids = Ragged.from_rows(rows, torch.int64)
    with engine.eval_mode():
        predictions = engine.infer_batch(
            DataProto.from_dict({"input_ids": ids, "loss_mask": ids.like(ids.positions() > 0)})
        )
    for row, prompt, log_probs in zip(
        predictions["log_probs"].rows(), prompts.rows(), out.log_probs.rows(), strict=True
    ):
        assert torch.allclose(row[len(prompt) :], log_probs, atol=1e-4)
    with engine.disable_adapter(), rollout_mode(engine, rollout) as sync:
        assert sync.digests == {name: base[name] for name in sync.digests}


def test_a_float32_weight_of_the_model_stays_float32() -> None:
    sizes = {"kv_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    experts = {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
    folder = tiny_folder("deepseek_v3", **sizes, **experts, num_experts_per_tok=2, first_k_dense_replace=1, head_dim=8)
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=str(folder))))
    engine.init_model()
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    bias = dict(engine.named_weights())[name]
    bias.copy_(torch.tensor([1.001, 2.002, 3.003, 4.004]))
    rollout = TorchRollout(RolloutEngineConfig(model_path=str(folder), dtype="bfloat16"))
    with rollout_mode(engine, rollout):
        assert torch.equal(rollout.model.hf.get_buffer(name), bias)
