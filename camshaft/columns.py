"""Table of batch columns: name, kind, dtype, description, writers and readers.

Data, roles and trainer exchange data only in these columns. `DataProto.require` uses the table to report which module
writes a missing column. The module imports nothing from the package, so that every layer can import it.

    COLUMNS["old_log_probs"].written_by     # "roles/actor.compute_log_prob"

A `ragged` column contains one value per token, a `tensor` column one entry per row, and an `object` column one Python
object per row. Columns "per response token" are aligned with `responses`, columns "per token" with `input_ids`. The
entry at index j belongs to token j: its log-prob given the previous tokens, or the value of the state in which it was
sampled.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["ragged", "tensor", "object"]


@dataclass(frozen=True, slots=True)
class Column:
    """A batch column."""

    name: str
    kind: Kind
    dtype: str
    meaning: str
    written_by: str
    read_by: tuple[str, ...]


_TABLE = (
    Column("prompts", "ragged", "int64", "token IDs of the prompt", "data/loader", ("roles/rollout", "roles/base", "roles/reward_input")),
    Column("uid", "object", "str", "ID of the prompt, which the rows of a group have in common", "data/loader", ("trainer/advantages",)),
    Column("prompt_id", "ragged", "int64", "token IDs of the prompt ID, with data.prompt_id_key", "data/prompts", ("trainer/build",)),
    Column("data_source", "object", "str", "data source of the row", "data/loader", ("rewards/manager",)),
    Column("ground_truth", "object", "any", "reference answer for the reward function", "data/loader", ("rewards/manager",)),
    Column("extra_info", "object", "dict", "additional fields of the dataset", "data/loader", ("rewards/manager",)),
    Column("data_row", "object", "dict", "columns of the data file, for a reward function with such parameters", "data/prompts", ("rewards/manager",)),
    Column("raw_prompt", "object", "any", "messages or text of the prompt, for a reward model with a different chat template", "data/prompts", ("roles/reward_input",)),
    Column("raw_input_ids", "ragged", "int64", "token IDs of the prompt without the chat template, with data.return_raw_input_ids", "data/prompts", ("roles/reward_input",)),
    Column("sampling_seed", "tensor", "int64", "sampling seed of the row, which together with the prompt determines the samples", "trainer/ppo", ("roles/rollout",)),
    Column("environment_seed", "tensor", "int64", "seed of the environment, equal for the rows of a prompt, with rollout.multi_turn.environment", "agents/setup", ("roles/episodes",)),
    Column("is_padding", "tensor", "bool", "true if the row fills the batch up and is not played, with rollout.multi_turn.environment", "agents/setup", ("roles/episodes",)),
    Column("stop_reason", "object", "str", "why the episode ended: done, turns, length, prompt, timeout or error, with rollout.multi_turn.environment", "roles/episodes", ("rewards/environments", "tracking/samples")),
    Column("turns", "tensor", "int64", "number of answers in the episode, with rollout.multi_turn.environment", "roles/episodes", ("rewards/environments", "tracking/samples")),
    Column("env_scores", "ragged", "float32", "per response token: reward of the environment on the last token of each answer, 0 elsewhere, with rollout.multi_turn.environment", "roles/episodes", ("rewards/environments", "tracking/samples")),
    Column("env_failure", "object", "str", "failure of the environment, or None, with rollout.multi_turn.environment", "roles/episodes", ("rewards/environments",)),
    Column("env_outcomes", "object", "list", "results of the reward functions that are called with the environment, with a parameter `environments`", "roles/episodes", ("rewards/manager",)),
    Column("transcript", "object", "list", "messages of the episode, with rollout.multi_turn.environment", "roles/episodes", ("rewards/environments", "tracking/samples")),
    Column("answer_options", "object", "list", "per answer of a program: sampling options that are not those of the run, with rollout.multi_turn.environment", "roles/episodes", ("tracking/samples",)),
    Column("sequence_lengths", "ragged", "int64", "per row of the session: its tokens of a prompt in `responses`, and the tokens behind it, with rollout.multi_turn.agent", "roles/episodes", ("roles/sequences", "rewards/overlong", "tracking/samples")),
    Column("sequence_weight", "tensor", "float32", "per row of an engine: weight of the row in `num_sequences`, with rollout.multi_turn.agent", "roles/sequences", ("engine", "roles/base")),
    Column("responses", "ragged", "int64", "token IDs of the response, including the end-of-sequence token", "roles/rollout", ("roles/base", "rewards/manager", "roles/reward_input")),
    Column("response_mask", "ragged", "bool", "per response token: true if the policy sampled the token", "roles/rollout", ("roles/base", "roles/reward_model", "trainer/advantages")),
    Column("rollout_log_probs", "ragged", "float32", "per response token: log-prob under the sampling distribution", "roles/rollout", ("trainer/advantages", "trainer/metrics", "trainer/ppo")),
    Column("policy_versions", "ragged", "int32", "per response token: version of the weights that sampled it, with async_training.max_staleness", "roles/rollout", ("trainer/metrics",)),
    Column("policy_ages", "ragged", "int32", "per response token: versions by which the weights that sampled it are older than those before the update, with rollout_correction.loss_type=interpolated", "trainer/async_ppo", ("roles/actor.update_actor",)),
    Column("rollout_is_weights", "ragged", "float32", "per response token: importance weight, with rollout_correction.rollout_is", "trainer/advantages", ("roles/actor.update_actor", "trainer/advantages")),
    Column("rollout_is_mean", "tensor", "float32", "mean importance weight of the iteration, with rollout_correction.bypass_mode and rollout_is_batch_normalize", "trainer/ppo", ("roles/bypass",)),
    Column("rollout_rs_mask", "ragged", "bool", "per response token: true if all rejection rules accept the token, with rollout_correction.rollout_rs", "trainer/advantages", ("roles/actor.update_actor",)),
    Column("routed_experts", "ragged", "uint8", "per token: experts (layers, top-k) that the rollout chose, with enable_return_routed_experts or router_replay; int16 with 256 experts or more", "roles/rollout", ("roles/actor", "engine")),
    Column("routing_mismatch", "ragged", "float64", "per response token: fraction of the choices of experts that differ between trainer and rollout", "roles/actor.compute_log_prob or roles/actor.update_actor", ("trainer/metrics",)),
    Column("finished", "tensor", "bool", "true if the response ended before the length limit", "roles/rollout", ("trainer/metrics",)),
    Column("rm_scores", "ragged", "float32", "per response token: score of the reward model at the last masked-in token, 0 elsewhere", "roles/reward_model.compute_rm_score", ("rewards/combined",)),
    Column("rm_truncated", "tensor", "bool", "true if the sequence was truncated for the reward model", "roles/reward_model.compute_rm_score", ("rewards/combined",)),
    Column("token_level_scores", "ragged", "float32", "per response token: score, usually 0 except at the last token", "rewards/manager or rewards/combined", ("trainer/advantages", "trainer/metrics")),
    Column("score_parts", "object", "dict", "numbers besides the score that the reward function returned", "trainer/advantages", ("tracking/samples", "trainer/advantages")),
    Column("score_failure", "object", "str", "kind of failure of the reward call, or None", "trainer/advantages", ("tracking/samples", "trainer/advantages")),
    Column("reward_baselines", "tensor", "float32", "score of the greedy response to the prompt, with adv_estimator=remax", "trainer/ppo", ("trainer/advantages",)),
    Column("old_log_probs", "ragged", "float32", "per response token: log-prob under the policy before the update", "roles/actor.compute_log_prob or roles/actor.update_actor or trainer/ppo", ("roles/actor.update_actor", "trainer/advantages", "trainer/metrics")),
    Column("entropy", "ragged", "float32", "per response token: entropy of the policy before the update", "roles/actor.compute_log_prob or roles/actor.update_actor", ("trainer/metrics", "trainer/mini_batches")),
    Column("sum_pi_squared", "ragged", "float32", "per response token: sum of the squared probabilities of the vocabulary under the policy before the update, with adv_estimator=optimal_token_baseline", "roles/actor.compute_log_prob", ("trainer/advantages",)),
    Column("ref_log_prob", "ragged", "float32", "per response token: log-prob under the reference policy", "roles/actor.compute_ref_log_prob", ("trainer/advantages", "roles/actor.update_actor")),
    Column("selected_tokens", "ragged", "bool", "per response token: true if its covariance of log-prob and advantage selects it, with the policy losses clip_cov and kl_cov", "trainer/mini_batches", ("roles/actor.update_actor",)),
    Column("high_entropy", "ragged", "bool", "per response token: true if its entropy is among the highest of the mini-batch, with top_entropy_quantile", "trainer/mini_batches", ("roles/actor.update_actor",)),
    Column("full_kl", "ragged", "float32", "per response token: exact KL divergence of the policy from the reference over the vocabulary", "roles/exact_kl", ("trainer/advantages",)),
    Column("log_q", "ragged", "float32", "per token of a micro-batch: log-probs of the reference over the vocabulary, for `full_kl`", "roles/exact_kl", ("engine",)),
    Column("values", "ragged", "float32", "per response token: value of the critic before the update", "roles/critic.compute_values", ("trainer/advantages", "roles/critic.update_critic")),
    Column("token_level_rewards", "ragged", "float32", "per response token: score minus the KL penalty", "trainer/advantages", ("trainer/advantages", "trainer/metrics")),
    Column("advantages", "ragged", "float32", "per response token: advantage", "trainer/advantages", ("roles/actor.update_actor",)),
    Column("returns", "ragged", "float32", "per response token: regression target of the critic", "trainer/advantages", ("roles/critic.update_critic",)),
    Column("input_ids", "ragged", "int64", "token IDs of the complete sequence for an engine, or of both sequences of a pair", "roles/base or data/sft or roles/rm", ("engine",)),
    Column("chosen", "ragged", "int64", "token IDs of the prompt and the chosen response", "data/preferences", ("roles/rm",)),
    Column("rejected", "ragged", "int64", "token IDs of the prompt and the rejected response", "data/preferences", ("roles/rm",)),
    Column("margin", "tensor", "float32", "margin by which the chosen score should exceed the rejected score, 0 by default", "data/preferences", ("roles/rm",)),
    Column("chosen_scores", "tensor", "float32", "score of the chosen response", "roles/rm.compute_scores", ("trainer/supervised",)),
    Column("rejected_scores", "tensor", "float32", "score of the rejected response", "roles/rm.compute_scores", ("trainer/supervised",)),
    Column("loss_mask", "ragged", "bool", "per token: true if the loss includes the token", "roles/base or data/sft", ("engine",)),
)  # fmt: skip

COLUMNS: dict[str, Column] = {column.name: column for column in _TABLE}
