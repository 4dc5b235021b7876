"""LoRA adapters synced to vLLM separately from the base weights: output, transferred bytes and checksums.

The oracle is the transformers model with the adapter merged in. Run by `make test-vllm`.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm_runs import run_with_vllm
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.config import EngineConfig, EngineModel, RolloutEngineConfig
from camshaft.config.engine import DType, LoRAConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness, expect_close
from camshaft.digest import digest
from camshaft.engine import BaseEngine, build_engine
from camshaft.errors import RolloutError
from camshaft.models.loader import load_tokenizer, quiet_transformers
from camshaft.models.lora import apply_scaling
from camshaft.models.tiny import make_tiny_model
from camshaft.reshard import rollout_mode
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.vllm import VLLMRollout
from camshaft.rollout.vllm.engine import VLLMEngine
from camshaft.temporary import SHARED_MEMORY, private_folder

pytestmark = pytest.mark.vllm

LORA = LoRAConfig(rank=6, alpha=9)
"""The rank is not one of vLLM's buffer sizes, and the scaling is not exact in floating point."""
GREEDY, SAMPLED = SamplingParams(12, temperature=0), SamplingParams(12, temperature=0.7, top_k=20)
TOLERANCE = 1e-3
"""Tolerance of log-probs: base + B A rounds differently from merged weights; a wrong adapter is off by 0.1 or more."""
NAME = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
ALONE = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
"""vLLM fuses the first layer with others, but not the second."""

Weights = Iterable[tuple[str, Tensor]]


class AdapterPair:
    """An engine with an adapter, a vLLM rollout for it, and the transformers model with the merged weights."""

    def __init__(
        self,
        folder: Path,
        family: str = "qwen2",
        lora: LoRAConfig = LORA,
        dtype: DType = "float32",
        loads_adapter: bool = True,
        **config: Any,
    ):
        path = str(make_tiny_model(folder / family, family, hidden=128, seed=3))
        self.harness = RolloutHarness(VLLMRollout, folder)
        self.engine = engine_of(path, lora, dtype)
        sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 16} | config
        rollout_lora = lora if loads_adapter else None
        self.rollout = VLLMRollout(RolloutEngineConfig(model_path=path, lora=rollout_lora, **sizes))
        self.path, self.updates = path, 0

    def update(self) -> None:
        """Change the adapter in place, as an optimizer does."""
        self.updates += 1
        train(self.engine, seed=self.updates)

    def case(self) -> Case:
        with quiet_transformers():
            reference: Any = AutoModelForCausalLM.from_pretrained(self.path, attn_implementation="eager").float().eval()
        merged = self.engine.named_weights(dtype_of=lambda _name, _tensor: torch.float32)
        reference.load_state_dict(dict(merged), strict=False)
        reference.tie_weights()
        return Case(self.rollout, reference, load_tokenizer(self.path))


def engine_of(path: str, lora: LoRAConfig, dtype: DType = "float32") -> BaseEngine:
    """Return an engine whose base weights are large enough to prefer some tokens."""
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=path, lora=lora), dtype=dtype))
    engine.init_model()
    with engine.disable_adapter():
        for name, weight in engine.named_weights():
            weight.mul_(12 if weight.ndim > 1 and "norm" not in name else 1)
    return engine


def train(engine: BaseEngine, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    for _, weight in engine.named_weights(adapter_only=True):
        weight.copy_(0.3 * torch.randn(weight.shape, generator=random))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> AdapterPair:
    return AdapterPair(tmp_path_factory.mktemp("models"))


def bytes_of(weights: Weights) -> int:
    return sum(weight.numel() * 4 for _, weight in weights)


# -- output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.slow), "qwen3"])
def test_output_equals_the_merged_model_after_each_update(family: str, tmp_path: Path) -> None:
    follows(AdapterPair(tmp_path, family), updates=3)


def test_layers_without_adapter_use_base_weights(tmp_path: Path) -> None:
    """One of the layers that vLLM fuses has an adapter; the others have none."""
    some = LORA.model_copy(update={"target_modules": ("q_proj", "v_proj", "up_proj"), "exclude_modules": ("1.mlp",)})
    follows(AdapterPair(tmp_path, lora=some), updates=2)


@pytest.mark.parametrize("loads_adapter", [True, False])
def test_weights_on_frozen_bfloat16_arrive_unrounded(loads_adapter: bool, tmp_path: Path) -> None:
    follows(AdapterPair(tmp_path, dtype="bfloat16", loads_adapter=loads_adapter), updates=1)


def follows(pair: AdapterPair, updates: int) -> None:
    prompts = pair.harness.prompts(3, 9, 17, 5)
    outputs = []
    for _ in range(updates + 1):  # the first adapter is a fresh one
        case = pair.case()
        with rollout_mode(pair.engine, pair.rollout):
            greedy = pair.rollout.generate_sequences(prompts, GREEDY)
            sampled = pair.rollout.generate_sequences(prompts, SAMPLED)
        expected = [case.generate(row, 12, [2]) for row in prompts.rows()]
        outputs.append([row.tolist() for row in greedy.responses.rows()])
        assert outputs[-1] == expected
        expect_close(greedy.log_probs, case.log_probs(prompts, greedy.responses, GREEDY), TOLERANCE, "greedy")
        expect_close(sampled.log_probs, case.log_probs(prompts, sampled.responses, SAMPLED), TOLERANCE, "sampled")
        pair.update()
    assert all(before != after for before, after in itertools.pairwise(outputs))


# -- transfer -----------------------------------------------------------------------------------------


def test_base_weights_are_sent_once(pair: AdapterPair) -> None:
    rollout = VLLMRollout(pair.rollout.config)
    adapter = bytes_of(pair.engine.named_weights(adapter_only=True))
    base = bytes_of(pair.engine.named_weights())
    sent = []
    for _ in range(3):
        pair.update()
        with rollout_mode(pair.engine, rollout) as sync:
            sent.append(sync.metrics()["rollout/sync_bytes"])
        assert rollout.version == sync.version
        assert NAME in sync.digests
        assert "model.norm.weight" in sync.digests
    assert sent == [base + adapter, adapter, adapter]
    assert adapter < base / 4


def test_another_engine_sends_its_base_weights(pair: AdapterPair) -> None:
    other = engine_of(pair.path, LORA)
    base = bytes_of(other.named_weights()) + bytes_of(other.named_weights(adapter_only=True))
    for engine in (pair.engine, other):
        with rollout_mode(engine, pair.rollout) as sync:
            pass
    assert sync.bytes == base


def test_adapter_files_are_deleted(pair: AdapterPair) -> None:
    before = set(private_folder(SHARED_MEMORY).iterdir())
    with rollout_mode(pair.engine, pair.rollout):
        assert set(private_folder(SHARED_MEMORY).iterdir()) <= before


def test_sleep_drops_the_adapter_and_keeps_the_base(pair: AdapterPair) -> None:
    with rollout_mode(pair.engine, pair.rollout):
        llm = pair.rollout.engine._llm
        assert len(llm.llm_engine.list_loras()) == 1
    assert len(llm.llm_engine.list_loras()) == 0
    pair.rollout.wake_up()
    with pytest.raises(RolloutError, match="no adapter; call load_adapter"):
        pair.rollout.generate_sequences(pair.harness.prompts(4), GREEDY)
    pair.rollout.sleep()


def test_prefix_cache_is_reset_with_the_adapter(tmp_path: Path) -> None:
    pair = AdapterPair(tmp_path, max_model_len=400)
    prompts = pair.harness.prompts(300, 300)
    for again in range(2):
        pair.update()
        case = pair.case()
        with rollout_mode(pair.engine, pair.rollout):
            out = pair.rollout.generate_sequences(prompts, SAMPLED)
            assert out.metrics["prompt_tokens_cached"] == 0, again
            expect_close(out.log_probs, case.log_probs(prompts, out.responses, SAMPLED), TOLERANCE, "after the update")
            assert pair.rollout.generate_sequences(prompts, SAMPLED).metrics["prompt_tokens_cached"] > 0


# -- checksums ----------------------------------------------------------------------------------------


def with_fault(change: Callable[[str, Tensor], list[tuple[str, Tensor]]], name: str) -> Callable[[Weights], Any]:
    def changed(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for name_sent, tensor in weights:
            yield from change(name_sent, tensor) if name_sent == name else [(name_sent, tensor)]

    return changed


FAULTS = {
    "dropped": lambda name, tensor: [],
    "transposed": lambda name, tensor: [(name, tensor.t().reshape(tensor.shape))],
    "turned over": lambda name, tensor: [(name, tensor.t())],
    "cut": lambda name, tensor: [(name, tensor[:, :-1])],
    "added": lambda name, tensor: [(name, tensor), (name.replace("k_proj", "z_proj"), tensor)],
    "twice": lambda name, tensor: [(name, tensor), (name, tensor)],
    "one bit": lambda name, tensor: [(name, flipped(tensor))],
}


def flipped(tensor: Tensor) -> Tensor:
    other = tensor.clone()
    other.view(torch.int32)[2, 3] ^= 1
    return other


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("dropped", rf"load_adapter: 1 weights are missing: {NAME}"),
        ("transposed", rf"{NAME}: different from the weights sent by the engine"),
        ("turned over", rf"load_adapter: weight '{NAME}' has shape \(128, 6\), but the model expects \(6, 128\)"),
        ("cut", rf"'{NAME}' has shape \(6, 127\)"),
        ("added", r"the adapter has no weight '.*z_proj.*'; did you mean"),
        ("twice", rf"'{NAME}' was sent twice"),
        ("one bit", rf"{NAME}: different from the weights sent by the engine"),
    ],
)
def test_fault_between_engine_and_rollout_is_named(pair: AdapterPair, monkeypatch, fault: str, message: str) -> None:
    load, changed = VLLMRollout.load_adapter, with_fault(FAULTS[fault], NAME)
    pair.update()
    with monkeypatch.context() as patch:
        patch.setattr(VLLMRollout, "load_adapter", lambda self, weights: load(self, changed(weights)))
        with pytest.raises(RolloutError, match=message), rollout_mode(pair.engine, pair.rollout):
            pytest.fail("generated with wrong weights")
    with rollout_mode(pair.engine, pair.rollout):
        pass


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        ("dropped", NAME, f"{NAME}: missing in the rollout"),
        ("transposed", NAME, f"{NAME}: different from the weights sent by the engine"),
        ("transposed", ALONE, f"{ALONE}: different from the weights sent by the engine"),
        ("one bit", ALONE, f"{ALONE}: different from the weights sent by the engine"),
        ("dropped", ALONE, "vLLM .* rejected the adapter: AssertionError"),
    ],
)
def test_fault_after_validation_is_named(pair: AdapterPair, monkeypatch, fault: str, name: str, message: str) -> None:
    """Change the adapter after validation, in the folder that vLLM reads."""
    load, changed = VLLMEngine.load_adapter, with_fault(FAULTS[fault], name)
    pair.update()
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "load_adapter", lambda self, weights: load(self, changed(weights)))
        with pytest.raises(RolloutError, match=message), rollout_mode(pair.engine, pair.rollout):
            pytest.fail("generated with wrong weights")
    with rollout_mode(pair.engine, pair.rollout):
        pass


def layers_of(pair: AdapterPair) -> dict[str, Any]:
    """Return vLLM's layers with LoRA."""
    (layers,) = pair.rollout.engine._llm.apply_model(lambda model: model.lora_manager.modules)
    return layers


def test_stale_tensor_is_named(pair: AdapterPair, monkeypatch) -> None:
    with rollout_mode(pair.engine, pair.rollout):
        pass
    pair.update()
    stale = [f"base_model.model.model.layers.0.self_attn.o_proj.lora_{part}.weight" for part in "AB"]
    layer = layers_of(pair)["model.layers.0.self_attn.o_proj"]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "set_lora", lambda *arguments: None)
        message = rf"{stale[0]}, {stale[1]}: stale, unchanged since the previous weight sync"
        with pytest.raises(RolloutError, match=message), rollout_mode(pair.engine, pair.rollout):
            pytest.fail("generated with wrong weights")


def test_stale_adapter_is_an_error(pair: AdapterPair, monkeypatch) -> None:
    """vLLM ignores an adapter whose id it has loaded before."""
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "_remove_adapter", lambda self: None)
        with rollout_mode(pair.engine, pair.rollout):
            pass
        pair.update()
        pair.rollout.engine._adapters -= 1
        message = r"base_model\S+, .* and 20 more: stale, unchanged since the previous weight sync"
        with pytest.raises(RolloutError, match=message), rollout_mode(pair.engine, pair.rollout):
            pytest.fail("generated with wrong weights")


def as_sent(engine: BaseEngine) -> Weights:
    return apply_scaling(engine.named_weights(adapter_only=True), LORA)


def test_layer_with_an_unexpected_adapter_is_named(tmp_path: Path) -> None:
    some = LORA.model_copy(update={"target_modules": ("q_proj",)})
    pair = AdapterPair(tmp_path, lora=some)
    with rollout_mode(pair.engine, pair.rollout):
        layers_of(pair)["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[2][0, 0, 3, 1] = 1.0
        digests = pair.rollout.weight_digests()
    assert "model.layers.1.self_attn.v_proj.lora_B.weight" in digests


def test_digests_are_computed_from_vllms_buffers(pair: AdapterPair) -> None:
    with rollout_mode(pair.engine, pair.rollout) as sync:
        before = pair.rollout.weight_digests()
        assert before == sync.digests
        sent = dict(as_sent(pair.engine))
        assert {name: digest(tensor) for name, tensor in sent.items()}.items() <= before.items()
        buffers = layers_of(pair)["model.layers.0.mlp.down_proj"].lora_b_stacked[0]
        buffers[0, 0, 5, 7] = 1.0  # in the padding behind rank 6, which must be zero
        after = pair.rollout.weight_digests()
    assert [name for name in before if before[name] != after[name]] == [ALONE]


# -- rejected options, and a run -------------------------------------------------------------------------


def test_unsupported_adapters_are_rejected(pair: AdapterPair) -> None:
    config = pair.rollout.config
    with pytest.raises(RolloutError, match=r"up to rank 512, got 600; set actor_rollout_ref\.model\.lora_rank=512"):
        VLLMEngine(config.model_copy(update={"lora": LoRAConfig(rank=600)}))
    with pytest.raises(RolloutError, match="engine_kwargs sets max_loras"):
        VLLMEngine(config.model_copy(update={"engine_kwargs": {"max_loras": 2}}))
    rollout = VLLMRollout(config)
    with pytest.raises(RolloutError, match=r"base weights are not loaded; call load_weights\(\) first"):
        rollout.load_adapter([])


ADAPTER = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.model.lora_alpha": 6,
    "actor_rollout_ref.rollout.lora_weights": "adapter",
    "actor_rollout_ref.actor.optim.lr": 1e-1,
}


def test_vllm_follows_the_adapter_of_an_actor(tmp_path: Path) -> None:
    responses = run_with_vllm(tmp_path, ADAPTER, steps=3)
    check(responses)
    check_bytes(responses)


def test_vllm_on_devices_of_its_own_follows_the_adapter(tmp_path: Path) -> None:
    responses = run_with_vllm(tmp_path, ADAPTER | {"actor_rollout_ref.hybrid_engine": False}, steps=3)
    check(responses)
    base_bytes = (tmp_path / "actor" / "model.safetensors").stat().st_size
    assert 0 < responses[0].metrics["rollout/sync_bytes"] < base_bytes / 4  # the base weights have a call of their own


@pytest.mark.slow
def test_vllm_on_two_ranks_follows_a_sharded_adapter(tmp_path: Path) -> None:
    """Both ranks share one engine, which shards the adapter."""
    more = {
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.engine_kwargs": "{kv_cache_memory_bytes: 33554432}",
    }
    responses = run_with_vllm(tmp_path, ADAPTER | more, steps=2)
    check(responses)
    check_bytes(responses)


def check(responses: list[Any]) -> None:
    for step in responses:
        assert step.by_vllm == step.by_transformers
        assert math.isfinite(step.metrics["actor/grad_norm"])
        assert step.metrics["rollout/log_prob_diff_max"] < TOLERANCE
    assert responses[0].by_vllm != responses[-1].by_vllm


def check_bytes(responses: list[Any]) -> None:
    first, second, *_ = (step.metrics["rollout/sync_bytes"] for step in responses)
    assert first > second
