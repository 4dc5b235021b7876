"""The code path of CUDA computes what the CPU computes, on a device that is emulated in host memory.

`support/emulated_cuda.py` describes the device. The engine contract and the rollout contract run on it whole.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.emulated_cuda import DEVICE, GIB, DeviceMismatchError, Emulator, RepeatedCalls, emulated_cuda
from support.ppo_runs import Step, run_ppo
from support.same_run import SHUFFLED, compare

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.engine import suite as engine_suite
from camshaft.contracts.engine.harness import EngineHarness
from camshaft.contracts.rollout import suite as rollout_suite
from camshaft.contracts.rollout.harness import RolloutHarness
from camshaft.contracts.rules import Rule
from camshaft.engine.single import SingleDeviceEngine
from camshaft.errors import RolloutError
from camshaft.models.attention import _attend_equal_lengths
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin.cuda import graphs
from camshaft.rollout.builtin.rollout import FREE_SHARE, TorchRollout

FAST_ENGINE = {"step equals oracle", "offload changes nothing"}
FAST_ROLLOUT = {"sleep and wake", "half precision is close"}
"""Rules that `make test` checks; they reach most of the code that depends on the device."""


class Captured(TorchRollout):
    """The built-in generator, which captures each decode step."""

    def __init__(self, config: RolloutEngineConfig):
        super().__init__(config.model_copy(update={"enforce_eager": False}))


@pytest.fixture
def device() -> Iterator[Emulator]:
    with emulated_cuda() as device:
        yield device


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for tiny models, which are written once and read by all rules."""
    return tmp_path_factory.mktemp("emulated")


def rules(suite: Any, fast: set[str]) -> Iterator[Any]:
    for rule in suite.RULES:
        yield pytest.param(rule, id=rule.name.replace(" ", "_"), marks=[pytest.mark.slow] * (rule.name not in fast))


@pytest.mark.parametrize("rule", list(rules(engine_suite, FAST_ENGINE)))
def test_engine_keeps_rule(rule: Rule, device: Emulator, tmp_path: Path) -> None:
    rule.check(EngineHarness(SingleDeviceEngine, tmp_path, DEVICE))


@pytest.mark.parametrize("rollout", [TorchRollout, Captured], ids=["eager", "captured"])
@pytest.mark.parametrize("rule", list(rules(rollout_suite, FAST_ROLLOUT)))
def test_rollout_keeps_rule(
    rule: Rule, rollout: type[TorchRollout], device: Emulator, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    rule.check(RolloutHarness(rollout, scratch, DEVICE))


def steps_on(name: str, folder: Path, steps: int) -> list[Step]:
    return run_ppo(folder, {**SHUFFLED, "trainer.device": name}, steps)


@pytest.mark.parametrize("steps", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_ppo_steps_equal_those_of_the_cpu(steps: int, tmp_path: Path) -> None:
    expected = steps_on("cpu", tmp_path, steps)
    with emulated_cuda() as device:
        actual = steps_on(DEVICE, tmp_path, steps)
    compare(actual, expected, rel=1e-5)
    assert sum(device.launches.values()) > 1000


def test_tensors_of_two_devices_do_not_mix(device: Emulator) -> None:
    there = torch.ones(3, device=DEVICE)
    assert there.is_cuda
    assert there.device.type == DEVICE
    with pytest.raises(DeviceMismatchError, match=r"add got tensors of the host \[\(3,\)\]"):
        torch.add(there, torch.ones(3))
    with pytest.raises(DeviceMismatchError):
        torch.ones(3)[there.long()]
    assert (there + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]


def test_waits_and_launches_are_counted(device: Emulator) -> None:
    there = torch.ones(3, device=DEVICE)
    device.reset()
    doubled = there.view(3, 1).mul(2).sum()
    assert device.launches == {"mul": 1, "sum": 1}
    assert not device.waits
    assert float(doubled) == 6
    assert there.cpu().tolist() == [1, 1, 1]
    assert list(device.waits.values()) == [1, 1]
    device.reset()
    torch.ones(3).to(DEVICE, non_blocking=True)
    assert not device.waits


def test_kv_cache_keeps_to_its_share_of_the_device(
    device: Emulator, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot has 128 positions of 256 bytes. Sampling of one row takes 112 * 40 bytes."""
    harness, slot, row = RolloutHarness(TorchRollout, scratch, DEVICE), 128 * 256, 112 * 40
    case = harness.case()
    rollout: Any = case.rollout
    prompts, sampling = harness.prompts(*[3] * 12), SamplingParams(80, stop_token_ids=tuple(range(5, 60)))
    rows_by_memory = {}
    for rows in (4, 1):
        monkeypatch.setattr(device, "free_memory", int(((rows + 1) * slot + rows * row) / FREE_SHARE) + 16)
        case.check_log_probs(prompts, rollout.generate_sequences(prompts, sampling), sampling)
        rows_by_memory[rows] = rollout.cache.num_slots - 1
        rollout.cache.clear()
    assert rows_by_memory == {4: 4, 1: 1}
    monkeypatch.setattr(device, "free_memory", GIB)
    with pytest.raises(RolloutError, match=r"increase rollout\.gpu_memory_utilization"):
        harness.case(gpu_memory_utilization=1e-7).rollout.generate_sequences(prompts, sampling)


def set_memory(device: Emulator, rollout: Any, rows: int, slot: int, row: int) -> None:
    """Set the free memory of the device so that the KV cache of `rows` rows fits."""
    needed = int(((rows + 1) * slot + rows * row) / FREE_SHARE) + 16
    device.free_memory = needed - rollout.cache.num_bytes


def test_captures_survive_small_changes_of_the_memory(
    device: Emulator, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With free_cache_engine=false, slots stay that suffice for 7/8 of the rows that fit."""
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    monkeypatch.setattr(device, "free_memory", GIB)
    harness, captures, capture = RolloutHarness(Captured, scratch, DEVICE), [], RepeatedCalls.capture
    monkeypatch.setattr(RepeatedCalls, "capture", lambda *args: (captures.append(1), capture(*args))[1])
    case = harness.case(free_cache_engine=False, max_num_seqs=64)
    prompts, sampling = harness.prompts(*[3] * 40), SamplingParams(4, ignore_eos=True)
    results, rollout = [], cast(Any, case.rollout)
    for rows in (37, 36, 38, 35, 36):
        set_memory(device, rollout, rows, 64 * 256, 112 * 40)
        rollout.generate_sequences(prompts, sampling, torch.arange(40))
        results.append((rollout.cache.num_slots - 1, len(captures)))
    assert results == [(36, 2), (36, 2), (36, 2), (32, 4), (32, 4)]  # each for all slots and for the other rows


def test_generation_goes_on_after_a_failed_capture(
    device: Emulator, scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait inside a step invalidates its capture, as on CUDA."""
    monkeypatch.setattr(graphs, "MIN_STEPS", 1)
    harness = RolloutHarness(Captured, scratch, DEVICE)
    case = harness.case()
    rollout: Any = case.rollout
    prompts, sampling = harness.prompts(3, 5), SamplingParams(6, ignore_eos=True)
    make_step = rollout.graphs.make_step

    def waits(cache: Any, positions: torch.Tensor) -> Any:
        positions.max().item()
        return make_step(cache, positions)

    monkeypatch.setattr(rollout.graphs, "make_step", waits)
    for _ in range(2):
        case.check_log_probs(prompts, rollout.generate_sequences(prompts, sampling), sampling)
    (record,) = caplog.records
    assert "operation not permitted when stream is capturing" in record.getMessage()
    assert "rollout.enforce_eager=true" in record.getMessage()


def test_float32_attention_repeats_grouped_heads(device: Emulator) -> None:
    """On CUDA, no kernel for float32 supports grouped queries."""
    query, key = torch.randn(1, 4, 6, 8, device=DEVICE), torch.randn(1, 2, 6, 8, device=DEVICE)
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        out = _attend_equal_lengths(query, key, key, None, 0.0, None)
    assert attention.call_args.args[1].shape == query.shape
    assert not attention.call_args.kwargs["enable_gqa"]
    expected = F.scaled_dot_product_attention(query.cpu(), key.cpu(), key.cpu(), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out.cpu(), expected)
