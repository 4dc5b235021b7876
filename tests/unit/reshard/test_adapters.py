"""Adapter-only weight sync: the base weights are sent once and stay, and each sync checks both.

The rollout in these tests only stores weights; `tests/vllm_rollout/test_adapters.py` uses a real one.
"""

from collections.abc import Iterable, Mapping

import pytest
import torch
from support.tiny import tiny_folder
from torch import Tensor

from camshaft.config import EngineConfig, EngineModel, RolloutEngineConfig
from camshaft.config.engine import LoRAConfig
from camshaft.config.rollout import RolloutCapabilities
from camshaft.dataproto import Ragged
from camshaft.digest import digest
from camshaft.engine import BaseEngine, build_engine
from camshaft.errors import RolloutError
from camshaft.reshard import Publisher, Snapshot, receive, receive_base, rollout_mode
from camshaft.rollout import BaseRollout, Generation, SamplingParams

LORA = LoRAConfig(rank=4, alpha=6, target_modules=("q_proj", "down_proj"))
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")
NORM = "model.norm.weight"


class WeightStore(BaseRollout):
    """Store the received tensors; `calls` lists the calls."""

    keeps_tensors = False
    capabilities = RolloutCapabilities(supports_adapter=True)

    def __init__(self, lora: LoRAConfig | None = LORA):
        super().__init__(RolloutEngineConfig(model_path=str(tiny_folder()), lora=lora))
        self.calls: list[str] = []
        self.base: dict[str, Tensor] = {}
        self.adapter: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append("base")
        self.base = {name: weight.clone() for name, weight in weights}

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.calls.append("adapter")
        self.adapter = {name: weight.clone() for name, weight in weights}

    def weight_digests(self) -> Mapping[str, int]:
        return {name: digest(weight) for name, weight in (self.base | self.adapter).items()}

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        raise ZeroDivisionError

    def sleep(self) -> None:
        self.adapter = {}

    def wake_up(self) -> None:
        pass


def engine_with(lora: LoRAConfig | None = LORA) -> BaseEngine:
    engine = build_engine("reference", EngineConfig(model=EngineModel(path=str(tiny_folder()), lora=lora)))
    engine.init_model()
    return engine


@pytest.fixture
def engine() -> BaseEngine:
    engine = engine_with()
    update(engine)
    return engine


def update(engine: BaseEngine) -> None:
    """Update the weights like an optimizer."""
    for name, weight in engine.named_weights(adapter_only=True):
        weight.add_(torch.full_like(weight, 0.01 if ".lora_A." in name else 0.02))


def test_the_base_is_sent_once_and_the_adapter_each_time(engine: BaseEngine) -> None:
    rollout = WeightStore()
    with engine.disable_adapter():
        base = {name: weight.clone() for name, weight in engine.named_weights()}
    adapter = sum(weight.numel() * 4 for _, weight in engine.named_weights(adapter_only=True))
    sent = []
    for _ in range(3):
        with rollout_mode(engine, rollout) as sync:
            sent.append(sync.bytes)
            assert sync.digests.keys() == rollout.base.keys() | rollout.adapter.keys()
            assert all(torch.equal(rollout.base[name], weight) for name, weight in base.items())
        update(engine)
    assert rollout.calls == ["base", "adapter", "adapter", "adapter"]
    assert sent == [sum(weight.numel() * 4 for weight in base.values()) + adapter, adapter, adapter]


def test_base_and_adapter_make_the_merged_weights(engine: BaseEngine) -> None:
    """B contains the scaling, so the receiver needs no scaling factor."""
    rollout = WeightStore()
    with rollout_mode(engine, rollout):
        name = "model.layers.0.self_attn.q_proj.weight"
        sum_of_parts = rollout.base[name] + rollout.adapter[B] @ rollout.adapter[A]
    merged = dict(engine.named_weights())[name]
    assert not torch.allclose(merged, rollout.base[name])
    torch.testing.assert_close(sum_of_parts, merged)


def test_another_engine_sends_its_base(engine: BaseEngine) -> None:
    rollout = WeightStore()
    for each in (engine, engine_with(), engine):
        with rollout_mode(each, rollout):
            pass
    assert rollout.calls == ["base", "adapter"] * 3


class Drops(WeightStore):
    def load_adapter(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_adapter((name, weight) for name, weight in weights if name != A)


def test_a_failed_weight_sync_restarts_with_the_base(engine: BaseEngine) -> None:
    rollout = Drops()
    for _ in range(2):
        with pytest.raises(RolloutError, match=rf"{A}: missing in the rollout"), rollout_mode(engine, rollout):
            pytest.fail("generated despite the fault")
    assert rollout.calls == ["base", "adapter"] * 2


def test_a_changed_base_weight_is_named(engine: BaseEngine) -> None:
    rollout = WeightStore()
    with rollout_mode(engine, rollout):
        pass
    rollout.base[NORM] += 1
    with (
        pytest.raises(RolloutError, match=rf"weight sync 2: .*{NORM}: different from the weights sent by the engine"),
        rollout_mode(engine, rollout),
    ):
        pytest.fail("generated despite the fault")
    with rollout_mode(engine, rollout):
        pass
    assert rollout.calls == ["base", "adapter", "adapter", "base", "adapter"]


def test_an_unchanged_adapter_is_reported_as_stale(engine: BaseEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = WeightStore()
    with rollout_mode(engine, rollout):
        old = dict(rollout.adapter)
    update(engine)
    monkeypatch.setattr(rollout, "load_adapter", lambda weights: rollout.adapter.update({**dict(weights), B: old[B]}))
    message = rf"{B}: stale, unchanged since the previous weight sync"
    with pytest.raises(RolloutError, match=message), rollout_mode(engine, rollout):
        pytest.fail("generated despite the fault")


def test_a_rollout_without_adapters_reports_the_fix() -> None:
    class FullWeightsOnly(WeightStore):
        capabilities = RolloutCapabilities()

    with pytest.raises(
        RolloutError, match=r"FullWeightsOnly does not support LoRA adapters.*rollout\.lora_weights=merged.*name=vllm"
    ):
        FullWeightsOnly()
    with pytest.raises(RolloutError, match="load merged weights"):
        BaseRollout.load_adapter(FullWeightsOnly(lora=None), [])


# -- a rollout on devices of its own ---------------------------------------------------------------


def publish_to(rollout: BaseRollout, engine: BaseEngine) -> Publisher:
    publisher = Publisher(engine, writes=True, snapshots=2, lora=LORA)
    sources = publisher.source_dtypes()
    publisher.dtypes = {name: rollout.sync_dtype(name, torch.empty(0, dtype=dtype)) for name, dtype in sources.items()}
    return publisher


def published(snapshot: Snapshot | None) -> Snapshot:
    assert snapshot is not None
    return snapshot


def test_the_base_is_published_once_and_the_adapter_each_time(engine: BaseEngine) -> None:
    rollout = WeightStore()
    publisher = publish_to(rollout, engine)
    base = published(publisher.publish_base())
    receive_base(base, rollout)
    for version in (1, 2, 3):
        snapshot = published(publisher.publish(version))
        receive(snapshot, rollout)
        merged = dict(engine.named_weights())["model.layers.0.self_attn.q_proj.weight"]
        parts = rollout.base["model.layers.0.self_attn.q_proj.weight"] + rollout.adapter[B] @ rollout.adapter[A]
        torch.testing.assert_close(parts, merged)
        assert rollout.version == version
        assert snapshot.num_bytes == sum(w.numel() * 4 for _, w in engine.named_weights(adapter_only=True))
        update(engine)
    assert rollout.calls == ["base", "adapter", "adapter", "adapter"]
    started_again = WeightStore()
    receive_base(base, started_again)
    receive(snapshot, started_again)
    assert started_again.weight_digests() == rollout.weight_digests()


def test_a_changed_base_weight_is_named_by_a_rollout_on_devices_of_its_own(engine: BaseEngine) -> None:
    rollout = WeightStore()
    publisher = publish_to(rollout, engine)
    receive_base(published(publisher.publish_base()), rollout)
    rollout.base[NORM] += 1
    with pytest.raises(RolloutError, match=rf"{NORM}: different from the weights sent"):
        receive(published(publisher.publish(1)), rollout)
