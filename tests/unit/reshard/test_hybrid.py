import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_folder, tiny_rows
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.algorithms import Counts, sft_loss
from camshaft.config import EngineConfig, EngineModel, OptimConfig, RolloutEngineConfig
from camshaft.dataproto import DataProto, Ragged
from camshaft.digest import digest
from camshaft.engine import BaseEngine, StepContext, build_engine
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import EngineError, RolloutError
from camshaft.reshard import enter, hybrid, is_entered, leave, rollout_mode, sync_weights
from camshaft.rollout import BaseRollout, Generation, SamplingParams, build_rollout


@pytest.fixture
def engine() -> BaseEngine:
    model = EngineModel(path=str(tiny_folder()))
    engine = build_engine("reference", EngineConfig(model=model, optim=OptimConfig(lr=0.1)))
    engine.init_model()
    return engine


class RecordingRollout(BaseRollout):
    """Record calls and arguments."""

    def __init__(self, **config: Any) -> None:
        super().__init__(RolloutEngineConfig(model_path=str(tiny_folder()), **config))
        self.calls: list[str] = []
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        self.calls.append(f"load_weights {version}")
        self.weights = {name: weight.clone() for name, weight in weights}
        self.version = version

    def weight_digests(self) -> dict[str, int]:
        return {name: digest(weight) for name, weight in self.weights.items()}

    def generate_sequences(self, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Generation:
        raise ZeroDivisionError

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_up(self) -> None:
        self.calls.append("wake_up")


def train(engine: BaseEngine) -> None:
    """Train for one step from the current weights."""
    ids = Ragged.from_rows(tiny_rows([6, 4]), dtype=torch.int64)

    def loss_fn(data: DataProto, predictions: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
        mask = data.ragged("loss_mask")
        counts = Counts(mask.values, mask.lengths, ctx["num_tokens"], ctx["num_sequences"])
        return sft_loss(predictions["log_probs"].values, counts), ctx

    with engine.train_mode():
        engine.train_batch(DataProto.from_dict({"input_ids": ids}), loss_fn=loss_fn)


def test_the_rollout_is_woken_given_weights_and_put_to_sleep(engine: BaseEngine) -> None:
    rollout = RecordingRollout()
    with rollout_mode(engine, rollout) as sync:
        assert rollout.calls == ["wake_up", "load_weights 1"]
    assert rollout.calls == ["wake_up", "load_weights 1", "sleep"]
    weights = dict(engine.named_weights())
    assert rollout.weights.keys() == weights.keys()
    assert sync.bytes == sum(weight.numel() * 4 for weight in weights.values())
    assert sync.digests == {name: digest(weight) for name, weight in weights.items()}


def test_a_weight_sync_reports_bytes_and_seconds(engine: BaseEngine) -> None:
    rollout = RecordingRollout()
    for _ in range(2):
        start = time.perf_counter()
        with rollout_mode(engine, rollout) as sync:
            passed = time.perf_counter() - start
    assert 0 < sync.check_seconds < sync.seconds < passed
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident * 0.5 < sync.peak_memory < resident * 10
    assert sync.metrics() == {
        "rollout/sync_bytes": sync.bytes,
        "perf/sync_peak_memory_bytes": sync.peak_memory,
        "timing_s/sync": sync.seconds,
        "timing_s/sync_check": sync.check_seconds,
    }


def test_weights_are_sent_in_the_dtype_of_the_rollout(engine: BaseEngine) -> None:
    rollout = RecordingRollout(dtype="bfloat16")
    with rollout_mode(engine, rollout) as sync:
        assert {weight.dtype for weight in rollout.weights.values()} == {torch.bfloat16}
    assert sync.bytes == sum(weight.numel() * 2 for _, weight in engine.named_weights())


class RecordingEngine(SingleDeviceEngine):
    """Record the devices of the parameters."""

    calls: list[str]

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        with super().eval_mode():
            self.calls.append("parameters there")
            yield
            self.calls.append("parameters away")


@pytest.mark.parametrize(("keeps", "dtype"), [(True, "float32"), (True, "bfloat16"), (False, "float32")])
def test_the_engine_offloads_parameters_unless_the_rollout_shares_them(keeps: bool, dtype: str) -> None:
    engine, rollout = (
        RecordingEngine(EngineConfig(model=EngineModel(path=str(tiny_folder())))),
        RecordingRollout(dtype=dtype),
    )
    engine.init_model()
    rollout.keeps_tensors, engine.calls = keeps, rollout.calls
    with rollout_mode(engine, rollout):
        rollout.calls.append("generate")
    before, after = ["parameters there", "wake_up", "load_weights 1"], ["generate", "sleep"]
    kept = keeps and dtype == "float32"  # otherwise it received copies
    assert rollout.calls == [*before, *([*after, "parameters away"] if kept else ["parameters away", *after])]


@pytest.mark.parametrize("keeps", [True, False])
def test_cached_memory_is_released_before_an_external_rollout_wakes(
    keeps: bool, engine: BaseEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = RecordingRollout()
    rollout.keeps_tensors = keeps
    monkeypatch.setattr(hybrid, "release_cache", lambda device: rollout.calls.append(f"cache of {device}"))
    with rollout_mode(engine, rollout):
        assert rollout.calls[:2] == (["wake_up", "load_weights 1"] if keeps else ["cache of cpu", "wake_up"])


def test_the_rollout_sleeps_after_an_error_too(engine: BaseEngine) -> None:
    rollout = RecordingRollout()
    with pytest.raises(ZeroDivisionError), rollout_mode(engine, rollout):
        rollout.generate_sequences(Ragged.from_rows([[5]]), SamplingParams(max_tokens=1))
    assert rollout.calls[-1] == "sleep"


def test_the_first_error_is_raised_if_sleep_fails_too(engine: BaseEngine) -> None:
    class Stuck(RecordingRollout):
        def sleep(self) -> None:
            raise RolloutError("it is stuck")

    rollout = Stuck()
    with pytest.raises(ZeroDivisionError) as exc_info, rollout_mode(engine, rollout):
        rollout.generate_sequences(Ragged.from_rows([[5]]), SamplingParams(max_tokens=1))
    assert exc_info.value.__notes__ == ["rollout.sleep() also failed: it is stuck"]
    with pytest.raises(RolloutError, match="it is stuck"), rollout_mode(engine, rollout):
        pass


def test_each_sync_sends_the_current_weights(engine: BaseEngine) -> None:
    rollout, name = RecordingRollout(), "model.norm.weight"
    with rollout_mode(engine, rollout):
        first = rollout.weights[name]
    train(engine)
    with rollout_mode(engine, rollout):
        assert torch.equal(rollout.weights[name], dict(engine.named_weights())[name])
        assert not torch.equal(rollout.weights[name], first)


def test_one_sync_serves_several_generations(engine: BaseEngine) -> None:
    rollout = RecordingRollout()
    sync = enter(engine, rollout)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            rollout.generate_sequences(Ragged.from_rows([[5]]), SamplingParams(max_tokens=1))
        assert is_entered(rollout)
    leave(rollout)
    assert not is_entered(rollout)
    assert rollout.calls == ["wake_up", "load_weights 1", "sleep"]
    assert (rollout.version, sync.version) == (1, 1)


@pytest.mark.parametrize(("keeps", "dtype"), [(True, "float32"), (True, "bfloat16"), (False, "float32")])
def test_the_engine_trains_only_if_no_rollout_shares_its_weights(keeps: bool, dtype: str, engine: BaseEngine) -> None:
    rollout = RecordingRollout(dtype=dtype)
    rollout.keeps_tensors = keeps
    enter(engine, rollout)
    if keeps and dtype == "float32":
        with pytest.raises(EngineError, match=r"shares the weights of this engine .* leave rollout_mode"):
            train(engine)
        leave(rollout)
    train(engine)
    enter(engine, rollout)
    assert rollout.version == 2


def test_the_engine_trains_after_a_failed_entry(engine: BaseEngine) -> None:
    class Fails(RecordingRollout):
        def weight_digests(self) -> dict[str, int]:
            raise RolloutError("no digests")

    rollout = Fails()
    with pytest.raises(RolloutError, match="no digests"):
        enter(engine, rollout)
    assert rollout.calls[-1] == "sleep"
    assert not is_entered(rollout)
    train(engine)


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_an_awake_rollout_receives_new_weights(name: str, engine: BaseEngine) -> None:
    rollout, prompts = build_rollout(name, RolloutEngineConfig(model_path=str(tiny_folder()))), Ragged.from_rows([[5]])
    other = build_rollout(name, rollout.config)
    other.sleep()
    for version in (1, 2, 3):
        sync = enter(engine, rollout)
        assert (sync.version, rollout.version) == (version, version)
        with rollout_mode(engine, other):
            outs = [each.generate_sequences(prompts, SamplingParams(4, temperature=0)) for each in (rollout, other)]
        assert torch.equal(outs[0].responses.values, outs[1].responses.values)
        assert torch.equal(outs[0].log_probs.values, outs[1].log_probs.values)
        if version == 2:
            leave(rollout)
            train(engine)


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_the_engine_trains_while_a_rollout_generates_with_copies(name: str, engine: BaseEngine) -> None:
    rollout = build_rollout(name, RolloutEngineConfig(model_path=str(tiny_folder())))
    prompts = Ragged.from_rows(tiny_rows([5, 3]), dtype=torch.int64)

    def log_probs() -> Tensor:
        return rollout.generate_sequences(prompts, SamplingParams(4, temperature=0)).log_probs.values

    enter(engine, rollout)  # a rollout that shares the weights gives them back
    sync = sync_weights(engine, rollout)
    assert rollout.weight_digests() == sync.digests == {n: digest(weight) for n, weight in engine.named_weights()}
    before = log_probs()
    train(engine)
    assert torch.equal(log_probs(), before)
    assert rollout.version == 2
    sync_weights(engine, rollout)
    assert not torch.equal(log_probs(), before)
    assert rollout.version == 3
    leave(rollout)
    with pytest.raises(RolloutError, match="asleep"):
        log_probs()


class WithoutVersion(RecordingRollout):
    """A rollout whose `load_weights` does not receive the version."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: weight.clone() for name, weight in weights}


def test_a_rollout_without_the_argument_reports_the_version(engine: BaseEngine) -> None:
    rollout = WithoutVersion()
    for version in (1, 2):
        with rollout_mode(engine, rollout) as sync:
            assert rollout.version == sync.version == version


def test_a_rollout_that_ignores_the_version_is_rejected(engine: BaseEngine) -> None:
    class Ignores(WithoutVersion):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
            super().load_weights(weights)

    message = "weight sync 1: the rollout reports version 0; load_weights.* must set its `version`"
    with pytest.raises(RolloutError, match=message), rollout_mode(engine, Ignores()):
        pytest.fail("generated with weights of an unknown version")


def greedy(folder: str, weights: Iterator[tuple[str, Tensor]], prompt: Tensor, count: int) -> list[int]:
    """Decode greedily with transformers, with a full forward pass for each token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(dict(weights), strict=False)
    ids = prompt.tolist()
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_real_rollouts_match_the_trained_engine(name: str, engine: BaseEngine) -> None:
    folder = str(tiny_folder())
    rollout = build_rollout(name, RolloutEngineConfig(model_path=folder))
    prompts = Ragged.from_rows(tiny_rows([5, 3]), dtype=torch.int64)
    responses = []
    for _ in range(2):
        with rollout_mode(engine, rollout):
            generation = rollout.generate_sequences(
                prompts, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            )
        rows = [row.tolist() for row in generation.responses.rows()]
        assert rows == [greedy(folder, engine.named_weights(), prompt, 4) for prompt in prompts.rows()]
        responses.append(rows)
        train(engine)
    assert responses[0] != responses[1]
