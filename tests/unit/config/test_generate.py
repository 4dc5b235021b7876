"""The config of `camshaft generate`, and the configs derived from it."""

from pathlib import Path

import pytest

from camshaft.config import (
    GenerateConfig,
    compose,
    explain,
    generate_engine,
    generate_model,
    generate_sampling,
    load_generate,
)
from camshaft.config.rollout import OPTIONAL_SAMPLING
from camshaft.errors import ConfigError


@pytest.fixture
def words(words: list[str], tmp_path: Path) -> list[str]:
    """Valid overrides, with the files of an RL run."""
    return [
        f"data.path={tmp_path}/val.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        f"model.path={tmp_path}/model",
        "trainer.device=cpu",
    ]


def test_rollout_and_sampling_follow_the_keys(words: list[str], tmp_path: Path) -> None:
    more = ["rollout.prompt_length=100", "rollout.response_length=20", "rollout.dtype=fp32", "rollout.top_k=5"]
    more += ["rollout.stop='###'", "rollout.stop_token_ids=[7]"]
    config = load_generate([*words, *more, "rollout.temperature=0.5", "trainer.seed=9", "rollout.ignore_eos=true"])
    engine = generate_engine(config)
    assert (engine.model_path, engine.max_model_len, engine.dtype) == (f"{tmp_path}/model", 120, "float32")
    assert (engine.device, engine.seed) == ("cpu", 9)
    assert generate_sampling(config) == {
        "max_tokens": 20,
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 1.0,
        **OPTIONAL_SAMPLING,
        "stop": ("###",),
        "stop_token_ids": (7,),
        "do_sample": True,
        "ignore_eos": True,
    }
    assert generate_model(config).path == f"{tmp_path}/model"
    assert config.tokenizer_path() == f"{tmp_path}/model"


def test_megatron_load_format_is_rejected_without_an_actor(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"no actor\. Set rollout\.load_format=dummy_hf\."):
        load_generate([*words, "rollout.name=vllm", "rollout.load_format=dummy_megatron"])


def test_scoring_requires_a_named_function(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "r.py").touch()
    named = {
        (): (False, "auto"),
        ("name=auto",): (True, "auto"),
        ("name=compute_score",): (True, "auto"),
        ("name=gsm8k",): (True, "gsm8k"),
        (f"path={tmp_path}/r.py",): (True, "compute_score"),
        (f"path={tmp_path}/r.py", "name=mine"): (True, "mine"),
    }
    for more, expected in named.items():
        custom = load_generate([*words, *(f"custom_reward_function.{word}" for word in more)]).custom_reward_function
        assert (custom.is_named(), custom.selected()[0].name) == expected, more


def test_n_samples_is_an_alias(words: list[str]) -> None:
    assert load_generate([*words, "data.n_samples=5"]).rollout.n == 5
    assert explain("data.n_samples", "generate").startswith("data.n_samples is an alias of:")


def test_rollout_is_checked_as_in_training(words: list[str]) -> None:
    wrong = ["rollout.n=2", "rollout.do_sample=false", "rollout.name=torhc"]
    with pytest.raises(ConfigError) as raised:
        load_generate([*words, *wrong])
    assert "generates 2 identical responses per prompt. Set rollout.do_sample=true" in str(raised.value)
    assert "Did you mean torch?" in str(raised.value)
    assert "actor_rollout_ref" not in str(raised.value)
    with pytest.raises(ConfigError, match=r"(?s)custom_reward_function.name = gsm9k.*Did you mean gsm8k"):
        load_generate([*words, "custom_reward_function.name=gsm9k"])
    with pytest.raises(ConfigError, match=r"rollout.engine_kwargs"):
        load_generate([*words, "+rollout.engine_kwargs.a=1"])


@pytest.mark.slow
def test_jobs_of_a_sweep_need_separate_output_files(words: list[str]) -> None:
    sweep = ["-m", *words, "trainer.seed=1,2"]
    with pytest.raises(ConfigError, match=r"2 jobs of this sweep would write to data\.output_path="):
        compose(sweep, GenerateConfig)
    separate = "data.output_path=out_${trainer.seed}.parquet"
    configs = compose([*sweep, separate], GenerateConfig)
    assert [config.data.output_path for config in configs] == [
        "out_1.parquet",
        "out_2.parquet",
    ]
