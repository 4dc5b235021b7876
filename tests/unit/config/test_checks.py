"""Checks of combinations of keys, with the arithmetic in the message."""

import json

import pytest
from huggingface_hub import constants

from camshaft.config import load_ppo, load_sft, micro_batch_per_rank
from camshaft.config.layout import divide_evenly
from camshaft.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _error(words, load=load_ppo) -> str:
    with pytest.raises(ConfigError) as caught:
        load(words)
    return str(caught.value)


@pytest.mark.parametrize(
    "word",
    [
        "trainer.resource_pools=3",
        "data=5",
        "data.train_files={a: 1}",
        "actor_rollout_ref=5",
        "actor_rollout_ref.model=5",
    ],
)
def test_a_value_in_place_of_a_section_is_rejected(words, word):
    assert word.partition("=")[0] in _error([*words, word])


def test_an_option_of_an_unused_role_disables_no_other_check(words):
    unused = "actor_rollout_ref.ref.engine_kwargs={bogus: 1}"
    assert "ppo_mini_batch_size = 100" in _error([*words, f"{ACTOR}.ppo_mini_batch_size=100", unused])


def test_an_engine_with_one_process_names_all_sizes_to_reduce(words):
    sizes = ["trainer.nnodes=2", "trainer.n_gpus_per_node=8", f"{ACTOR}.strategy=reference"]
    assert "or trainer.nnodes=1 trainer.n_gpus_per_node=1." in _error([*words, *sizes])


def test_a_schedule_may_be_longer_than_the_run(words):
    optim = [f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.total_training_steps=1000"]
    load_ppo([*words, *optim, f"{ACTOR}.optim.lr_warmup_steps=200", "trainer.total_training_steps=100"])


# -- batch arithmetic -----------------------------------------------------------------------------


def test_batch_not_divisible_by_mini_batch_shows_the_division(words):
    # 1000 x 4 = 4000 sequences; a mini-batch is 256 x 4 = 1024; 4000 = 3 x 1024 + 928.
    # 768 = 3 x 256 and 1024 = 4 x 256 would fit; 250 is the largest divisor of 1000 up to 256.
    text = _error([*words, "data.train_batch_size=1000", f"{ROLLOUT}.n=4"])
    assert "1 error in the config" in text
    assert f"{ACTOR}.ppo_mini_batch_size = 256" in text
    assert "1000 prompts x rollout.n=4 = 4000 sequences" in text
    assert "4000 = 3 x 1024 + 928" in text
    assert f"data.train_batch_size=768 or 1024, or {ACTOR}.ppo_mini_batch_size=250" in text


def test_mini_batch_of_the_critic_is_checked_separately(words):
    text = _error([*words, "critic.ppo_mini_batch_size=100"])
    assert "critic.ppo_mini_batch_size = 100" in text
    assert "1024 = 10 x 100 + 24" in text
    load_ppo([*words, "critic.ppo_mini_batch_size=100", "algorithm.adv_estimator=reinforce_plus_plus"])


def test_mini_batch_larger_than_the_batch_is_rejected(words):
    text = _error([*words, "data.train_batch_size=32"])
    assert f"Set {ACTOR}.ppo_mini_batch_size=32" in text


@pytest.mark.timeout(20)
def test_huge_numbers_are_rejected_quickly(words):
    huge = [
        "data.train_batch_size=1000000000000000003",
        "actor_rollout_ref.actor.ppo_mini_batch_size=99999999999999999",
    ]
    assert "is not divisible by this mini-batch size" in _error([*words, *huge])
    huge = ["trainer.n_gpus_per_node=1000000000000000003", "actor_rollout_ref.rollout.tensor_model_parallel_size=64"]
    text = _error([*words, *huge, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.strategy=fsdp"])
    assert "Set actor_rollout_ref.rollout.tensor_model_parallel_size=1." in text


def test_micro_batch_may_be_larger_than_the_mini_batch(words):
    load_ppo([*words, "data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=2"])


def _on(words, ranks: int, *more: str) -> list[str]:
    return [*words, f"{ACTOR}.strategy=fsdp", f"trainer.n_gpus_per_node={ranks}", *more]


PER_GPU = (
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    "critic.ppo_micro_batch_size_per_gpu=1",
)


def test_mini_batch_must_split_evenly_over_ranks(words):
    # 256 x 2 = 512 sequences over 3 ranks: 170 each, remainder 2.
    text = _error(_on(words, 3, f"{ROLLOUT}.n=2", *PER_GPU))
    assert "1 error in the config" in text
    assert "256 prompts x rollout.n=2 = 512 sequences = 3 ranks x 170 + 2" in text
    load_ppo(_on(words, 8))


def test_mini_batch_splits_over_data_parallel_groups(words):
    # 12 ranks in groups of 4 that share each row are 3 groups; 512 = 3 x 170 + 2.
    shared = (f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ROLLOUT}.n=2", *PER_GPU)
    text = _error(_on(words, 12, *shared, "critic.ulysses_sequence_parallel_size=3"))
    assert "1 error in the config" in text
    assert "512 sequences = 3 groups of 4 ranks x 170 + 2" in text
    # 4 of the actor's 16 ranks share each row, 2 of the critic's: 512 = 4 x 128 = 8 x 64.
    load_ppo(_on(words, 16, *shared, "critic.model.fsdp_config.tensor_parallel_size=2"))


def test_iteration_must_split_evenly_over_the_reference(words):
    small = ("data.train_batch_size=6", f"{ACTOR}.ppo_mini_batch_size=6", "algorithm.use_kl_in_reward=true", *PER_GPU)
    ref = ("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1", f"{ACTOR}.ulysses_sequence_parallel_size=2")
    critic = "critic.ulysses_sequence_parallel_size=2"
    load_ppo(_on(words, 4, *small, *ref, critic))
    text = _error(_on(words, 4, *small, *ref, critic, "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1"))
    assert "1 error in the config" in text
    assert "6 prompts x rollout.n=1 = 6 sequences = 4 ranks x 1 + 2" in text


def test_global_micro_batch_must_split_evenly_over_ranks(words):
    odd = (f"{ACTOR}.ppo_micro_batch_size=24",)
    text = _error(_on(words, 16, *odd))
    assert "1 error in the config" in text
    assert f"{ACTOR}.ppo_micro_batch_size = 24" in text
    assert "24 = 16 ranks x 1 + 8" in text
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu=1" in text
    load_ppo(_on(words, 16, *odd, f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"))
    load_ppo(_on(words, 16, *odd, f"{ACTOR}.fsdp_config.tensor_parallel_size=2"))  # 8 groups x 3


def test_token_budget_must_fit_the_longest_sequence(words):
    words = [*words, "data.max_prompt_length=512"]
    budget = [*words, f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=1000"]
    text = _error(budget)
    assert "data.max_prompt_length=512 + rollout.response_length=512 = 1024" in text
    # of the actor and of its log-probs, which default to it; no reference is used, the critic's is 4096
    assert "2 errors in the config" in text
    load_ppo([*budget, f"{ACTOR}.ppo_max_token_len_per_gpu=1024"])


def test_run_needs_prompts_for_one_iteration(words):
    assert "data.train_batch_size=1024" in _error([*words, "data.train_max_samples=1000"])


def test_per_gpu_micro_batch_overrides_the_global_one():
    assert micro_batch_per_rank(3, 64, 8) == 3
    assert micro_batch_per_rank(None, 64, 8) == 8
    with pytest.raises(ConfigError, match="64 sequences are not divisible by 7 data-parallel ranks"):
        micro_batch_per_rank(None, 64, 7)
    with pytest.raises(ConfigError, match="64 sequences are not divisible by 128 data-parallel ranks"):
        divide_evenly(64, 128, "sequences")


# -- algorithm and sampling -----------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_group_estimators_need_several_responses(words, estimator):
    words = [*words, f"algorithm.adv_estimator={estimator}"]
    assert f"{ROLLOUT}.n=1" in _error([*words, f"{ROLLOUT}.n=1"])
    load_ppo([*words, f"{ROLLOUT}.n=2"])


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([f"{ROLLOUT}.n=4", f"{ROLLOUT}.do_sample=false"], "generates 4 identical responses"),
        ([f"{ROLLOUT}.engine_kwargs={{a: 1}}"], "the rollout accepts no options"),
        (
            [f"{ROLLOUT}.tensor_model_parallel_size=4"],
            f"{ROLLOUT}.tensor_model_parallel_size=1, or {ROLLOUT}.name=vllm",
        ),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=4"],
            "world_size=1 is not divisible by the 4 ranks that form one vLLM engine. "
            f"Set {ROLLOUT}.tensor_model_parallel_size=1",
        ),
        (
            [
                f"{ROLLOUT}.name=sglang",
                f"{ROLLOUT}.tensor_model_parallel_size=2",
                "trainer.n_gpus_per_node=2",
                f"{ACTOR}.strategy=fsdp",
                "critic.strategy=fsdp",
            ],
            f"only in a run with 1 rank, and this run has 2. Set {ROLLOUT}.tensor_model_parallel_size=1",
        ),
        (
            [f"{ROLLOUT}.name=server", f"{ROLLOUT}.tensor_model_parallel_size=2"],
            f"Set {ROLLOUT}.tensor_model_parallel_size=1, or {ROLLOUT}.engine_kwargs.vllm_server_base_url=http",
        ),
        (
            [f"{ROLLOUT}.name=server", f"{ROLLOUT}.engine_kwargs={{vllm_server_base_url: localhost}}"],
            "write it as http://127.0.0.1:8000.",
        ),
        ([f"{ROLLOUT}.name=server", f"{ROLLOUT}.engine_kwargs={{timeout: 0}}"], "timeout: Input should be greater"),
        ([f"{ROLLOUT}.val_kwargs.n=4"], "generates 4 identical responses"),
        ([f"{ROLLOUT}.val_kwargs.do_sample=true"], "has no effect with"),
        (["algorithm.adv_estimator=reinforce_plus_plus", "trainer.critic_warmup=3"], "the run has no critic"),
        ([f"{ROLLOUT}.prompt_length=100", "data.max_prompt_length=512"], "data.max_prompt_length=512"),
        ([f"{ROLLOUT}.response_length=600"], "data.max_response_length=512"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path=<folder>"),
        (["trainer.resume_from_path=/"], "trainer.resume_mode=resume_path"),
        (["trainer.use_legacy_worker_impl=enable"], "camshaft has no legacy implementation"),
        (["trainer.use_legacy_worker_impl=true"], "camshaft has no legacy implementation"),
        ([f"{ACTOR}.optim.lr_warmup_steps=10", "trainer.total_training_steps=10"], "the length of the run"),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=8", "trainer.total_training_steps=10", "trainer.critic_warmup=2"],
            "less than 8, the length of the run (trainer.total_training_steps - trainer.critic_warmup=2)",
        ),
        (
            [
                f"{ACTOR}.optim.lr_scheduler_type=cosine",
                f"{ACTOR}.optim.lr_warmup_steps=80",
                f"{ACTOR}.optim.total_training_steps=50",
                "trainer.total_training_steps=100",
            ],
            f"less than 50, the length of the schedule ({ACTOR}.optim.total_training_steps)",
        ),
        (["data.val_files=null", "trainer.test_freq=2"], "trainer.val_before_train=false"),
        (
            ["data.val_files=null", "trainer.val_only=true"],
            "trainer.val_only=false trainer.val_before_train=false",
        ),
        (["data.train_files=[]"], "training requires at least one file"),
        ([f"{ACTOR}.strategy=referense"], "Did you mean reference?"),
        ([f"{ROLLOUT}.name=trch"], "Did you mean torch?"),
        (["trainer.logger=[consol]"], "Did you mean console?"),
        (["custom_reward_function.name=gsm9k"], "package.module:function. Did you mean gsm8k?"),
        (
            ["custom_reward_function.name=format", "custom_reward_function.reward_kwargs.pattern='(a'"],
            "invalid regular expression: missing )",
        ),
        (["reward=[format,gsm9k]"], "Did you mean gsm8k?"),
        (["reward=[format,gsm8k]", "reward_weights=[1]"], "has 1 numbers for 2 functions"),
        (["reward_weights=[1,2]"], "requires custom_reward_function.functions"),
        (["reward=[format]", "custom_reward_function.name=gsm8k"], "applies to a single function"),
        (["reward=[format]", "custom_reward_function.batched=true"], "applies to a single function"),
        (["reward=[format,format]"], "selects two functions with the name format"),
        (
            ["reward=[format]", "custom_reward_function.reward_kwargs.fromat.pattern=x"],
            "reward_kwargs.format.<argument>",
        ),
        (
            ["trainer.default_hdfs_dir="],
            'trainer.default_hdfs_dir = ""\n      must be a path, or null, not an empty string',
        ),
        (["reward=[format]", "custom_reward_function.reward_kwargs.format.pattern='(a'"], "invalid regular expression"),
        (["reward=[/nowhere/a.py,/nowhere/a.py:f]"], "file not found"),
        (
            ["reward=[m:overlong]", "reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=4"],
            "contains a function with the name overlong, which other metrics use",
        ),
    ],
)
def test_contradicting_keys_are_rejected(words, more, expected):
    text = _error([*words, *more])
    assert "1 error in the config" in text
    assert expected in text


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([f"{CORRECTION}.rollout_is=tokens"], "must be one of token, sequence, or null"),
        ([f"{CORRECTION}.rollout_is_threshold=0"], "> 0"),
        ([f"{CORRECTION}.rollout_is=token", f"{ROLLOUT}.do_sample=false"], "do_sample=false disables"),
        ([f"{CORRECTION}.rollout_rs=geometric"], "token_k1, token_k2"),
        ([f"{CORRECTION}.rollout_rs=seq_max_k1"], "seq_max_k2"),
        ([f"{CORRECTION}.rollout_rs=token_k1"], f"Set {CORRECTION}.rollout_rs_threshold=2.0."),
        ([f"{CORRECTION}.rollout_rs=seq_mean_k3"], f"Set {CORRECTION}.rollout_rs_threshold=0.01."),
        ([f"{CORRECTION}.rollout_rs_threshold=2.0"], f"Set {CORRECTION}.rollout_rs_threshold=null."),
        (
            [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=[2,3]"],
            "2 values are set for 1 rules",
        ),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5"], "a maximum ratio"),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.9_0.5"], "a maximum ratio"),
        ([f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"], "a maximum divergence"),
        ([f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=much"], "a maximum divergence"),
        ([f"{CORRECTION}.rollout_rs=token_k3", f"{CORRECTION}.rollout_rs_threshold=inf"], "a maximum divergence"),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=inf"], "a maximum ratio"),
        ([f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=-2"], "a maximum ratio"),
        (
            [f"{CORRECTION}.rollout_rs=[token_k1,seq_mean_k3]", f"{CORRECTION}.rollout_rs_threshold=2.0"],
            f"Set one value per rule: '{CORRECTION}.rollout_rs_threshold=[2.0,0.01]'.",
        ),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=inf"], "rollout_is_threshold"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=5-0.5"], "or a range such as 0.5-5.0"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=0-5"], "or a range such as 0.5-5.0"),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=true"], "a number > 0"),
        ([f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.loss_type=ppo"], "one of ppo_clip, interpolated, reinforce"),
        ([f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.top_p=0.9"], f"Set {ROLLOUT}.top_p=1.0."),
        ([f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.top_k=5"], f"Set {ROLLOUT}.top_k=0."),
        ([f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.min_p=0.1"], f"Set {ROLLOUT}.min_p=0.0."),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.frequency_penalty=0.1"],
            f"Set {ROLLOUT}.frequency_penalty=0.0.",
        ),
        ([f"{CORRECTION}.bypass_mode=true", f"{ROLLOUT}.do_sample=false"], f"Set {ROLLOUT}.do_sample=true."),
    ],
)
def test_invalid_correction_is_rejected_with_a_fix(words, more, expected):
    text = _error([*words, *more])
    assert "1 error in the config" in text
    assert expected in text


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [("3", (0.0, 3.0)), ("0.5", (0.0, 0.5)), ("0.5_4.0", (0.5, 4.0)), ("0.5-4", (0.5, 4.0)), ("1e-3-2e0", (1e-3, 2.0))],
)
def test_threshold_of_weights_is_a_number_or_a_range(words, threshold, expected):
    overrides = [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold={threshold}"]
    assert load_ppo([*words, *overrides]).algorithm.rollout_correction.weight_bounds() == expected


def test_weights_and_rules_are_accepted_in_bypass_mode(words):
    keys = {"bypass_mode": "true", "loss_type": "reinforce", "rollout_is": "sequence", "rollout_rs": "token_k1"}
    overrides = [f"{CORRECTION}.{key}={value}" for key, value in keys.items()]
    config = load_ppo([*words, *overrides, f"{CORRECTION}.rollout_rs_threshold=2"])
    assert config.old_log_prob_source() == "rollout"
    assert not config.needs_log_prob_passes()
    normalized = load_ppo([*words, *overrides[:-1], f"{CORRECTION}.rollout_is_batch_normalize=true"])
    assert normalized.needs_log_prob_passes()


@pytest.mark.parametrize(
    ("rules", "thresholds", "expected"),
    [
        ("token_k1", "2.0", [("token_k1", (0.5, 2.0))]),
        ("seq_mean_k1", "0.999_1.001", [("seq_mean_k1", (0.999, 1.001))]),
        ("seq_mean_k1", "0.999-1.001", [("seq_mean_k1", (0.999, 1.001))]),
        ("token_k1", "1-2", [("token_k1", (1.0, 2.0))]),  # 1_2 would parse as 12, 1.0_2 as 1.02
        ("token_k1", "1e-3-2e0", [("token_k1", (0.001, 2.0))]),
        ("token_k3", "1e-3", [("token_k3", (0.0, 0.001))]),
        ("[token_k1,seq_max_k2]", "[4,0.5]", [("token_k1", (0.25, 4.0)), ("seq_max_k2", (0.0, 0.5))]),
        ("'token_k2,seq_sum_k3'", "1", [("token_k2", (0.0, 1.0)), ("seq_sum_k3", (0.0, 1.0))]),
        ("'token_k1,seq_sum_k3'", "'0.5_1.5,3'", [("token_k1", (0.5, 1.5)), ("seq_sum_k3", (0.0, 3.0))]),
        ("null", "null", []),
    ],
)
def test_rejection_rules_are_a_list_or_comma_separated(words, rules, thresholds, expected):
    overrides = [f"{CORRECTION}.rollout_rs={rules}", f"{CORRECTION}.rollout_rs_threshold={thresholds}"]
    assert list(load_ppo([*words, *overrides]).algorithm.rollout_correction.rejection_bounds()) == expected


@pytest.mark.parametrize("value", ["auto", "disable", "false"])
def test_legacy_switch_may_be_off(words, value):
    load_ppo([*words, f"trainer.use_legacy_worker_impl={value}"])


def test_validation_can_be_switched_off(words):
    load_ppo([*words, "data.val_files=null", "trainer.val_before_train=false", "trainer.test_freq=-1"])


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        "data.train_files=/nowhere/train.parquet",
        "data.val_files=/nowhere/val.parquet",
        "data.tokenizer=/nowhere/tokenizer",
        "actor_rollout_ref.model.path=/nowhere/model",
        "critic.model.path=/nowhere/model",
        "critic.model.tokenizer_path=/nowhere/model",
        "custom_reward_function.path=/nowhere/reward.py",
    ],
)
def test_missing_file_is_reported_with_its_key(words, word):
    text = _error([*words, word])
    key, _, path = word.partition("=")
    assert f"{key} = {path}" in text
    assert "not found" in text


def test_prompt_id_limit_without_prompt_ids_is_rejected(words):
    assert "has no effect without data.prompt_id_key" in _error([*words, "data.max_prompt_id_length=8"])
    load_ppo([*words, "data.max_prompt_id_length=8", "data.prompt_id_key=index"])


def test_data_may_be_a_folder_pattern_or_url(words, tmp_path):
    for path in (tmp_path, f"{tmp_path}/tr*.parquet", f"file://{tmp_path}/train.parquet", "s3://bucket/parts/"):
        load_ppo([*words, f"data.train_files='{path}'"])
    (tmp_path / "empty").mkdir()
    assert "is a folder without data files" in _error([*words, f"data.train_files={tmp_path}/empty"])
    assert "no file matches" in _error([*words, f"data.train_files='{tmp_path}/*.parq'"])


def test_relative_path_is_reported_with_the_working_folder(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"looked in {tmp_path}" in _error([*words, "data.train_files=nowhere.parquet"])


HUB_KEYS = {
    "actor_rollout_ref.model.path": "actor_rollout_ref.model",
    "data.tokenizer": "actor_rollout_ref.model",
    "critic.model.path": "critic.model",
    "reward_model.model.path": "reward_model.model",
}


@pytest.mark.parametrize("key", HUB_KEYS)
def test_uncached_hub_name_requires_download(key, words, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    arguments = [*words, f"{key}=some-org/some-model"]
    if key.startswith("reward_model"):
        arguments += ["reward_model.enable=true", "reward_model.model.input_tokenizer=null"]
    load_ppo(arguments)
    text = _error([*arguments, f"{HUB_KEYS[key]}.download=False"])
    assert f"{key} = some-org/some-model\n      folder not found" in text
    assert "not completely in the Hugging Face cache" in text
    assert f"Set {HUB_KEYS[key]}.download=True" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Unset HF_HUB_OFFLINE to download the model, or set another path." in _error(arguments)


def test_a_misspelled_folder_is_not_a_hub_name(words, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    text = _error([*words, "actor_rollout_ref.model.path=models/tny"])
    assert f"folder not found (looked in {tmp_path}). Did you mean models/tiny?" in text


def test_folder_without_a_model_is_rejected(words, tmp_path):
    assert "config.json" in _error([*words, f"actor_rollout_ref.model.path={tmp_path}"])


def test_engine_of_an_unused_critic_is_not_checked(words):
    load_ppo([*words, "algorithm.adv_estimator=reinforce_plus_plus", "+critic.engine_kwargs.unknown=1"])


def test_files_of_an_unused_critic_are_not_checked(words):
    load_ppo([*words, "critic.model.path=/nowhere", "algorithm.adv_estimator=reinforce_plus_plus"])


def test_reward_module_need_not_be_a_file(words):
    load_ppo([*words, "custom_reward_function.path=my_pkg.rewards"])


def test_critic_must_read_the_token_ids_of_the_actor(words, tmp_path):
    for name, vocabulary in (("model", {"a": 0}), ("same", {"a": 0}), ("other", {"b": 0})):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert "differs from the actor's tokenizer" in _error([*words, f"critic.model.tokenizer_path={tmp_path}/other"])
    load_ppo([*words, f"critic.model.tokenizer_path={tmp_path}/same"])


# -- supervised runs ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["data.train_max_samples=10", "data.train_batch_size=256"], "data.train_batch_size=256"),
        (["data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=100"], "data.max_length=1024"),
        (["data.val_files=null", "trainer.test_freq=2"], "trainer.test_freq=-1"),
        (["trainer.best_metric=val/reward/mean", "trainer.test_freq=-1"], "trainer.test_freq=<steps>"),
        (["data.train_files=null"], "training requires at least one file"),
        (["model.path=/nowhere"], "folder not found"),
        (["strategy=refrence"], "Did you mean reference?"),
        (["optim.lr_warmup_steps=5", "trainer.total_training_steps=5"], "the length of the run"),
        (["data.micro_batch_size=4"], "Did you mean data.micro_batch_size_per_gpu"),
    ],
)
def test_invalid_supervised_config_is_rejected(sft_words, more, expected):
    text = _error([*sft_words, *more], load_sft)
    assert "1 error in the config" in text
    assert expected in text


def test_supervised_run_needs_no_validation(sft_words):
    load_sft([*sft_words, "data.val_files=null"])


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_rollout_without_options_rejects_engine_kwargs(words, name):
    words = [*words, "+actor_rollout_ref.rollout.engine_kwargs.seed=3"]
    with pytest.raises(ConfigError, match=r"the rollout accepts no options\. Omit the key"):
        load_ppo([*words, f"actor_rollout_ref.rollout.name={name}"])
    config = load_ppo([*words, "actor_rollout_ref.rollout.name=support.own_backends:OwnRollout"])
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"seed": 3}


# -- contents of checkpoints ----------------------------------------------------------------------


@pytest.mark.parametrize("key", [f"{ACTOR}.checkpoint.save_contents", "critic.checkpoint.save_contents"])
def test_checkpoint_without_required_contents_is_rejected(key: str, words):
    text = _error([*words, f"{key}=[model,hf_model]"])
    assert "1 error in the config" in text
    assert f"{key} = " in text
    assert "optimizer, extra must be saved, because resuming requires model, optimizer, extra." in text
    assert f"Set '{key}=[model,optimizer,extra,hf_model]'" in text
    assert "extra must be saved" in _error([*words, f"{key}=[model,optimizer]"])
    load_ppo([*words, f"{key}=[model,optimizer,extra,hf_model]"])


def test_unknown_checkpoint_contents_are_rejected(words, sft_words):
    text = _error([*words, f"{ACTOR}.checkpoint.save_contents=[model,optimizer,extra,hf]"])
    assert "must be a list of model, optimizer, extra, hf_model" in text
    with pytest.raises(ConfigError) as caught:
        load_sft([*sft_words, "checkpoint.save_contents=[model,optimizer,extra,huggingface]"])
    assert "must be a list of model, optimizer, extra, hf_model" in str(caught.value)
    with pytest.raises(ConfigError, match=r"model must be saved"):
        load_sft([*sft_words, "checkpoint.save_contents=[optimizer,extra]"])


def test_checkpoint_contents_of_an_unused_critic_are_not_checked(words):
    load_ppo([*words, "critic.checkpoint.save_contents=[]", "algorithm.adv_estimator=reinforce_plus_plus"])


def test_arguments_of_a_function_whose_name_has_a_dot_are_a_mapping(words, tmp_path):
    for name in ("m", "n"):
        (tmp_path / f"{name}.py").write_text("def f(response): return 1.0\n")
    functions = f"reward=[{tmp_path}/m.py:f,{tmp_path}/n.py:f]"
    text = _error([*words, functions, "custom_reward_function.reward_kwargs.f.x=1"])
    assert "'custom_reward_function.reward_kwargs={m.f: {<argument>: <value>}}'" in text
    load_ppo([*words, functions, "custom_reward_function.reward_kwargs={m.f: {x: 1}}"])


# -- chat template --------------------------------------------------------------------------------


def test_arguments_of_the_chat_template_have_a_short_name(words):
    config = load_ppo([*words, "chat_template_kwargs.enable_thinking=false", "data.chat_template_kwargs.a=1"])
    assert config.data.chat_template_kwargs == {"enable_thinking": False, "a": 1}


def test_arguments_of_the_chat_template_may_not_be_those_of_the_call(words):
    text = _error([*words, "data.chat_template_kwargs={tokenize: true}"])
    assert "data.chat_template_kwargs" in text
    assert "contains tokenize, which is not an argument of the template. Remove it." in text


def test_a_prompt_template_contains_the_prompt(words):
    text = _error([*words, "data.prompt_template='Answer: {question}'"])
    assert "has no {prompt} in place of the prompt. Add it." in text


def test_a_missing_chat_template_is_an_error(words, sft_words):
    for load, base in ((load_ppo, words), (load_sft, sft_words)):
        text = _error([*base, "data.chat_template=chat.jinja"], load)
        assert "data.chat_template = chat.jinja" in text
        assert "file not found" in text
