"""Silent errors of vLLM, and the workarounds for them. Run by `make test-vllm`.

Most tests first show the error with the workaround removed, and then its absence with the workaround. If the first part
fails, the installed version of vLLM has fixed the error.
"""

import gc
import importlib.metadata
import importlib.util
import os
import random
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from camshaft.config.families.known import served_models
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness, expect_close, largest_difference
from camshaft.errors import RolloutError
from camshaft.models.loader import load_tokenizer
from camshaft.ragged import Ragged
from camshaft.rollout.base import SamplingParams
from camshaft.rollout.vllm import VLLMRollout, installed, workarounds
from camshaft.rollout.vllm.engine import VLLMEngine, engine_arguments
from camshaft.rollout.vllm.environment import startup_environment
from camshaft.trainer.mini_batches import sampling_seeds

pytestmark = pytest.mark.vllm

SAMPLING = SamplingParams(12, temperature=0.7)


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(VLLMRollout, tmp_path_factory.mktemp("models"), sizes={"hidden": 128})


def off(case: Case, prompts: Ragged, sampling: SamplingParams = SAMPLING) -> float:
    """Return the largest difference to the log-probs of transformers."""
    out = case.rollout.generate_sequences(prompts, sampling)
    return largest_difference(out.log_probs, case.log_probs(prompts, out.responses, sampling))


def train(case: Case) -> None:
    """Change the weights of the reference model only."""
    for weight, (_, new) in zip(case.oracle.parameters(), case.other_weights(), strict=True):
        weight.data = new


def llm_of(case: Case):
    return case.rollout.engine._llm  # pyright: ignore[reportAttributeAccessIssue]


# -- weights --------------------------------------------------------------------------------------


def test_tied_output_layer_follows_the_embedding(harness, monkeypatch):
    case, prompts = harness.case(), harness.prompts(4, 9)
    train(case)
    with monkeypatch.context() as patch:
        patch.setattr(workarounds, "repack_tied_head", lambda model: None)
        case.rollout.load_weights(case.weights())
        assert off(case, prompts) > 0.1
    case.rollout.load_weights(case.weights())
    assert off(case, prompts) < 1e-4


def sync_experts(folder: Path) -> list[float]:
    """Return the differences after a weight sync without and with the workaround."""
    harness = RolloutHarness(VLLMRollout, folder, sizes={"hidden": 128, "num_local_experts": 4})
    case, prompts = harness.case("mixtral"), harness.prompts(4, 9)
    train(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workarounds, "repack_experts", lambda model: None)
        case.rollout.load_weights(case.weights())
        without = off(case, prompts)
    case.rollout.load_weights(case.weights())
    return [without, off(case, prompts)]


def test_experts_follow_a_weight_sync(tmp_path):
    """vLLM runs mixtures of experts only in a process whose first engine has experts."""
    ((without, after),) = run_ranks(sync_experts, 1, tmp_path, timeout=280)
    assert without > 0.1
    assert after < 1e-4


def test_load_weights_of_the_model_raises_on_a_cpu(harness):
    case = harness.case(max_model_len=40)
    with pytest.raises(AttributeError, match="weight_loader"):
        llm_of(case).apply_model(lambda model: model.load_weights(iter(case.weights())))
    case.rollout.load_weights(case.weights())
    assert off(case, harness.prompts(4, 9)) < 1e-4


def test_prefix_cache_is_reset_by_a_weight_sync(harness, monkeypatch):
    case, prompts = harness.case(max_model_len=400), harness.prompts(300, 300)

    def cached() -> float:
        return case.rollout.generate_sequences(prompts, SAMPLING).metrics["prompt_tokens_cached"]

    assert cached() == 0
    assert cached() == 2 * 256  # full blocks: the cache is used
    train(case)
    with monkeypatch.context() as patch:
        patch.setattr(type(llm_of(case)), "reset_prefix_cache", lambda self: True)
        case.rollout.load_weights(case.weights())
        stale = off(case, prompts)
        assert stale > 0.1
    case.rollout.load_weights(case.weights())
    assert cached() == 0
    assert off(case, prompts) < stale / 100  # the remaining difference is rounding, which depends on the processor


def test_interrupted_load_does_not_affect_the_next(harness, monkeypatch):
    case, prompts = harness.case("llama"), harness.prompts(4, 9)
    half = [*case.weights()[:4], ("model.layers.0.nonsense", torch.zeros(2))]
    train(case)
    with monkeypatch.context() as patch:
        patch.setattr(workarounds, "finish_reload", lambda config: lambda model: None)
        with pytest.raises(RolloutError, match="nonsense"):
            case.rollout.load_weights(half)
        with pytest.raises(RolloutError, match=r"did not load all weights"):
            case.rollout.load_weights(case.weights())
    with pytest.raises(RolloutError, match="nonsense"):
        case.rollout.load_weights(half)
    case.rollout.load_weights(case.weights())
    assert off(case, prompts) < 1e-4


def test_weight_that_vllm_skips_is_named(harness):
    case = harness.case("qwen3")
    weights = [(name, weight) for name, weight in case.weights() if name != "model.norm.weight"]
    with pytest.raises(RolloutError, match=r"did not load all weights: .*model\.norm\.weight"):
        case.rollout.engine.load(weights)


def test_digests_cover_the_weights_that_vllm_stores_unchanged(harness):
    case = harness.case()
    before = dict(case.rollout.weight_digests())
    llm_of(case).apply_model(lambda model: model.model.norm.weight.data.add_(1))
    after = case.rollout.weight_digests()
    assert [name for name in before if before[name] != after[name]] == ["model.norm.weight"]
    stored = case.rollout.engine.digests({name: w.meta for name, w in case.rollout.expected.weights.items()})
    assert {"model.embed_tokens.weight", "model.layers.0.input_layernorm.weight"} <= stored.keys()


# -- log-probs and seeds ----------------------------------------------------------------------------


def test_log_probs_are_processed(harness):
    case, prompts = harness.case(), harness.prompts(4, 9)
    out = case.rollout.generate_sequences(prompts, SAMPLING)
    expect_close(out.log_probs, case.log_probs(prompts, out.responses, SAMPLING), 1e-4, "processed")
    assert largest_difference(out.log_probs, case.log_probs(prompts, out.responses, SamplingParams(12))) > 0.1
    with pytest.raises(RolloutError, match="engine_kwargs sets logprobs_mode"):
        VLLMRollout(case.rollout.config.model_copy(update={"engine_kwargs": {"logprobs_mode": "raw_logprobs"}}))


def test_samples_of_a_row_do_not_depend_on_the_batch(harness):
    case, prompts, seeds = harness.case(), harness.prompts(4, 9, 4, 17), torch.tensor([5, -1, 5, 2**62])
    batched = case.rollout.generate_sequences(prompts, SAMPLING, seeds).responses.rows()
    for row, expected in enumerate(batched):
        alone = case.rollout.generate_sequences(prompts.select([row]), SAMPLING, seeds[row : row + 1])
        assert alone.responses.values.tolist() == expected.tolist()


def test_runs_and_steps_have_different_samples(harness, monkeypatch):
    """The trainer's seeds of another run, and of 256 steps later, have equal low 32 bits."""
    case, prompts = harness.case(), harness.prompts(4, 9, 17)
    calls = [(1, 1), (2, 1), (1, 257)]

    def num_different() -> int:
        seeds = [sampling_seeds(seed, step, len(prompts)) for seed, step in calls]
        samples = [
            case.rollout.generate_sequences(prompts, SAMPLING, these).responses.values.tolist() for these in seeds
        ]
        return len({tuple(tokens) for tokens in samples})

    with monkeypatch.context() as patch:
        patch.setattr("camshaft.rollout.vllm.base.mix_seeds", lambda seeds: seeds)
        assert num_different() == 1
    assert num_different() == len(calls)


def test_long_prompts_are_not_chunked_on_a_cpu(harness):
    case = harness.case(max_num_seqs=4, max_num_batched_tokens=32)
    assert off(case, harness.prompts(60, 60, 5, 60)) < 1e-4
    with startup_environment("cpu"):
        import vllm  # pyright: ignore[reportMissingImports]

        arguments = engine_arguments(case.rollout.config) | {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 32,
        }
        pieces = vllm.LLM(**arguments)
    # Keep the engine alive and skip its shutdown, which would destroy the process groups of all other engines.
    KEPT.append(pieces)
    workarounds.disable_exit_finalizer(pieces)
    params = vllm.SamplingParams(seed=1, max_tokens=2)
    with pytest.raises(RuntimeError, match="does not use offset"):
        pieces.generate([{"prompt_token_ids": harness.prompts(60).values.tolist()}], params, use_tqdm=False)


KEPT: list = []


def test_unsupported_temperatures_are_rejected(harness):
    with pytest.raises(RolloutError, match=r"temperature=0.001 is unsupported by vLLM; use at least 0.01"):
        harness.case().rollout.generate_sequences(harness.prompts(4), SamplingParams(2, temperature=0.001))
    with pytest.raises(RolloutError, match=r"rejected the sampling options: temperature must be in"):
        harness.case().rollout.generate_sequences(harness.prompts(4), SamplingParams(2, temperature=3.0))


def test_stop_string_ends_a_row(harness):
    case, prompts = harness.case(), harness.prompts(*[4] * 16)
    stop = (*"abcdefghijklm", "no")
    out = case.rollout.generate_sequences(prompts, SamplingParams(20, stop=stop, ignore_eos=True))
    tokenizer: Any = load_tokenizer(case.rollout.config.model_path)
    texts = [tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in out.responses.rows()]
    assert any(out.finished.tolist())
    for text, finished in zip(texts, out.finished.tolist(), strict=True):
        assert finished == text.endswith(stop)
        assert not any(string in text[:-1] for string in stop)


# -- memory -----------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sleep_frees_the_kv_cache_on_a_cpu(harness):
    case = harness.case()
    with startup_environment("cpu"):
        import vllm  # pyright: ignore[reportMissingImports]

        with pytest.raises(ValueError, match=r"[Ss]leep mode"):
            vllm.LLM(**(engine_arguments(case.rollout.config) | {"enable_sleep_mode": True}))
    awake = resident()
    case.rollout.sleep()
    assert awake - resident() > 0.9 * 2**28
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    assert off(case, harness.prompts(4, 9)) < 1e-4


def test_released_engine_keeps_process_groups(harness):
    one, other = harness.case(), harness.case(max_model_len=20)
    engine = one.rollout.engine
    del one
    gc.collect()
    assert dist.is_initialized()
    assert off(other, harness.prompts(4, 9), SamplingParams(5)) < 1e-4
    again = harness.case()
    assert again.rollout.engine is engine
    assert off(again, harness.prompts(4, 9)) < 1e-4


def test_failed_engine_is_not_reused(harness, monkeypatch):
    case = harness.case(max_model_len=50)
    engine = case.rollout.engine

    def fails(*args, **kwargs):
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm_of(case), "generate", fails)
        with pytest.raises(RolloutError, match="failed while generating: RuntimeError: boom"):
            case.rollout.generate_sequences(harness.prompts(4), SAMPLING)
    with pytest.raises(RolloutError, match="failed in an earlier call"):
        case.rollout.generate_sequences(harness.prompts(4), SAMPLING)
    del case
    gc.collect()
    assert harness.case(max_model_len=50).rollout.engine is not engine


# -- the process, and installed packages --------------------------------------------------------------


def test_start_restores_the_process(harness, capfd):
    def state():
        by_numpy: Any = np.random.get_state()
        drawn = torch.get_rng_state().tolist(), random.getstate(), by_numpy[1].tolist()
        return dict(os.environ), drawn, torch.set_num_threads, torch.get_num_threads(), torch.get_default_dtype()

    before = state()
    harness.case(max_model_len=30)
    assert state() == before
    output = capfd.readouterr()
    assert "INFO" not in output.out + output.err
    assert "WARNING" not in output.out + output.err


def test_unknown_options_are_rejected_by_vllm(harness):
    config = harness.case().rollout.config
    with pytest.raises(RolloutError, match=r"failed to start: .*no_such_option"):
        VLLMRollout(config.model_copy(update={"engine_kwargs": {"no_such_option": 1}}))
    with pytest.raises(RolloutError, match=r"(?s)failed to start: .*max_position_embeddings"):
        VLLMRollout(config.model_copy(update={"max_model_len": 5000}))


def test_options_and_overrides_reach_vllm(harness):
    config = RolloutEngineConfig(
        model_path=harness.case().rollout.config.model_path,
        max_model_len=64,
        engine_kwargs={"kv_cache_memory_bytes": 2**26},
        override_config={"num_hidden_layers": 1},
    )
    engine = VLLMRollout(config).engine
    assert engine._llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes == 2**26
    assert engine._llm.apply_model(lambda model: len(model.model.layers)) == [1]


def test_build_for_another_device_is_rejected(harness):
    config = harness.case().rollout.config.model_copy(update={"device": "cuda"})
    with pytest.raises(RolloutError, match="built for cpu, but the rollout runs on cuda"):
        VLLMEngine(config)


def test_untested_version_is_warned_about_once(harness, monkeypatch, caplog):
    import vllm  # pyright: ignore[reportMissingImports]

    assert vllm.__version__ in installed.TESTED
    installed.import_vllm()
    assert not caplog.messages
    monkeypatch.setattr(vllm, "__version__", "9.9.9")
    installed.import_vllm()
    installed.import_vllm()
    assert len(caplog.messages) == 1
    assert "vLLM 9.9.9" in caplog.messages[0]
    assert ", ".join(installed.TESTED) in caplog.messages[0]


def test_the_listed_architectures_are_those_of_the_registry() -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "served_models.py"))
    package = Path(str(importlib.util.find_spec("vllm").submodule_search_locations[0]))  # pyright: ignore
    distribution = importlib.metadata.packages_distributions()["vllm"][0]
    assert served_models()["vllm"].version == importlib.metadata.version(distribution), "run: tools/served_models.py"
    assert served_models()["vllm"].architectures == set(tool["vllm_architectures"](package))
