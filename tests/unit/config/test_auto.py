"""The values of `auto` keys depend on the machine and on the rest of the config."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from camshaft.config import PPOConfig, load_generate, load_ppo, load_sft
from camshaft.config.auto.fitting import fit_to_prompts, fit_to_rows
from camshaft.config.auto.table import format_choices
from camshaft.config.checks import check_lengths
from camshaft.config.tree import get
from camshaft.errors import ConfigError
from camshaft.machine import CPU, DEVICE_FILES, Machine, detect_machine, has_device_files

LAPTOP = Machine()
GPUS = Machine("cuda", 8, frozenset({"vllm"}))
GPU_WITHOUT_VLLM = Machine("cuda", 1)


@pytest.fixture
def own_task(words: list[str], tmp_path: Path) -> list[str]:
    """The words of a task of one's own, without any key that describes a machine."""
    return [f"model={tmp_path}/model", f"data={tmp_path}/train.parquet", "algorithm=grpo"]


def _settings(config: PPOConfig) -> tuple[str, int, str, str, str, str | None]:
    roles, trainer = config.actor_rollout_ref, config.trainer
    dtype = roles.actor.fsdp_config.mixed_precision.param_dtype
    return trainer.device, trainer.n_gpus_per_node, roles.actor.strategy, roles.rollout.name, roles.rollout.dtype, dtype


@pytest.mark.parametrize(
    ("machine", "settings"),
    [
        (LAPTOP, ("cpu", 1, "reference", "torch", "float32", None)),
        (Machine(libraries=frozenset({"vllm"})), ("cpu", 1, "reference", "torch", "float32", None)),
        (GPUS, ("cuda", 8, "fsdp", "vllm", "bfloat16", "bfloat16")),
        (GPU_WITHOUT_VLLM, ("cuda", 1, "fsdp", "torch", "bfloat16", "bfloat16")),
        (Machine("xpu", 2), ("xpu", 2, "fsdp", "torch", "bfloat16", "bfloat16")),
    ],
)
def test_a_run_uses_the_machine_at_hand(machine: Machine, settings: tuple[str, ...], own_task: list[str]) -> None:
    config = load_ppo(own_task, machine=machine)
    assert _settings(config) == settings
    assert config.critic.strategy == config.reward_model.strategy == config.actor_rollout_ref.actor.strategy


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (["device=cpu"], ("cpu", 1, "reference", "torch", "float32", None)),
        (["device=cpu", "devices=2"], ("cpu", 2, "fsdp", "torch", "float32", None)),
        (["devices=1", "engine=reference"], ("cuda", 1, "reference", "vllm", "bfloat16", "bfloat16")),
        (["devices=4", "rollout=hf"], ("cuda", 4, "fsdp", "hf", "bfloat16", "bfloat16")),
        (
            ["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=null"],
            ("cuda", 8, "fsdp", "vllm", "float32", None),
        ),
    ],
)
def test_keys_that_are_set_decide_the_others(keys: list[str], settings: tuple[str, ...], own_task: list[str]) -> None:
    assert _settings(load_ppo([*own_task, *keys], machine=GPUS)) == settings


def test_other_commands_use_the_machine_at_hand(sft_words: list[str], tmp_path: Path) -> None:
    task = [f"data={tmp_path}/train.parquet", f"model={tmp_path}/model"]
    sft, generate = load_sft(task, machine=GPUS), load_generate(task, machine=GPUS)
    assert (sft.trainer.world_size, sft.strategy) == (8, "fsdp")
    assert sft.fsdp_config.mixed_precision.param_dtype == "bfloat16"
    assert (generate.trainer.device, generate.rollout.name, generate.rollout.dtype) == ("cuda", "vllm", "bfloat16")
    on_cpu = load_generate(task, machine=LAPTOP)
    assert (on_cpu.trainer.device, on_cpu.rollout.name, on_cpu.rollout.dtype) == ("cpu", "torch", "float32")


@pytest.mark.parametrize(
    ("keys", "n", "batch"),
    [
        (["algorithm=ppo"], 1, 256),
        (["algorithm=grpo"], 8, 32),
        (["algorithm=rloo"], 8, 32),
        (["algorithm=dapo"], 16, 16),
        (["algorithm=remax"], 1, 256),
        (["algorithm=my_module:my_estimator"], 8, 32),
        (["algorithm=my_module:my_estimator", "n=1"], 1, 256),
        (["algorithm=grpo", "n=4"], 4, 64),
        (["algorithm=grpo", "n=1000"], 1000, 1),
        (["algorithm=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=24"], 8, 48),
        (["algorithm=grpo", "n=3", "device=cpu", "devices=2"], 3, 86),
    ],
)
def test_batch_has_about_as_many_responses(keys: list[str], n: int, batch: int, own_task: list[str]) -> None:
    config = load_ppo([*own_task[:2], *keys], machine=LAPTOP)
    assert (config.actor_rollout_ref.rollout.n, config.data.train_batch_size) == (n, batch)
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    assert batch % mini == 0
    assert mini * n % config.trainer.world_size == 0


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ("rloo", "n=8 +responses per prompt, compared with each other"),
        ("my_module:my_estimator", "n=8 +responses per prompt, which my_module:my_estimator may compare"),
        ("remax", "n=1 +response per prompt; remax does not compare the responses to a prompt"),
    ],
)
def test_the_reason_for_the_group_size_is_true(algorithm: str, reason: str, own_task: list[str]) -> None:
    """The module of the estimator does not exist, so it is not imported to find out."""
    assert re.search(
        f"  {reason}\n", format_choices(load_ppo([*own_task[:2], f"algorithm={algorithm}"], machine=LAPTOP))
    )


ROLES = {
    "actor": ("actor_rollout_ref.actor", "ppo", "use_dynamic_bsz"),
    "old": ("actor_rollout_ref.rollout", "log_prob", "log_prob_use_dynamic_bsz"),
    "ref": ("actor_rollout_ref.ref", "log_prob", "log_prob_use_dynamic_bsz"),
    "critic": ("critic", "ppo", "use_dynamic_bsz"),
    "values": ("critic", "forward", "use_dynamic_bsz"),
}


def _limits(config: PPOConfig) -> dict[str, str]:
    """Return the limit of each kind of pass, in sequences or in tokens."""
    values, limits = config.model_dump(), {}
    for role, (section, prefix, dynamic) in ROLES.items():
        name = "max_token_len" if get(values, f"{section}.{dynamic}") else "micro_batch_size"
        limits[role] = f"{get(values, f'{section}.{prefix}_{name}_per_gpu')} {name.partition('_')[2][:5]}"
    return limits


ACTOR_SIZE, REF_SIZE = "actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size"
BY_SEQUENCES = dict(zip(ROLES, ("8 batch", "16 batch", "16 batch", "8 batch", "8 batch"), strict=True))


@pytest.mark.parametrize(
    ("keys", "machine", "limits"),
    [
        ([], LAPTOP, dict.fromkeys(ROLES, "4096 token")),
        ([], GPUS, dict.fromkeys(ROLES, "16384 token") | {"critic": "32768 token", "values": "32768 token"}),
        (["prompt_length=512", "response_length=9000"], LAPTOP, dict.fromkeys(ROLES, "9512 token")),
        (["actor_rollout_ref.actor.use_dynamic_bsz=false"], LAPTOP, BY_SEQUENCES),
        ([f"{ACTOR_SIZE}_per_gpu=4"], LAPTOP, BY_SEQUENCES | {"actor": "4 batch"}),
        ([f"{ACTOR_SIZE}=4"], LAPTOP, BY_SEQUENCES | {"actor": "None batch"}),
        ([f"{REF_SIZE}_per_gpu=4"], LAPTOP, dict.fromkeys(ROLES, "4096 token") | {"ref": "4 batch"}),
        (
            [f"{ACTOR_SIZE}_per_gpu=4", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4000"],
            LAPTOP,
            BY_SEQUENCES | {"actor": "4 batch", "ref": "4000 token"},
        ),
        (
            ["critic.forward_micro_batch_size_per_gpu=2"],
            LAPTOP,
            dict.fromkeys(ROLES, "4096 token") | {"critic": "8 batch", "values": "2 batch"},
        ),
    ],
)
def test_micro_batches_are_limited_by_tokens_unless_a_number_of_sequences_is_set(
    keys: list[str], machine: Machine, limits: dict[str, str], own_task: list[str]
) -> None:
    kl = ["actor_rollout_ref.actor.use_kl_loss=true", "algorithm=gae"]
    assert _limits(load_ppo([*own_task, *kl, *keys], machine=machine)) == limits


def test_micro_batches_of_supervised_runs_are_limited_by_tokens(sft_words: list[str]) -> None:
    settings = [(None, 4096), (None, 8192), (None, 5000), (3, 4096), (4, 4096)]
    keys = [[], [], ["max_length=5000"], ["data.micro_batch_size_per_gpu=3"], ["data.use_dynamic_bsz=false"]]
    for more, machine, limit in zip(keys, (LAPTOP, GPUS, *[LAPTOP] * 3), settings, strict=True):
        words = [word for word in sft_words if not word.startswith(("trainer.device", "strategy"))]
        data = load_sft([*words, *more], machine=machine).data
        assert (data.micro_batch_size_per_gpu, data.max_token_len_per_gpu) == limit


def test_mini_batch_follows_the_batch(own_task: list[str]) -> None:
    config = load_ppo([*own_task, "batch=48"], machine=LAPTOP)
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.critic.ppo_mini_batch_size == 48


@pytest.mark.parametrize(
    ("keys", "schedule"),
    [
        ([], (False, -1, "auto", 2)),
        (["val_data={folder}/val.parquet"], (True, "auto", "auto", 2)),
        (["val_data={folder}/val.parquet", "trainer.test_freq=3"], (True, 3, "auto", 2)),
        (["trainer.save_freq=20"], (False, -1, 20, None)),
        (["trainer.save_freq=-1"], (False, -1, -1, None)),
    ],
)
def test_validation_and_checkpoints_need_no_keys(
    keys: list[str], schedule: tuple[object, ...], own_task: list[str], tmp_path: Path
) -> None:
    trainer = load_ppo([*own_task, *(key.format(folder=tmp_path) for key in keys)]).trainer
    keep = trainer.max_actor_ckpt_to_keep
    assert (trainer.val_before_train, trainer.test_freq, trainer.save_freq, keep) == schedule


@pytest.mark.parametrize(
    ("keys", "epochs"), [([], 30), (["steps=1000"], None), (["epochs=2", "steps=1000"], 2), (["epochs=2"], 2)]
)
def test_steps_lift_the_limit_of_epochs_that_are_not_set(
    keys: list[str], epochs: int | None, own_task: list[str]
) -> None:
    assert load_ppo([*own_task, *keys], machine=LAPTOP).trainer.total_epochs == epochs


def test_a_run_has_an_end(own_task: list[str], sft_words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"total_epochs = null\s+the run has no end. Set trainer.total_training"):
        load_ppo([*own_task, "epochs=null"], machine=LAPTOP)
    with pytest.raises(ConfigError, match="the run has no end"):
        load_sft([*sft_words, "epochs=null"], machine=LAPTOP)


def test_a_set_validation_requires_data(own_task: list[str]) -> None:
    with pytest.raises(ConfigError, match="validation requires prompts"):
        load_ppo([*own_task, "trainer.test_freq=2"])


def test_missing_values_name_what_to_type() -> None:
    with pytest.raises(ConfigError) as caught:
        load_ppo([])
    assert "Set model=<folder>" in str(caught.value)
    assert "Set data=<file>" in str(caught.value)
    assert str(caught.value).startswith("2 errors")


def test_an_unknown_word_is_told_that_auto_is_valid(own_task: list[str]) -> None:
    with pytest.raises(ConfigError, match="must be auto, or an integer >= 1"):
        load_ppo([*own_task, "devices=all"])


# -- the size of the data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "rows", "batch"),
    [
        ([], 1000, 32),
        ([], 20, 20),
        (["device=cpu", "devices=3"], 20, 18),  # 3 ranks share 8 responses to each prompt
        (["actor_rollout_ref.actor.ppo_mini_batch_size=8"], 20, 16),
        (["batch=32"], 20, 32),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=32"], 20, 32),
    ],
)
def test_small_data_shrinks_a_batch_that_is_not_set(
    keys: list[str], rows: int, batch: int, own_task: list[str]
) -> None:
    config = load_ppo([*own_task, *keys], machine=LAPTOP)
    fitted = fit_to_rows(config, rows)
    assert fitted.data.train_batch_size == batch
    mini = fitted.actor_rollout_ref.actor.ppo_mini_batch_size
    assert mini == (batch if "mini" not in str(keys) else config.actor_rollout_ref.actor.ppo_mini_batch_size)


def test_train_max_samples_shrinks_a_batch_that_is_not_set(own_task: list[str], sft_words: list[str]) -> None:
    config = load_ppo([*own_task, "data.train_max_samples=20"], machine=LAPTOP)
    assert fit_to_rows(config, 20).data.train_batch_size == 20
    kept = [word for word in sft_words if not word.startswith("data.train_batch_size")]
    assert load_sft([*kept, "data.train_max_samples=3"], machine=LAPTOP).data.train_max_samples == 3
    with pytest.raises(ConfigError, match="fewer prompts than one generation batch"):
        load_ppo([*own_task, "data.train_max_samples=20", "batch=32"], machine=LAPTOP)


def test_small_data_shrinks_a_supervised_batch(sft_words: list[str]) -> None:
    config = load_sft([word for word in sft_words if "batch" not in word])
    assert (config.data.train_batch_size, fit_to_rows(config, 10).data.train_batch_size) == (64, 10)


ROLLOUT = "actor_rollout_ref.rollout"


def _write_positions(folder: Path, positions: int) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": positions}))


def _prompt_lengths(config: PPOConfig) -> tuple[int, int]:
    return config.data.max_prompt_length, config.actor_rollout_ref.rollout.prompt_length


@pytest.mark.parametrize(
    ("keys", "positions", "critic_positions", "limit"),
    [
        ([], 100_000, 100_000, 4096),
        ([], 2048, 2048, 2048 - 512),
        (["response_length=48"], 2048, 1000, 1000 - 48),
        (["response_length=48", "{critic}.override_config.max_position_embeddings=900"], 2048, 1000, 900 - 48),
        (["prompt_length=300"], 2048, 2048, 300),
        ([f"{ROLLOUT}.prompt_length=300"], 2048, 2048, 300),
    ],
)
def test_no_prompt_is_longer_than_the_models_allow(
    keys: list[str], positions: int, critic_positions: int, limit: int, own_task: list[str], tmp_path: Path
) -> None:
    (tmp_path / "critic").mkdir()
    _write_positions(tmp_path / "model", positions)
    _write_positions(tmp_path / "critic", critic_positions)
    words = [key.format(critic="+critic.model") for key in keys]
    config = load_ppo([*own_task[:2], "algorithm=gae", f"critic.model.path={tmp_path}/critic", *words], machine=LAPTOP)
    assert _prompt_lengths(config) == (limit, limit)
    assert "prompt_length" not in format_choices(config)


@pytest.mark.parametrize(
    ("keys", "longest", "previous", "lengths"),
    [
        ([], 87, 0, (87, 87)),
        ([], 87, 64, (87, 87)),
        ([], 87, 512, (512, 512)),
        ([], 9000, 0, (4096, 4096)),
        (["prompt_length=300"], 87, 0, (300, 300)),
        ([f"{ROLLOUT}.prompt_length=300"], 87, 0, (87, 300)),
        (["data.return_raw_chat=true"], 87, 0, (512, 512)),  # for a reward model with another template
    ],
)
def test_prompt_length_that_is_not_set_is_that_of_the_longest_prompt(
    keys: list[str], longest: int, previous: int, lengths: tuple[int, int], own_task: list[str]
) -> None:
    fitted = fit_to_prompts(load_ppo([*own_task, *keys], machine=LAPTOP), longest, previous)
    assert _prompt_lengths(fitted) == lengths


def test_limits_by_tokens_follow_the_longest_prompt(own_task: list[str]) -> None:
    keys = ["algorithm=gae", "response_length=4000", "critic.ppo_max_token_len_per_gpu=9000"]
    fitted = fit_to_prompts(load_ppo([*own_task[:2], *keys], machine=LAPTOP), 300)
    set_for_critic = {"critic": "9000 token", "values": "9000 token"}
    assert _limits(fitted) == dict.fromkeys(ROLES, "4300 token") | set_for_critic
    short = fit_to_prompts(load_ppo([*own_task[:2], "algorithm=gae"], machine=LAPTOP), 300)
    assert _limits(short) == dict.fromkeys(ROLES, "4096 token")


def test_a_set_limit_by_tokens_is_compared_with_the_prompts_of_the_data(own_task: list[str]) -> None:
    config = load_ppo([*own_task, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=600"], machine=LAPTOP)
    assert not [*check_lengths(fit_to_prompts(config, 88))]
    problem = next(iter(check_lengths(fit_to_prompts(config, 89))))
    assert "data.max_prompt_length=89 + rollout.response_length=512 = 601" in problem.message


def test_generation_takes_the_prompt_length_from_the_data(sft_words: list[str], tmp_path: Path) -> None:
    _write_positions(tmp_path / "model", 2048)
    config = load_generate([f"data={tmp_path}/train.parquet", f"model={tmp_path}/model"], machine=LAPTOP)
    assert [config.rollout.prompt_length, fit_to_prompts(config, 87).rollout.prompt_length] == [2048 - 512, 87]


# -- speed on accelerators ------------------------------------------------------------------------

ACTOR, MODEL, FSDP = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.actor.fsdp_config"
COMPILER = Machine("cuda", 8, frozenset({"triton"}))


@pytest.mark.parametrize(
    ("machine", "keys", "compiles", "is_eager"),
    [
        (LAPTOP, [], False, True),
        (Machine(libraries=frozenset({"triton"})), [], False, True),
        (COMPILER, [], True, False),
        (GPU_WITHOUT_VLLM, [], False, False),
        (COMPILER, ["device=cpu"], False, True),
        (COMPILER, ["devices=1", "engine=reference"], False, False),
        (COMPILER, ["devices=1", "engine=fsdp1"], False, False),
        (COMPILER, [f"{FSDP}.tensor_parallel_size=2"], False, False),
        (COMPILER, [f"{MODEL}.gradient_checkpointing_mode=selective"], False, False),
        (COMPILER, [f"{ACTOR}.use_torch_compile=false", "actor_rollout_ref.rollout.enforce_eager=true"], False, True),
    ],
)
def test_accelerators_compile_and_capture_graphs(
    machine: Machine, keys: list[str], compiles: bool, is_eager: bool, own_task: list[str]
) -> None:
    config = load_ppo([*own_task, f"{MODEL}.enable_gradient_checkpointing=true", *keys], machine=machine)
    roles = config.actor_rollout_ref
    assert (roles.actor.use_torch_compile, roles.rollout.enforce_eager) == (compiles, is_eager)
    if not keys:
        assert roles.ref.use_torch_compile == config.critic.use_torch_compile == compiles
        assert config.reward_model.use_torch_compile == compiles


def test_a_rollout_whose_expert_choices_are_replayed_captures_no_graphs(own_task: list[str]) -> None:
    words = [*own_task, "rollout=torch", f"{ACTOR}.router_replay.mode=R3"]
    assert load_ppo(words, machine=COMPILER).actor_rollout_ref.rollout.enforce_eager


# -- frozen weights of an adapter -----------------------------------------------------------------


def _frozen_dtypes(config: PPOConfig) -> tuple[str, str, str, str, str]:
    """Return the dtypes of actor, reference and critic, and those in which the actor computes and samples."""
    roles = config.actor_rollout_ref
    actor = roles.actor.fsdp_config
    critic = config.critic.model.fsdp_config
    return (
        actor.model_dtype,
        roles.ref.fsdp_config.model_dtype,
        critic.model_dtype,
        actor.compute_dtype(),
        roles.rollout.dtype,
    )


@pytest.mark.parametrize(
    ("machine", "keys", "dtypes"),
    [
        (COMPILER, ["lora=8"], ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16")),
        (COMPILER, ["lora=8", "critic.model.lora_rank=8"], ("bfloat16",) * 5),
        (COMPILER, [], ("float32", "float32", "float32", "bfloat16", "bfloat16")),
        (
            COMPILER,
            ["lora=8", f"{FSDP}.model_dtype=float32"],
            ("float32", "float32", "float32", "bfloat16", "bfloat16"),
        ),
        (COMPILER, ["lora=8", "device=cpu"], ("float32",) * 5),
        (LAPTOP, ["lora=8"], ("float32",) * 5),
        (
            LAPTOP,
            ["lora=8", f"{FSDP}.model_dtype=bfloat16"],
            ("bfloat16", "bfloat16", "float32", "bfloat16", "bfloat16"),
        ),
        (
            LAPTOP,
            ["lora=8", f"{FSDP}.model_dtype=bfloat16", f"{FSDP}.mixed_precision.param_dtype=float32"],
            ("bfloat16", "bfloat16", "float32", "float32", "float32"),
        ),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_frozen_weights_keep_the_dtype_of_the_folder(
    machine: Machine, keys: list[str], dtypes: tuple[str, ...], key: str, own_task: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({key: "bfloat16"}))
    assert _frozen_dtypes(load_ppo([*own_task, *keys], machine=machine)) == dtypes


@pytest.mark.parametrize(
    ("model_type", "machine", "name", "reason"),
    [
        ("llama", LAPTOP, "torch", "built in"),
        ("llama", COMPILER, "torch", "built in; vllm is not installed"),
        ("falcon", LAPTOP, "hf", "the model has attention code"),
        ("mamba", LAPTOP, "hf", "the model has a recurrent state"),
        ("mamba", COMPILER, "hf", "the model has a recurrent state; vllm is not installed"),
    ],
)
def test_transformers_generates_for_models_that_cannot_be_packed(
    model_type: str, machine: Machine, name: str, reason: str, own_task: list[str], tmp_path: Path
) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = load_ppo([*own_task, "rollout=auto"], machine=machine)
    assert config.actor_rollout_ref.rollout.name == name
    assert config.actor_rollout_ref.actor.use_torch_compile == (machine is COMPILER and model_type == "llama")
    (choice,) = (choice for choice in config.choices() if choice.key.endswith("rollout.name"))
    assert choice.reason.startswith(reason)


@pytest.mark.parametrize("content", [{}, {"dtype": "float32"}, {"dtype": ["bfloat16"]}])
def test_other_folders_keep_float32_weights(content: dict[str, Any], own_task: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    assert _frozen_dtypes(load_ppo([*own_task, "lora=8"], machine=COMPILER))[0] == "float32"


def test_supervised_runs_keep_the_dtype_of_the_folder(sft_words: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    task = [f"data={tmp_path}/train.parquet", f"model={tmp_path}/model", "lora=8"]
    for machine, dtype in ((COMPILER, "bfloat16"), (LAPTOP, "float32")):
        assert load_sft(task, machine=machine).fsdp_config.model_dtype == dtype
    table = format_choices(load_sft(task, machine=COMPILER))
    assert re.search(r"model_dtype=bfloat16 +dtype of the frozen weights in the model folder", table)


@pytest.mark.parametrize("machine", [LAPTOP, COMPILER])
@pytest.mark.parametrize(
    "setting", [f"{FSDP}=5", f"{ACTOR}.engine_kwargs=5", f"{ACTOR}.ulysses_sequence_parallel_size=many"]
)
def test_invalid_engine_settings_are_config_errors(machine: Machine, setting: str, own_task: list[str]) -> None:
    with pytest.raises(ConfigError, match=setting.replace("=", " = ")):
        load_ppo([*own_task, setting], machine=machine)


def test_other_commands_compile_and_capture_on_accelerators(sft_words: list[str], tmp_path: Path) -> None:
    task = [f"data={tmp_path}/train.parquet", f"model={tmp_path}/model"]
    for machine, is_fast in ((COMPILER, True), (LAPTOP, False)):
        assert load_sft(task, machine=machine).use_torch_compile == is_fast
        assert load_generate(task, machine=machine).rollout.enforce_eager != is_fast


def test_choices_for_speed_are_printed_on_accelerators(own_task: list[str]) -> None:
    table = format_choices(load_ppo(own_task, machine=COMPILER))
    for setting in (f"{ACTOR}.use_torch_compile=true", "actor_rollout_ref.rollout.enforce_eager=false"):
        assert setting in table
    assert "bfloat16" in table
    on_cpu = format_choices(load_ppo(own_task, machine=LAPTOP))
    assert "compile" not in on_cpu
    assert "eager" not in on_cpu


# -- the table ------------------------------------------------------------------------------------


def test_table_lists_the_dtype_of_the_reference_engine(own_task: list[str]) -> None:
    keys = ["devices=1", "engine=reference"]
    table = format_choices(load_ppo([*own_task, *keys], machine=GPUS))
    choice = f"{FSDP}.mixed_precision.param_dtype=bfloat16"
    assert choice in table
    assert "with float32 weights in the optimizer" in table.partition(choice)[2].splitlines()[0]


def test_table_lists_choices_as_words_to_type(own_task: list[str]) -> None:
    table = format_choices(load_ppo([*own_task, "engine=fsdp"], machine=GPUS))
    rows = dict(line.strip().split(None, 1) for line in table.splitlines()[1:])
    assert rows["rollout=vllm"] == "vllm is installed"
    assert {"device=cuda", "devices=8", "n=8", "batch=32"} <= rows.keys()
    assert "engine=fsdp" not in rows
    assert not any(setting.startswith("critic") for setting in rows)
    assert _settings(load_ppo([*own_task, "engine=fsdp", *rows], machine=GPUS)) == (
        "cuda",
        8,
        "fsdp",
        "vllm",
        *["bfloat16"] * 2,
    )


# -- the machine ----------------------------------------------------------------------------------


def test_a_device_file_is_found(tmp_path: Path) -> None:
    for other in ("nvidiactl", "null"):
        (tmp_path / other).touch()
    assert not has_device_files(DEVICE_FILES, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_device_files(DEVICE_FILES, tmp_path)


@pytest.mark.skipif(detect_machine().device != CPU, reason="this machine has an accelerator")
def test_a_cpu_is_detected_without_torch() -> None:
    code = (
        "import sys; from camshaft.machine import detect_machine; detect_machine(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
