"""The table of batch sizes, compared with hand-worked numbers."""

from camshaft.config import Topology, batch_table, load_ppo, render_batch_table

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def test_batch_table_from_prompts_to_optimizer_steps(words):
    config = load_ppo(
        [
            *words,
            f"{ACTOR}.use_dynamic_bsz=false",
            f"{ROLLOUT}.n=4",
            f"{ACTOR}.ppo_epochs=2",
            "critic.ppo_mini_batch_size=512",
            "critic.ppo_epochs=3",
        ]
    )
    rows = {row.name: (row.actor, row.critic) for row in batch_table(config, Topology(8))}
    assert rows == {
        "data-parallel ranks": (8, 8),
        "prompts per iteration": (1024, 1024),
        "sequences per iteration": (4096, 4096),  # x 4
        "sequences per mini-batch": (1024, 2048),  # 256 x 4, 512 x 4
        "mini-batches per epoch": (4, 2),
        "mini-batch per rank": (128, 256),  # / 8
        "micro-batch per rank": (8, 8),  # 64 / 8
        "micro-batches per mini-batch": (16, 32),
        "forward micro-batch per rank": (16, 8),  # 128 / 8, 64 / 8
        "epochs": (2, 3),
        "optimizer steps per iteration": (8, 6),
    }


def test_last_micro_batch_may_be_smaller(words):
    config = load_ppo([*words, f"{ACTOR}.ppo_micro_batch_size_per_gpu=100"])
    rows = {row.name: row.actor for row in batch_table(config, Topology())}
    assert rows["micro-batches per mini-batch"] == 3  # 100 + 100 + 56


def test_token_budgets_and_missing_roles_are_shown(words):
    config = load_ppo(
        [*words, f"{ACTOR}.ppo_max_token_len_per_gpu=16384", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"],
    )
    text = render_batch_table(batch_table(config, Topology()))
    lines = {line[:30].strip(): line[30:].split() for line in text.splitlines()}
    assert lines["micro-batch per rank"][:4] == ["16384", "tokens", "-", "-"]
    assert lines["micro-batches per mini-batch"][:2] == ["by", "tokens"]
    assert lines["sequences per iteration"][0] == "8192"
    assert len({len(line) - len(line.lstrip()) for line in text.splitlines()[1:]}) == 1  # one column of names


def test_each_role_has_the_ranks_of_its_layout(words):
    config = load_ppo(
        [
            *words,
            f"{ACTOR}.strategy=fsdp",
            "trainer.n_gpus_per_node=8",
            "algorithm.use_kl_in_reward=true",
            f"{ACTOR}.ulysses_sequence_parallel_size=4",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2",
            "critic.model.fsdp_config.tensor_parallel_size=8",
            f"{ACTOR}.ppo_micro_batch_size=64",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size=128",
            "actor_rollout_ref.ref.log_prob_micro_batch_size=128",
            "critic.ppo_micro_batch_size=64",
        ]
    )
    rows = {row.name: (row.actor, row.ref, row.critic) for row in batch_table(config, Topology(8))}
    assert rows["data-parallel ranks"] == (2, 4, 1)  # 8 / 4, 8 / 2, 8 / 8
    assert rows["mini-batch per rank"] == (128, None, 256)  # 256 / 2, 256 / 1
    assert rows["micro-batch per rank"] == (32, None, 64)  # 64 / 2, 64 / 1
    assert rows["forward micro-batch per rank"] == (64, 32, 64)  # 128 / 2, 128 / 4, 64 / 1
