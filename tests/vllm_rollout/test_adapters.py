"""An adapter that goes to vLLM by itself: what it says then, what went over, and that it provably arrived.

The oracle is the plain transformers model with the adapter merged in. Run by `make test-vllm`.
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
from camshaft.config.engine import LoRAConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness, close
from camshaft.digest import digest
from camshaft.engine import BaseEngine, build_engine
from camshaft.errors import RolloutError
from camshaft.models.loader import load_tokenizer, quiet_transformers
from camshaft.models.lora import with_scaling
from camshaft.models.tiny import make_tiny_model
from camshaft.reshard import rollout_mode
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.vllm import VLLMRollout, adapters
from camshaft.rollout.vllm.engine import VLLMEngine

pytestmark = pytest.mark.vllm

LORA = LoRAConfig(rank=6, alpha=9)
"""Neither a size of vLLM's buffers, nor a scaling that floating point divides by exactly."""
GREEDY, SAMPLED = SamplingParams(12, temperature=0), SamplingParams(12, temperature=0.7, top_k=20)
TOLERANCE = 1e-3
"""Of log-probs. Base + B A is summed in another order than merged weights; another adapter is off by 0.1 and more."""
NAME = "base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
ALONE = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
"""The first is fused with others by vLLM, the second is not."""

Weights = Iterable[tuple[str, Tensor]]


class Bench:
    """An engine with an adapter, a vLLM that is told of it, and the plain model of what the engine trains."""

    def __init__(self, folder: Path, family: str = "qwen2", lora: LoRAConfig = LORA, **config: Any):
        path = str(make_tiny_model(folder / family, family, hidden=128, seed=3))
        self.harness = RolloutHarness(VLLMRollout, folder)
        self.engine = engine_of(path, lora)
        sizes: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 16} | config
        self.rollout = VLLMRollout(RolloutEngineConfig(model_path=path, lora=lora, **sizes))
        self.path, self.updates = path, 0

    def update(self) -> None:
        """Another adapter, as an optimizer writes it: in place."""
        self.updates += 1
        train(self.engine, seed=self.updates)

    def case(self) -> Case:
        with quiet_transformers():
            plain: Any = AutoModelForCausalLM.from_pretrained(self.path, attn_implementation="eager").float().eval()
        plain.load_state_dict(dict(self.engine.named_weights()), strict=False)
        plain.tie_weights()
        return Case(self.rollout, plain, load_tokenizer(self.path))


def engine_of(path: str, lora: LoRAConfig) -> BaseEngine:
    """Its base weights are sharp enough to prefer some tokens."""
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=path, lora=lora)))
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
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("models"))


def bytes_of(weights: Weights) -> int:
    return sum(weight.numel() * 4 for _, weight in weights)


# -- what it says -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_output_is_that_of_the_merged_model_after_each_update(family: str, tmp_path: Path) -> None:
    follows(Bench(tmp_path, family), updates=3)


def test_layers_without_an_adapter_are_the_base_models(tmp_path: Path) -> None:
    """Of the layers that vLLM fuses, one has an adapter and the others have none."""
    some = LORA.model_copy(update={"target_modules": ("q_proj", "v_proj", "up_proj"), "exclude_modules": ("1.mlp",)})
    follows(Bench(tmp_path, lora=some), updates=2)


def follows(bench: Bench, updates: int) -> None:
    prompts = bench.harness.prompts(3, 9, 17, 5)
    said = []
    for _ in range(updates + 1):  # the first adapter is a fresh one
        case = bench.case()
        with rollout_mode(bench.engine, bench.rollout):
            greedy = bench.rollout.generate_sequences(prompts, GREEDY)
            sampled = bench.rollout.generate_sequences(prompts, SAMPLED)
        wanted = [case.generate(row, 12, [2]) for row in prompts.rows()]
        said.append([row.tolist() for row in greedy.responses.rows()])
        assert said[-1] == wanted
        close(greedy.log_probs, case.log_probs(prompts, greedy.responses, GREEDY), TOLERANCE, "greedy")
        close(sampled.log_probs, case.log_probs(prompts, sampled.responses, SAMPLED), TOLERANCE, "sampled")
        bench.update()
    assert all(before != after for before, after in itertools.pairwise(said))


# -- what goes over -----------------------------------------------------------------------------------


def test_the_base_goes_over_once_and_then_the_adapter_alone(bench: Bench) -> None:
    rollout = VLLMRollout(bench.rollout.config)
    adapter = bytes_of(bench.engine.named_weights(adapter_only=True))
    whole = bytes_of(bench.engine.named_weights())
    sent = []
    for _ in range(3):
        bench.update()
        with rollout_mode(bench.engine, rollout) as sync:
            sent.append(sync.metrics()["rollout/sync_bytes"])
        assert sync.digests == rollout.weights_sent
        assert NAME in sync.digests
        assert "model.norm.weight" in sync.digests
    assert sent == [whole + adapter, adapter, adapter]
    assert adapter < whole / 4


def test_another_engine_sends_its_own_base(bench: Bench) -> None:
    other = engine_of(bench.path, LORA)
    whole = bytes_of(other.named_weights()) + bytes_of(other.named_weights(adapter_only=True))
    for engine in (bench.engine, other):
        with rollout_mode(engine, bench.rollout) as sync:
            pass
    assert sync.bytes == whole


def test_nothing_of_the_adapter_stays_in_memory_files(bench: Bench) -> None:
    before = set(adapters.MEMORY.glob("camshaft-adapter-*"))
    with rollout_mode(bench.engine, bench.rollout):
        assert set(adapters.MEMORY.glob("camshaft-adapter-*")) <= before


def test_sleep_forgets_the_adapter_and_keeps_the_base(bench: Bench) -> None:
    with rollout_mode(bench.engine, bench.rollout):
        llm = bench.rollout.engine._llm
        assert len(llm.llm_engine.list_loras()) == 1
    assert len(llm.llm_engine.list_loras()) == 0
    bench.rollout.wake_up()
    with pytest.raises(RolloutError, match="no adapter: call load_adapter"):
        bench.rollout.generate_sequences(bench.harness.prompts(4), GREEDY)
    bench.rollout.sleep()


def test_keys_and_values_of_the_adapter_before_serve_nobody(tmp_path: Path) -> None:
    bench = Bench(tmp_path, max_model_len=400)
    prompts = bench.harness.prompts(300, 300)
    for again in range(2):
        bench.update()
        case = bench.case()
        with rollout_mode(bench.engine, bench.rollout):
            out = bench.rollout.generate_sequences(prompts, SAMPLED)
            assert out.metrics["prompt_tokens_cached"] == 0, again
            close(out.log_probs, case.log_probs(prompts, out.responses, SAMPLED), TOLERANCE, "after the update")
            assert bench.rollout.generate_sequences(prompts, SAMPLED).metrics["prompt_tokens_cached"] > 0


# -- that it arrived ----------------------------------------------------------------------------------


def on_the_way(change: Callable[[str, Tensor], list[tuple[str, Tensor]]], name: str) -> Callable[[Weights], Any]:
    def changed(weights: Weights) -> Iterator[tuple[str, Tensor]]:
        for own, tensor in weights:
            yield from change(own, tensor) if own == name else [(own, tensor)]

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
    ("fault", "told"),
    [
        ("dropped", rf"load_adapter: 1 weights did not come: {NAME}"),
        ("transposed", rf"{NAME}: other than what was sent"),
        ("turned over", rf"load_adapter: '{NAME}' came with shape \(128, 6\), but the model wants \(6, 128\)"),
        ("cut", rf"'{NAME}' came with shape \(6, 127\)"),
        ("added", r"the adapter has no weight '.*z_proj.*'; did you mean"),
        ("twice", rf"'{NAME}' came twice"),
        ("one bit", rf"{NAME}: other than what was sent"),
    ],
)
def test_a_fault_between_engine_and_rollout_is_named(bench: Bench, monkeypatch, fault: str, told: str) -> None:
    load, changed = VLLMRollout.load_adapter, on_the_way(FAULTS[fault], NAME)
    bench.update()
    with monkeypatch.context() as patch:
        patch.setattr(VLLMRollout, "load_adapter", lambda self, weights: load(self, changed(weights)))
        with pytest.raises(RolloutError, match=told), rollout_mode(bench.engine, bench.rollout):
            pytest.fail("it was let generate")
    with rollout_mode(bench.engine, bench.rollout):
        pass


@pytest.mark.parametrize(
    ("fault", "name", "told"),
    [
        ("dropped", NAME, f"{NAME}: not there"),
        ("transposed", NAME, f"{NAME}: other than what was sent"),
        ("transposed", ALONE, f"{ALONE}: other than what was sent"),
        ("one bit", ALONE, f"{ALONE}: other than what was sent"),
        ("dropped", ALONE, "vLLM .* does not take the adapter: AssertionError"),
    ],
)
def test_a_fault_inside_is_named(bench: Bench, monkeypatch, fault: str, name: str, told: str) -> None:
    """Behind all that the rollout checks: in the folder that vLLM reads."""
    load, changed = VLLMEngine.load_adapter, on_the_way(FAULTS[fault], name)
    bench.update()
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "load_adapter", lambda self, weights: load(self, changed(weights)))
        with pytest.raises(RolloutError, match=told), rollout_mode(bench.engine, bench.rollout):
            pytest.fail("it was let generate")
    with rollout_mode(bench.engine, bench.rollout):
        pass


def layers_of(bench: Bench) -> dict[str, Any]:
    """vLLM's layers that take adapters."""
    (found,) = bench.rollout.engine._llm.apply_model(lambda model: model.lora_manager.modules)
    return found


def test_a_stale_tensor_is_named_and_called_stale(bench: Bench, monkeypatch) -> None:
    with rollout_mode(bench.engine, bench.rollout):
        pass
    bench.update()
    stale = [f"base_model.model.model.layers.0.self_attn.o_proj.lora_{part}.weight" for part in "AB"]
    layer = layers_of(bench)["model.layers.0.self_attn.o_proj"]
    with monkeypatch.context() as patch:
        patch.setattr(layer, "set_lora", lambda *arguments: None)
        told = rf"{stale[0]}, {stale[1]}: stale, still as the hand-over before sent it"
        with pytest.raises(RolloutError, match=told), rollout_mode(bench.engine, bench.rollout):
            pytest.fail("it was let generate")


def test_a_whole_adapter_that_is_stale_is_an_error(bench: Bench, monkeypatch) -> None:
    """vLLM loads nothing under a number that it knows."""
    with monkeypatch.context() as patch:
        patch.setattr(VLLMEngine, "_forget_adapter", lambda self: None)
        with rollout_mode(bench.engine, bench.rollout):
            pass
        bench.update()
        bench.rollout.engine._adapters -= 1
        told = r"base_model\S+, .* and 20 more: stale, still as the hand-over before sent it"
        with pytest.raises(RolloutError, match=told), rollout_mode(bench.engine, bench.rollout):
            pytest.fail("it was let generate")


def as_sent(engine: BaseEngine) -> Weights:
    return with_scaling(engine.named_weights(adapter_only=True), LORA)


def test_a_layer_with_an_adapter_that_nobody_sent_is_named(tmp_path: Path) -> None:
    some = LORA.model_copy(update={"target_modules": ("q_proj",)})
    bench = Bench(tmp_path, lora=some)
    with rollout_mode(bench.engine, bench.rollout):
        layers_of(bench)["model.layers.1.self_attn.qkv_proj"].lora_b_stacked[2][0, 0, 3, 1] = 1.0
        held = bench.rollout.weight_digests()
    assert "model.layers.1.self_attn.v_proj.lora_B.weight" in held


def test_digests_are_of_what_vllm_computes_with(bench: Bench) -> None:
    with rollout_mode(bench.engine, bench.rollout) as sync:
        before = bench.rollout.weight_digests()
        assert before == sync.digests
        sent = dict(as_sent(bench.engine))
        assert {name: digest(tensor) for name, tensor in sent.items()}.items() <= before.items()
        buffers = layers_of(bench)["model.layers.0.mlp.down_proj"].lora_b_stacked[0]
        buffers[0, 0, 5, 7] = 1.0  # behind the last of six: a smaller adapter is filled up with zeros
        after = bench.rollout.weight_digests()
    assert [name for name in before if before[name] != after[name]] == [ALONE]


# -- what is refused, and a run -------------------------------------------------------------------------


def test_what_vllm_cannot_do_is_refused_in_words(bench: Bench) -> None:
    config = bench.rollout.config
    with pytest.raises(RolloutError, match=r"up to rank 512, got 600; set actor_rollout_ref\.model\.lora_rank=512"):
        VLLMEngine(config.model_copy(update={"lora": LoRAConfig(rank=600)}))
    with pytest.raises(RolloutError, match="engine_kwargs sets max_loras"):
        VLLMEngine(config.model_copy(update={"engine_kwargs": {"max_loras": 2}}))
    rollout = VLLMRollout(config)
    with pytest.raises(RolloutError, match=r"base weights are not there; call load_weights\(\)"):
        rollout.load_adapter([])


ADAPTER = {
    "actor_rollout_ref.model.lora_rank": 4,
    "actor_rollout_ref.model.lora_alpha": 6,
    "actor_rollout_ref.rollout.lora_weights": "adapter",
    "actor_rollout_ref.actor.optim.lr": 1e-1,
}


def test_vllm_follows_an_actor_that_trains_an_adapter(tmp_path: Path) -> None:
    said = run_with_vllm(tmp_path, ADAPTER, steps=3)
    check(said)


def test_vllm_on_two_ranks_follows_a_sharded_actor_that_trains_an_adapter(tmp_path: Path) -> None:
    """Both ranks are one generator, which cuts the adapter's tensors."""
    more = {
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.engine_kwargs": "{kv_cache_memory_bytes: 33554432}",
    }
    check(run_with_vllm(tmp_path, ADAPTER | more, steps=2))


def check(said: list[Any]) -> None:
    for step in said:
        assert step.by_vllm == step.by_transformers
        assert math.isfinite(step.metrics["actor/grad_norm"])
        assert step.metrics["rollout/log_prob_diff_max"] < TOLERANCE
    assert said[0].by_vllm != said[-1].by_vllm
    sent = [step.metrics["rollout/sync_bytes"] for step in said]
    assert sent[0] > sent[1]
