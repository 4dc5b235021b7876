"""The SGLang rollout beyond the contract: seeds, tensor parallelism, checksums, processes and training.

Run by `make test-sglang`.
"""

import importlib.metadata
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import Lock, Pipe
from pathlib import Path

import pytest
import torch
from support.processes import MARK, marked, none_left_behind, still_running
from support.sglang_pool import SGLangPool
from support.vllm_runs import run_with_vllm
from torch import Tensor, nn

from camshaft.config.families.known import served_models
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import RolloutHarness, expect_close
from camshaft.contracts.rollout.suite import SAMPLINGS
from camshaft.digest import digest
from camshaft.errors import RolloutError
from camshaft.models.tiny import make_tiny_model
from camshaft.rollout import build_rollout
from camshaft.rollout.base import SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(SGLangPool(), tmp_path_factory.mktemp("models"))  # pyright: ignore[reportArgumentType]


# -- tokens ---------------------------------------------------------------------------------------


def test_seeds_give_the_samples_of_the_builtin_generator(harness: RolloutHarness) -> None:
    case, prompts, seeds = harness.case(), harness.prompts(4, 9, 1, 9), torch.tensor([5, -1, 2**62, 7])
    builtin = build_rollout("torch", RolloutEngineConfig(model_path=case.rollout.config.model_path, max_model_len=96))
    builtin.load_weights(case.weights())
    for sampling in SAMPLINGS:
        out, expected = (rollout.generate_sequences(prompts, sampling, seeds) for rollout in (case.rollout, builtin))
        assert out.responses.values.tolist() == expected.responses.values.tolist()
        expect_close(out.log_probs, expected.log_probs, 1e-4, "log-probs")


def test_prefix_cache_is_reset_by_a_weight_sync(harness: RolloutHarness) -> None:
    case, prompts = harness.case(), harness.prompts(40, 40, seed=5)

    def cached() -> float:
        return case.rollout.generate_sequences(prompts, SamplingParams(4)).metrics["prompt_tokens_cached"]

    assert cached() == 0
    assert cached() == 2 * 39  # SGLang always computes the last token of a prompt
    case.rollout.load_weights(case.weights())
    assert cached() == 0


def test_tensor_parallel_output_is_correct(harness: RolloutHarness) -> None:
    case, prompts = harness.case(tensor_model_parallel_size=2), harness.prompts(4, 9, 20)
    for sampling in (SamplingParams(12, temperature=0), SamplingParams(12, top_p=0.8)):
        out = case.rollout.generate_sequences(prompts, sampling)
        expect_close(out.log_probs, case.log_probs(prompts, out.responses, sampling), 1e-4, "log-probs")
    assert case.rollout.weight_digests() == {name: digest(weight) for name, weight in case.weights()}


# -- weights, in the process of the model ------------------------------------------------------------


class Layer(nn.Module):
    """A layer that fuses three weights and ignores unknown names."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.norm = nn.Linear(4, 8, bias=False), nn.LayerNorm(4, bias=False)

    def load_weights(self, named: list[tuple[str, Tensor]]) -> None:
        places = {"q_proj.weight": (0, 4), "k_proj.weight": (4, 6), "v_proj.weight": (6, 8)}
        for name, tensor in named:
            if name in places:
                self.qkv_proj.weight.data[slice(*places[name])] = tensor
            if name == "norm.weight":
                self.norm.weight.data.copy_(tensor)


WEIGHTS = [("q_proj.weight", torch.ones(4, 4)), ("k_proj.weight", torch.ones(2, 4)),
           ("v_proj.weight", torch.full((2, 4), 2.0)), ("norm.weight", torch.ones(4))]  # fmt: skip


@pytest.fixture
def load_weights(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, int], str]]:
    from camshaft.rollout.sglang import worker

    reader, writer = Pipe(duplex=False)
    monkeypatch.setattr(worker, "_state", worker._State(writer, Lock(), sampler_installed=True))

    def load(model: Layer, weights: list[tuple[str, Tensor]], spoil: str = "") -> tuple[dict[str, int], str]:
        worker.begin_update(model, [("windows", torch.zeros(1))])
        worker.load_bucket(model, weights[:2])
        worker.load_bucket(model, weights[2:])
        if spoil:
            model.get_parameter(spoil).data[-1] += 1
        worker.finish_update(model, [])
        return reader.recv()

    return load


def test_digests_are_computed_from_the_model(load_weights) -> None:
    expected = {name: digest(weight) for name, weight in WEIGHTS}
    assert load_weights(Layer(), WEIGHTS) == (expected, "")
    spoiled, _ = load_weights(Layer(), WEIGHTS, "qkv_proj.weight")
    assert [name for name in expected if spoiled[name] != expected[name]] == ["v_proj.weight"]


def test_weight_that_the_model_skips_is_named(load_weights) -> None:
    _, problem = load_weights(Layer(), [*WEIGHTS[:3], ("nrom.weight", torch.ones(4))])
    assert problem.startswith("missing or NaN weights: norm.weight")
    _, problem = load_weights(Layer(), [*WEIGHTS[:3], ("norm.weight", torch.ones(5))])
    assert "while loading v_proj.weight, norm.weight" in problem


# -- processes --------------------------------------------------------------------------------------

TRAINER = """
import sys, time
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.rollout import build_rollout

if __name__ == "__main__":
    rollout = build_rollout("sglang", RolloutEngineConfig(model_path=sys.argv[1], max_model_len=96))
    print("ready", flush=True)
    time.sleep(3600)
"""


def test_processes_end_with_a_killed_trainer(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    with none_left_behind(10) as mark:
        trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(model)], stdout=subprocess.PIPE, text=True)
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        others = [pid for pid in marked(mark) if pid != trainer.pid]
        assert len(others) >= 3  # at least the rollout process and two of SGLang's
        os.kill(trainer.pid, signal.SIGKILL)
        trainer.wait()
        assert still_running(others) == []


def test_killed_sglang_process_is_an_error_within_seconds(tmp_path: Path) -> None:
    with none_left_behind(10) as mark:
        harness = RolloutHarness(SGLangPool(), tmp_path)  # pyright: ignore[reportArgumentType]
        case = harness.case(max_model_len=1000)
        (holder,) = [pid for pid in marked(mark) if b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        killed = []

        def kill() -> None:
            killed.append(time.monotonic())
            os.kill(holder, signal.SIGKILL)

        threading.Timer(1.0, kill).start()
        with pytest.raises(RolloutError, match=r"died in generate_sequences.*resume the run"):
            case.rollout.generate_sequences(harness.prompts(*[4] * 16), SamplingParams(900, ignore_eos=True))
        assert time.monotonic() - killed[0] < 15
        del harness, case
    assert MARK not in os.environ


def test_unsupported_options_are_rejected(tmp_path: Path) -> None:
    model = str(make_tiny_model(tmp_path / "model"))
    with pytest.raises(RolloutError, match="max_model_len=5000 exceeds the 1024 positions of the model"):
        build_rollout("sglang", RolloutEngineConfig(model_path=model, max_model_len=5000))
    for options, message in (({"no_such_option": 1}, "failed to start: .*no_such_option"),
                          ({"tp_size": 2}, "engine_kwargs sets tp_size, which camshaft derives")):  # fmt: skip
        with pytest.raises(RolloutError, match=message):
            build_rollout("sglang", RolloutEngineConfig(model_path=model, engine_kwargs=options))


# -- training ---------------------------------------------------------------------------------------


def test_sglang_follows_the_actor(tmp_path: Path) -> None:
    """After each update, greedy responses match those of the trained model."""
    more = {"actor_rollout_ref.rollout.name": "sglang", "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}
    responses = run_with_vllm(tmp_path, more, steps=2)
    assert len(responses) == 2
    for step in responses:
        assert step.by_vllm == step.by_transformers
        assert step.metrics["rollout/sync_bytes"] > 0
    assert responses[0].by_vllm != responses[-1].by_vllm


def test_the_listed_architectures_are_those_of_the_registry() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "served_models.py"))
    package = Path(str(importlib.util.find_spec("sglang").submodule_search_locations[0]))  # pyright: ignore
    distribution = importlib.metadata.packages_distributions()["sglang"][0]
    assert served_models()["sglang"].version == importlib.metadata.version(distribution), "run: tools/served_models.py"
    assert served_models()["sglang"].architectures == set(tool["sglang_architectures"](package))
