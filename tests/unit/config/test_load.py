"""Composition: overrides, files, complete error reports, and the command line of Hydra."""

import logging
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra.errors import MissingConfigException

from camshaft.config import PPOConfig, SFTConfig, compose, from_container, load_ppo, load_sft
from camshaft.config.auto.fitting import fit_to_prompts
from camshaft.config.composition import as_override
from camshaft.config.tree import get
from camshaft.errors import ConfigError, report_error


def _error(words, **where) -> str:
    with pytest.raises(ConfigError) as caught:
        load_ppo(words, **where)
    return str(caught.value)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", ["a b", "it's", 'say "hi"', "back\\slash", "trail\\", "a,b", "null", "1e5", "x=1", "(a)", "<b>", "{c}"]
)
def test_an_override_keeps_the_text_of_a_value(words, value):
    config = load_ppo([*words, as_override("trainer.experiment_name", value)])
    assert config.trainer.experiment_name == value


def test_an_override_keeps_numbers_lists_and_dicts(words):
    values = {
        "actor_rollout_ref.model.target_modules": ("a b", "it's"),
        "actor_rollout_ref.model.override_config": {"rope_theta": 1e-5, "name": "x y", "sizes": [1, 2]},
        "critic.enable": None,
        "actor_rollout_ref.actor.optim.lr": 3e-06,
        "trainer.val_before_train": False,
    }
    config = load_ppo([*words, *(as_override(key, value) for key, value in values.items())])
    assert {key: get(config.model_dump(), key) for key in values} == values


def test_overrides_reach_the_config_with_their_types(words):
    config = load_ppo([*words, "actor_rollout_ref.actor.optim.lr=2e-6", "data.seed=7", "trainer.experiment_name=12"])
    assert config.actor_rollout_ref.actor.optim.lr == 2e-6
    assert config.data_seed() == 7
    assert config.trainer.experiment_name == "12"


def test_override_changes_dependent_keys(words):
    config = load_ppo([*words, "data.max_response_length=77", "actor_rollout_ref.actor.ppo_mini_batch_size=128"])
    assert config.actor_rollout_ref.rollout.response_length == 77
    assert config.critic.ppo_mini_batch_size == 128
    assert config.critic.strategy == "reference"


def test_files_may_be_one_path_or_a_list(words, tmp_path):
    one = load_ppo(words)
    two = load_ppo([*words, f"data.train_files=[{tmp_path}/train.parquet,{tmp_path}/val.parquet]"])
    assert one.data.train_files == (f"{tmp_path}/train.parquet",)
    assert two.data.train_files == (f"{tmp_path}/train.parquet", f"{tmp_path}/val.parquet")


@pytest.mark.parametrize("name", ["a b", "step=7", "(copy)", "[x]", "{y}", "100%", "a#b", "caf\u00e9", "a&b", "x~y"])
def test_path_needs_no_quotes(words, name, tmp_path):
    file = tmp_path / name / "train.parquet"
    file.parent.mkdir()
    file.write_bytes(b"")
    status, configs = _run([*words, f"data.train_files={file}"])
    assert status == 0
    assert configs[0].data.train_files == (str(file),)


def test_error_of_an_unquoted_value_shows_the_quotes(words, capfd):
    status, _ = _run([*words, "trainer.experiment_name=caf\u00e9#1"])
    assert status == 2
    assert "\"key='value'\"" in capfd.readouterr().err
    status, configs = _run([*words, "trainer.experiment_name='caf\u00e9#1'"])
    assert (status, configs[0].trainer.experiment_name) == (0, "caf\u00e9#1")


def test_tilde_in_a_path_is_the_home_folder(words, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "agent.py").touch()
    agent = "actor_rollout_ref.rollout.multi_turn.agent=~/agent.py:solve"
    config = load_ppo([*words, agent, "data.train_files=~/train.parquet", "actor_rollout_ref.model.path=~/model"])
    assert config.actor_rollout_ref.rollout.multi_turn.agent == f"{tmp_path}/agent.py:solve"
    assert config.data.train_files == (f"{tmp_path}/train.parquet",)
    assert config.actor_rollout_ref.model.path == f"{tmp_path}/model"


def test_command_line_of_the_specification_is_accepted(words, tmp_path):
    config = load_ppo(
        [
            "algorithm.adv_estimator=gae",
            f"data.train_files={tmp_path}/train.parquet",
            f"data.val_files={tmp_path}/val.parquet",
            "data.train_batch_size=1024",
            "data.max_prompt_length=512",
            "data.max_response_length=512",
            "data.filter_overlong_prompts=True",
            "data.truncation='error'",
            f"actor_rollout_ref.model.path={tmp_path}/model",
            "actor_rollout_ref.actor.optim.lr=1e-6",
            "actor_rollout_ref.model.use_remove_padding=True",
            "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
            "actor_rollout_ref.actor.fsdp_config.param_offload=False",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
            "actor_rollout_ref.actor.use_kl_loss=False",
            "actor_rollout_ref.model.enable_gradient_checkpointing=True",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
            "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "critic.optim.lr=1e-5",
            "critic.model.use_remove_padding=True",
            f"critic.model.path={tmp_path}/model",
            "critic.model.enable_gradient_checkpointing=True",
            "critic.ppo_micro_batch_size_per_gpu=32",
            "critic.model.fsdp_config.param_offload=False",
            "critic.model.fsdp_config.optimizer_offload=False",
            "algorithm.use_kl_in_reward=False",
            "trainer.critic_warmup=0",
            'trainer.logger=["console","wandb"]',
            "trainer.project_name='gsm8k'",
            "trainer.experiment_name='deepseek_llm_7b_function_rm'",
            "trainer.n_gpus_per_node=8",
            "trainer.nnodes=1",
            "trainer.save_freq=20",
            "trainer.test_freq=1",
            "trainer.use_legacy_worker_impl=auto",
            "trainer.total_epochs=15",
            # one process:
            "actor_rollout_ref.actor.strategy=reference",
            "actor_rollout_ref.rollout.name=torch",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
        ]
    )
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == 16
    assert config.trainer.logger == ("console", "wandb")
    assert config.actor_rollout_ref.rollout.gpu_memory_utilization == 0.4
    assert config.trainer.total_epochs == 15


# -- files ----------------------------------------------------------------------------------------


def test_file_with_a_defaults_list_overrides_the_defaults(words_without_batch, tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 512}\n")
    config = load_ppo([*words_without_batch, "trainer.seed=9"], config_dir=str(tmp_path), config_name="mine")
    assert (config.data.train_batch_size, config.data.val_batch_size, config.trainer.seed) == (512, 1312, 9)


def test_file_may_contain_a_few_keys_only(words_without_batch, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 512}\ntrainer.seed: 4\n")
    config = load_ppo([*words_without_batch, "data.shuffle=False"], config_dir=str(tmp_path), config_name="mine")
    assert (config.data.train_batch_size, config.trainer.seed, config.data.shuffle) == (512, 4, False)


def test_folder_may_contain_config_groups(words_without_batch, tmp_path):
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "small.yaml").write_text("# @package _global_\ndata: {train_batch_size: 256}\n")
    config = load_ppo([*words_without_batch, "+scale=small"], config_dir=str(tmp_path))
    assert config.data.train_batch_size == 256


def test_dict_overrides_the_defaults(words):
    reference = load_ppo(words)
    again = from_container(reference.model_dump(mode="json"), PPOConfig)
    assert again.model_dump() == reference.model_dump()
    assert fit_to_prompts(again, 90).model_dump() == fit_to_prompts(reference, 90).model_dump()


def test_loading_preserves_the_state_of_hydra(words):
    with hydra.initialize_config_dir(str(Path(__file__).parent), version_base="1.3"):
        load_ppo(words)
        with pytest.raises(MissingConfigException):
            hydra.compose("nothing_here")


# -- errors ---------------------------------------------------------------------------------------


def test_unknown_key_is_reported_with_the_nearest_key(words):
    text = _error([*words, "actor_rollout_ref.actor.optim.learning_rat=1", "trainer.sed=2"])
    assert "actor_rollout_ref.actor.optim.learning_rat = 1" in text
    assert "Did you mean trainer.seed?" in text


@pytest.mark.parametrize("word", ["~", "+=3", "~=3"])
def test_override_without_a_key_is_rejected(word, words):
    assert f"in {word}\n" in _error([*words, word])


def test_key_in_the_wrong_section_suggests_the_right_one(words):
    assert "Did you mean actor_rollout_ref.actor.optim.lr?" in _error([*words, "actor_rollout_ref.actor.lr=1e-6"])


@pytest.mark.parametrize("role", ["actor_rollout_ref.actor", "critic"])
def test_spelled_out_key_suggests_the_abbreviation(role, words):
    assert f"Did you mean {role}.optim.lr?" in _error([*words, f"{role}.optim.learning_rate=1e-6"])


def test_errors_end_with_the_short_names_of_their_keys(words):
    text = _error([*words, "data.max_prompt_length=0"])
    assert "\n\nShort names: prompt_length for data.max_prompt_length.\n\nRun `camshaft config explain" in text
    assert "Short names" not in _error([*words, "trainer.project_nme=2"])


def test_one_letter_is_no_abbreviation(words):
    assert "rollout.n?" not in _error([*words, "actor_rollout_ref.rollout.nodes=2"])


def test_key_without_a_near_match_lists_the_sections(words):
    assert "Keys begin with data, actor_rollout_ref, critic" in _error([*words, "quux.zork=1"])


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("trainer.seed=abc", "must be an integer >= 0"),
        ("data.train_batch_size=0", "must be auto, or an integer >= 1"),
        ("data.train_batch_size=8.5", "must be auto, or an integer >= 1"),
        ("data.train_batch_size=true", "must be auto, or an integer >= 1"),
        ("data.shuffle=3", "must be true or false"),
        ("data.truncation=middel", "must be one of error, left, right, middle"),
        ("actor_rollout_ref.rollout.top_p=1.5", "must be a number > 0 and <= 1"),
        ("actor_rollout_ref.rollout.top_k=-2", "must be an integer >= -1"),
        ("actor_rollout_ref.actor.optim.lr=0", "must be a number > 0"),
        ("actor_rollout_ref.actor.optim.lr=inf", "must be a number > 0"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", "must be two numbers, each >= 0 and < 1"),
        ("actor_rollout_ref.actor.clip_ratio_low=-1", "must be a number >= 0, or null"),
        ("trainer.save_freq=0", "must be auto, -1, or an integer >= 1"),
        ("trainer=5", "must be a section with the keys nnodes"),
        ("data.train_files=[1,2]", "must be a path or a list of paths"),
        ("trainer.use_legacy_worker_impl=perhaps", "must be one of auto, disable, enable, or true or false"),
    ],
)
def test_invalid_value_is_reported_with_the_valid_ones(words, word, expected):
    text = _error([*words, word])
    assert "1 error in the config" in text
    assert expected in text
    assert word.partition("=")[0] in text


def test_all_errors_are_reported_at_once(words):
    text = _error(
        [
            *words,
            "trainer.sed=1",  # unknown
            "trainer.total_epochs=none",  # wrong type
            "data.max_prompt_length=${nope}",  # unresolved
            "data.prompt_key=???",  # no value
            "trainer.default_local_dir=s3://bucket/run",  # a URL
            "data.train_batch_size=300",  # 300 = 256 + 44
            "custom_reward_function.path=/nowhere/reward.py",  # missing file
        ]
    )
    assert "7 errors in the config" in text
    for key in (
        "trainer.sed",
        "total_epochs",
        "max_prompt_length",
        "prompt_key",
        "trainer.default_local_dir",
    ):
        assert key in text
    assert "300 = 1 x 256 + 44" in text
    assert "custom_reward_function.path = /nowhere/reward.py" in text


def test_problem_caused_by_an_invalid_value_is_omitted(words):
    text = _error([*words, "data.train_batch_size=many"])
    assert "1 error in the config" in text


def test_unresolved_interpolation_is_reported_with_its_key(words):
    text = _error([*words, "trainer.project_name=${trainer.nmae}"])
    assert "trainer.project_name = ${trainer.nmae}" in text
    assert "trainer.nmae" in text


def test_null_section_is_an_error(words):
    assert "critic = null" in _error([*words, "critic=null"])


def test_unparsable_override_is_a_config_error(words):
    assert "cannot compose the config" in _error([*words, "trainer.logger=[console"])


def test_missing_file_is_a_config_error(words, tmp_path):
    assert "nothing_here" in _error(words, config_dir=str(tmp_path), config_name="nothing_here")


def test_aliases_that_stand_for_millions_of_values_are_refused(words: list[str], tmp_path: Path) -> None:
    lines = ["a0: &a0 [1]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 8))]
    for text in ("\n".join(lines), "trainer: &t {seed: 3, self: *t}"):
        (tmp_path / "mine.yaml").write_text(text)
        assert "mine.yaml: its aliases" in _error(words, config_dir=str(tmp_path), config_name="mine")
        with pytest.raises(ConfigError, match=r"mine\.yaml: its aliases"):
            compose([f"--config-dir={tmp_path}", "--config-name=mine", *words], PPOConfig)
    (tmp_path / "mine.yaml").write_text("trainer: &t {seed: 5}\nother: *t\n")
    assert "other" in _error(words, config_dir=str(tmp_path), config_name="mine")


LIBRARIES = "server, sglang, vllm"


@pytest.mark.parametrize(
    ("leaf", "name", "readers"),
    [
        ("tensor_model_parallel_size=2", "torch", LIBRARIES),
        ("gpu_memory_utilization=0.5", "hf", "process, server, sglang, torch, vllm"),
        ("load_format=auto", "torch", LIBRARIES),
        ("enforce_eager=false", "hf", "process, server, sglang, torch, vllm"),
        ("update_weights_bucket_megabytes=8", "torch", "process, server, sglang"),
        ("update_weights_bucket_megabytes=8", "vllm", "process, server, sglang"),
    ],
)
def test_key_that_the_rollout_does_not_read_logs_a_warning(words, leaf, name, readers, caplog):
    section = "actor_rollout_ref.rollout"
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo([*words, f"{section}.tensor_model_parallel_size=1", f"{section}.name={name}", f"{section}.{leaf}"])
    reason = f"has no effect with {section}.name={name}; this key is read only with {section}.name={readers}"
    assert caplog.messages == [f"config: {section}.{leaf} {reason}"]


@pytest.mark.parametrize(("leaf", "is_read"), [("load_format=auto", True), ("gpu_memory_utilization=0.5", False)])
def test_rollout_of_another_package_declares_the_keys_it_reads(words, leaf, is_read, caplog):
    section = "actor_rollout_ref.rollout"
    with caplog.at_level(logging.WARNING, "camshaft.config"):
        load_ppo([*words, f"{section}.{leaf}", f"{section}.name=support.own_backends:OwnRollout"])
    assert len(caplog.messages) == (0 if is_read else 1)


# -- the command line -----------------------------------------------------------------------------


def _run(argv: list[str], schema: Any = PPOConfig) -> tuple[int, list]:
    """Return (exit status, configs) of a command with these arguments."""
    try:
        return 0, compose(argv, schema)
    except ConfigError as error:
        return report_error(error), []


def test_command_line_gives_a_config(words, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    handlers = list(logging.getLogger().handlers)
    status, (config,) = _run([*words, "trainer.seed=5"])
    assert (status, config.trainer.seed) == (0, 5)
    assert list(folder.iterdir()) == []  # Hydra wrote nothing,
    assert Path.cwd() == folder  # moved nowhere,
    assert logging.getLogger().handlers == handlers  # and did not configure logging


def test_invalid_config_prints_one_message_with_status_2(words, capfd):
    status, configs = _run([*words, "trainer.sed=5", "data.shuffle=maybe"])
    out, err = capfd.readouterr()
    assert (status, configs, out) == (2, [], "")
    assert err.startswith("2 errors in the config:")
    assert "Did you mean trainer.seed?" in err
    assert "Traceback" not in err
    assert "HYDRA_FULL_ERROR" not in err


@pytest.mark.parametrize(
    "word",
    ["trainer.logger=[console", "a/b=c", "++trainer@pkg=true"],
)
def test_hydra_error_prints_one_message_with_status_2(words, word, capfd):
    status, _ = _run([*words, word])
    _, err = capfd.readouterr()
    assert status == 2
    assert err.startswith("cannot compose the config: ")
    assert "Traceback" not in err
    assert "HYDRA_FULL_ERROR" not in err


def test_a_missing_config_file_is_answered_with_the_existing_ones(words, tmp_path, capfd):
    assert _run([*words, "--config-name=task"])[0] == 2
    assert capfd.readouterr().err == (
        "camshaft has no config file task.yaml; to use your own, set --config-dir to its folder\n"
    )
    for name in ("tasks", "other"):
        (tmp_path / f"{name}.yaml").write_text("trainer: {seed: 4}\n")
    assert _run([*words, f"--config-dir={tmp_path}", "--config-name=task"])[0] == 2
    assert capfd.readouterr().err == (
        f"no config file task.yaml in {tmp_path} (--config-dir). Did you mean tasks? Config files there: other, tasks\n"
    )


@pytest.mark.parametrize("word", ["hydra.job.name=mine", "++hydra.job.name=mine"])
def test_keys_of_hydra_are_no_keys_of_the_config(words, word):
    words = [*words, "trainer.experiment_name=mine"]
    assert _run([*words, word]) == (0, compose(words, PPOConfig))


def test_key_can_be_added_and_deleted(words_without_batch, tmp_path):
    (tmp_path / "mine.yaml").write_text("data: {train_batch_size: 512}\ntrainer: {seed: 4}\n")
    _, (config,) = _run(
        [
            "--config-dir",
            str(tmp_path),
            *words_without_batch,
            "+actor_rollout_ref.model.override_config.attention_dropout=0.1",
            "~trainer.seed",
            "--config-name=mine",
        ]
    )
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.1}
    assert config.data.train_batch_size == 512
    assert config.trainer.seed == 1  # the default


def test_sweep_gives_one_config_per_combination(words, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder_key = "trainer.default_local_dir=out/${trainer.seed}-${algorithm.lam}"
    status, configs = _run(["-m", *words, "trainer.seed=1,2", "algorithm.lam=0.9,1.0", folder_key])
    assert status == 0
    assert [(c.trainer.seed, c.algorithm.lam) for c in configs] == [(1, 0.9), (1, 1.0), (2, 0.9), (2, 1.0)]
    assert [c.trainer.default_local_dir for c in configs] == ["out/1-0.9", "out/1-1.0", "out/2-0.9", "out/2-1.0"]
    assert list(folder.iterdir()) == []


def test_jobs_of_a_sweep_need_separate_checkpoint_folders(sft_words, capfd):
    sweep = ["-m", *sft_words, "trainer.seed=1,2", "grad_clip=0.9,1.0", "trainer.default_local_dir=out"]
    status, configs = _run(sweep, SFTConfig)
    assert (status, configs) == (2, [])
    err = capfd.readouterr().err
    assert "4 jobs of this sweep would write to trainer.default_local_dir=out" in err
    # The suggested override works.
    _, _, typed = err.strip().rpartition("Set ")
    status, configs = _run([*sweep, typed.strip("'")], SFTConfig)
    assert (status, len(configs)) == (0, 4)


@pytest.mark.slow
def test_folder_of_the_experiment_depends_on_its_name(sft_words, capfd):
    sweep = ["-m", *sft_words, "optim.lr=1e-6,1e-5", "trainer.experiment_name=mine"]
    assert _run(sweep, SFTConfig) == (2, [])
    typed = "trainer.experiment_name=lr_${optim.lr}"
    assert f"Set '{typed}'" in capfd.readouterr().err
    status, configs = _run([*sweep, typed], SFTConfig)
    names = [config.trainer.experiment_name for config in configs]
    assert (status, names) == (0, ["lr_1e-06", "lr_1e-05"])


@pytest.mark.slow
def test_jobs_of_a_sweep_need_separate_export_folders(sft_words, capfd):
    sweep = ["-m", *sft_words, "trainer.seed=1,2", "trainer.experiment_name=${trainer.seed}", "trainer.export_path=out"]
    assert _run(sweep, SFTConfig) == (2, [])
    assert "2 jobs of this sweep would write to trainer.export_path=out" in capfd.readouterr().err
    configs = compose([*sweep, "trainer.export_path=out/${trainer.seed}"], SFTConfig)
    assert [config.export_path() for config in configs] == ["out/1", "out/2"]


def test_equal_jobs_of_a_sweep_are_rejected(sft_words, capfd):
    assert _run(["-m", *sft_words, "trainer.seed=1,1", "trainer.experiment_name=mine"], SFTConfig) == (2, [])
    assert "the configs of these jobs are equal" in capfd.readouterr().err


def test_an_invalid_config_stops_the_sweep_before_any_job(sft_words, capfd):
    status, configs = _run([*sft_words, "trainer.seed=1,-2", "--multirun"], SFTConfig)
    assert (status, configs) == (2, [])
    assert "trainer.seed = -2" in capfd.readouterr().err


@pytest.mark.parametrize(
    "option",
    [["-c", "job", "--resolve"], *(pytest.param(o, marks=pytest.mark.slow) for o in (["--cfg", "job"], ["--cfg=job"]))],
)
def test_composed_config_can_be_printed(words, option, capfd):
    status, configs = _run([*option, *words, "trainer.seed=64"])
    out, err = capfd.readouterr()
    assert (status, configs, err) == (0, [], "")
    assert "seed: 64" in out
    assert "hydra" not in out


def test_printed_config_is_validated(words, capfd):
    status, configs = _run(["--cfg", "job", *words, "trainer.sed=64"])
    out, err = capfd.readouterr()
    assert (status, configs) == (2, [])
    assert "sed: 64" in out
    assert err.startswith("1 error in the config:")
    assert err.endswith("the config is invalid; its errors stand before it\n")
    assert "Did you mean trainer.seed?" in err


@pytest.mark.parametrize(
    "argument", ["--hydra-help", "--info=all", "--experimental-rerun", "-p", "hydra/launcher=joblib"]
)
def test_options_of_the_application_of_hydra_are_answered(words, argument, capfd):
    assert _run([*words, argument]) == (2, [])
    assert "of Hydra's application, which camshaft does not run" in capfd.readouterr().err


def test_argument_without_a_value_is_rejected(words, capfd):
    assert _run([*words, "foo"]) == (2, [])
    assert capfd.readouterr().err == "'foo' is not an override. Write key=value, for example trainer.seed=7.\n"


def test_supervised_run_has_a_separate_schema(sft_words):
    config = load_sft([*sft_words, "trainer.experiment_name=a"])
    assert isinstance(config, SFTConfig)
    assert config.export_path() == "checkpoints/camshaft_examples/a/huggingface"


def test_an_environment_variable_is_a_text_until_it_is_decoded(words, monkeypatch):
    monkeypatch.setenv("SEED", "7")
    with pytest.raises(
        ConfigError, match=r"seed = 7\n.*but is a string.*'trainer\.seed=\"\$\{oc\.decode:\$\{oc\.env:NAME\}\}\"'"
    ):
        load_ppo([*words, "seed=${oc.env:SEED}"])
    assert load_ppo([*words, 'seed="${oc.decode:${oc.env:SEED}}"']).trainer.seed == 7
