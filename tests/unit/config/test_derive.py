"""Engine and rollout configs of a run, compared with hand-worked numbers."""

import pytest

from camshaft.config import (
    EngineModel,
    Topology,
    actor_engine,
    critic_engine,
    load_ppo,
    load_rm,
    load_sft,
    ref_engine,
    rm_engine,
    rollout_engine,
    sampling,
    sft_engine,
)
from camshaft.config.rollout import OPTIONAL_SAMPLING

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_global_batch_sizes_are_divided_by_the_ranks(words):
    counts = {f"{ACTOR}.ppo": 64, f"{ROLLOUT}.log_prob": 128, "actor_rollout_ref.ref.log_prob": 128, "critic.ppo": 64}
    config = load_ppo([*words, *(f"{prefix}_micro_batch_size={count}" for prefix, count in counts.items())])
    actor = actor_engine(config, Topology(8), total_steps=100)
    # 64 sequences over 8 ranks are 8; 128 are 16.
    assert (actor.micro_batch_size, actor.infer_micro_batch_size) == (8, 16)
    assert (actor.max_tokens, actor.infer_max_tokens) == (None, None)
    assert ref_engine(config, Topology(8)).infer_micro_batch_size == 16
    critic = critic_engine(config, Topology(4), total_steps=100)
    assert (critic.micro_batch_size, critic.infer_micro_batch_size) == (16, 16)


def test_batch_sizes_per_gpu_do_not_depend_on_ranks(words):
    config = load_ppo(
        [
            *words,
            f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7",
            "critic.ppo_micro_batch_size_per_gpu=9",
        ]
    )
    actor = actor_engine(config, Topology(8), 100)
    assert (actor.micro_batch_size, actor.infer_micro_batch_size) == (3, 5)
    assert ref_engine(config, Topology(8)).infer_micro_batch_size == 7
    critic = critic_engine(config, Topology(8), 100)
    assert (critic.micro_batch_size, critic.infer_micro_batch_size) == (9, 9)


def test_token_budgets_replace_counts(words):
    budgets = [f"{ACTOR}.ppo_max_token_len_per_gpu=16384", "critic.forward_max_token_len_per_gpu=40000"]
    config = load_ppo([*words, *budgets])
    actor, ref = actor_engine(config, Topology(8), 100), ref_engine(config, Topology(8))
    critic = critic_engine(config, Topology(8), 100)
    assert (actor.micro_batch_size, actor.max_tokens, actor.infer_max_tokens) == (None, 16384, 16384)
    assert (ref.infer_micro_batch_size, ref.infer_max_tokens) == (None, 16384)
    assert (critic.max_tokens, critic.infer_max_tokens) == (4096, 40000)


def test_engine_configs_have_model_device_dtype_and_seed(words, tmp_path):
    config = load_ppo(
        [
            *words,
            "actor_rollout_ref.ref.fsdp_config.model_dtype=bfloat16",
            "actor_rollout_ref.model.random_init=true",
            "actor_rollout_ref.model.enable_gradient_checkpointing=true",
            "+actor_rollout_ref.model.override_config.attention_dropout=0.0",
            "trainer.seed=11",
            f"{ACTOR}.grad_clip=0.5",
            "critic.grad_clip=0.25",
        ]
    )
    actor = actor_engine(config, Topology(), 100)
    assert actor.model.path == f"{tmp_path}/model"
    assert (actor.model.head, actor.model.random_init) == ("causal_lm", True)
    assert actor.model.enable_gradient_checkpointing
    assert actor.model.override_config == {"attention_dropout": 0.0}
    assert (actor.device, actor.dtype, actor.seed, actor.grad_clip) == ("cpu", "float32", 11, 0.5)
    ref = ref_engine(config, Topology())
    assert (ref.optim, ref.dtype, ref.model) == (None, "bfloat16", actor.model)
    critic = critic_engine(config, Topology(), 100)
    assert (critic.model.head, critic.dtype, critic.grad_clip) == ("value", "float32", 0.25)
    assert critic.optim is not None
    assert critic.optim.lr == 1e-5


@pytest.mark.parametrize(
    ("more", "total", "warmup"),
    [
        ([], 100, 0),
        ([f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"], 100, 10),
        ([f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", f"{ACTOR}.optim.lr_warmup_steps=3"], 100, 3),
        ([f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", f"{ACTOR}.optim.total_training_steps=50"], 50, 5),
        # the actor is trained in 80 of 100 iterations only
        ([f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1", "trainer.critic_warmup=20"], 80, 8),
    ],
)
def test_schedule_length_excludes_critic_warmup(words, more, total, warmup):
    optim = actor_engine(load_ppo([*words, *more]), Topology(), total_steps=100).optim
    assert optim is not None
    assert (optim.total_training_steps, optim.lr_warmup_steps) == (total, warmup)
    assert optim.min_lr_ratio == 0.0


def test_rollout_config_has_the_limits(words):
    config = load_ppo([*words, "data.max_prompt_length=100", "data.max_response_length=28", "trainer.seed=4"])
    rollout = rollout_engine(config)
    assert rollout.max_model_len == 128
    assert (rollout.max_num_seqs, rollout.max_num_batched_tokens) == (1024, 8192)
    assert (rollout.dtype, rollout.device, rollout.seed, rollout.free_cache_engine) == ("float32", "cpu", 4, True)


def test_validation_has_separate_sampling(words):
    config = load_ppo([*words, f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.top_k=5", "data.max_response_length=9"])
    train = {"max_tokens": 9, "temperature": 0.7, "top_k": 5, "top_p": 1.0, "do_sample": True, "ignore_eos": False}
    train |= {**OPTIONAL_SAMPLING, "stop": (), "stop_token_ids": ()}
    assert sampling(config) == train
    assert sampling(config, validate=True) == train | {"temperature": 0, "top_k": -1, "do_sample": False}


def test_clip_ratio_sets_both_sides_unless_overridden(words):
    def clip(*more: str) -> tuple[float, float]:
        return load_ppo([*words, *more]).actor_rollout_ref.actor.clip_range()

    assert clip() == (0.2, 0.2)
    assert clip(f"{ACTOR}.clip_ratio=0.3") == (0.3, 0.3)
    assert clip(f"{ACTOR}.clip_ratio_high=0.28") == (0.2, 0.28)
    assert clip(f"{ACTOR}.clip_ratio_low=0.0", f"{ACTOR}.clip_ratio=0.3") == (0.0, 0.3)


def test_algorithm_determines_the_roles(words):
    plain = load_ppo(words)
    assert (plain.needs_critic(), plain.kl_plan().is_used) == (True, False)
    assert load_ppo([*words, "algorithm.use_kl_in_reward=true"]).kl_plan().is_used
    group = load_ppo([*words, "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.use_kl_loss=true"])
    assert (group.needs_critic(), group.kl_plan().is_used) == (False, True)


def test_mini_batches_per_rank_count_sequences(words):
    config = load_ppo([*words, f"{ROLLOUT}.n=4", "critic.ppo_mini_batch_size=128"])
    # 256 prompts x 4 over 8 ranks; 128 x 4 over 8.
    assert config.actor_mini_batch_per_rank(Topology(8)) == 128
    assert config.critic_mini_batch_per_rank(Topology(8)) == 64


def test_tokenizer_and_data_seed_have_defaults(words, tmp_path):
    config = load_ppo([*words, "trainer.seed=3"])
    assert (config.tokenizer_path(), config.data_seed()) == (f"{tmp_path}/model", 3)
    config = load_ppo([*words, f"data.tokenizer={tmp_path}", "data.seed=0"])
    assert (config.tokenizer_path(), config.data_seed()) == (str(tmp_path), 0)


def test_default_scoring_function_selects_by_data_source(words):
    assert load_ppo(words).custom_reward_function.selected()[0].name == "auto"
    assert load_ppo([*words, "custom_reward_function.name=gsm8k"]).custom_reward_function.selected()[0].name == "gsm8k"
    function = load_ppo([*words, "custom_reward_function.path=my_pkg.rewards"]).custom_reward_function
    assert function.selected()[0].name == "compute_score"


def test_supervised_engine_config_has_the_same_fields(sft_words):
    overrides = ["optim.lr_warmup_steps_ratio=0.1", "data.use_dynamic_bsz=false"]
    engine = sft_engine(load_sft([*sft_words, *overrides]), total_steps=200)
    assert (engine.micro_batch_size, engine.infer_micro_batch_size, engine.max_tokens) == (4, 4, None)
    assert engine.optim is not None
    assert (engine.optim.total_training_steps, engine.optim.lr_warmup_steps) == (200, 20)
    by_tokens = sft_engine(load_sft(sft_words), total_steps=200)
    assert (by_tokens.micro_batch_size, by_tokens.max_tokens, by_tokens.infer_max_tokens) == (None, 4096, 4096)


def test_only_a_trained_reward_model_may_have_a_new_head(words, sft_words):
    engine = rm_engine(load_rm([*sft_words, "data.micro_batch_size_per_gpu=3"]), total_steps=10)
    assert (engine.model.head, engine.model.new_head) == ("reward", True)
    assert (engine.micro_batch_size, engine.infer_micro_batch_size) == (3, 3)
    assert engine.optim is not None
    assert not EngineModel(path="models/any", head="reward").new_head


@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "actor"),  # four mini-batches of 256
        ({f"{ACTOR}.ppo_mini_batch_size": 1024}, "update"),
        ({f"{ACTOR}.ppo_mini_batch_size": 1024, f"{ACTOR}.ppo_epochs": 2}, "actor"),
        ({f"{ACTOR}.ppo_mini_batch_size": 1024, "algorithm.use_kl_in_reward": "true"}, "actor"),
        ({f"{ACTOR}.ppo_mini_batch_size": 1024, "algorithm.rollout_correction.rollout_is": "token"}, "actor"),
        ({"algorithm.rollout_correction.bypass_mode": "true"}, "rollout"),
        ({f"{ACTOR}.ppo_mini_batch_size": 1024, "algorithm.rollout_correction.bypass_mode": "true"}, "rollout"),
    ],
)
def test_source_of_old_log_probs_follows_from_the_config(words, settings, source):
    config = load_ppo([*words, *(f"{key}={value}" for key, value in settings.items())])
    assert config.old_log_prob_source() == source
