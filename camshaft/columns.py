"""The table of batch columns: what each is called, what it holds, who writes it, who reads it.

Roles, trainer and data agree on this table and on nothing else. `DataProto.require` uses it to say who
should have written a missing column. Import it from anywhere; it imports nothing.

    COLUMNS["old_log_probs"].written_by     # "roles/actor.compute_log_prob"

Kinds: `ragged` is one value per token, `tensor` is one per row, `object` is any Python object per row.
Columns "per response token" are aligned with `responses`; "per token" ones with `input_ids`. A value for
token j of a row speaks of *that* token: its log-probability given the tokens before it, or the value of
the state in which it was chosen.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["ragged", "tensor", "object"]


@dataclass(frozen=True, slots=True)
class Column:
    """One line of the table."""

    name: str
    kind: Kind
    dtype: str
    meaning: str
    written_by: str
    read_by: tuple[str, ...]


_TABLE = (
    Column("prompts", "ragged", "int64", "token ids of the prompt", "data/loader", ("roles/rollout", "roles/base", "roles/reward_input")),
    Column("uid", "object", "str", "the prompt a row belongs to; rows of one group share it", "data/loader", ("trainer/advantages",)),
    Column("prompt_id", "ragged", "int64", "token ids of the prompt's id, where the config names a column of ids", "data/prompts", ("trainer/scoring",)),
    Column("data_source", "object", "str", "name of the data set a row comes from", "data/loader", ("rewards/manager",)),
    Column("ground_truth", "object", "any", "what the reward function compares with", "data/loader", ("rewards/manager",)),
    Column("extra_info", "object", "dict", "whatever else the data set has to say", "data/loader", ("rewards/manager",)),
    Column("raw_prompt", "object", "any", "messages or text of the prompt as the data have it, for a reward model with another template", "data/prompts", ("roles/reward_input",)),
    Column("raw_input_ids", "ragged", "int64", "token ids of the prompt's text without chat template, where the config asks for them", "data/prompts", ("roles/reward_input",)),
    Column("sampling_seed", "tensor", "int64", "a row's samples depend on this number and its prompt alone", "trainer/ppo", ("roles/rollout",)),
    Column("responses", "ragged", "int64", "token ids of the response, its end-of-sequence token included", "roles/rollout", ("roles/base", "rewards/manager", "roles/reward_input")),
    Column("response_mask", "ragged", "bool", "per response token: true where the policy chose it", "roles/rollout", ("roles/base", "roles/reward_model", "trainer/advantages")),
    Column("rollout_log_probs", "ragged", "float32", "per response token: log-prob in the distribution sampled from", "roles/rollout", ("trainer/advantages", "trainer/metrics", "trainer/ppo")),
    Column("rollout_is_weights", "ragged", "float32", "per response token: importance weight of the sample, where the config asks for it", "trainer/advantages", ("roles/actor.update_actor",)),
    Column("rollout_rs_mask", "ragged", "bool", "per response token: true where rejection keeps it, where the config asks for it", "trainer/advantages", ("roles/actor.update_actor",)),
    Column("finished", "tensor", "bool", "the response ended by itself, not at the length limit", "roles/rollout", ("trainer/metrics",)),
    Column("rm_scores", "ragged", "float32", "per response token: the reward model's score, on the last token that counts", "roles/reward_model.compute_rm_score", ("rewards/combined",)),
    Column("rm_truncated", "tensor", "bool", "the reward model read the row without its beginning", "roles/reward_model.compute_rm_score", ("rewards/combined",)),
    Column("token_level_scores", "ragged", "float32", "per response token: the reward, usually on the last token only", "rewards/manager or rewards/combined", ("trainer/advantages", "trainer/metrics")),
    Column("reward_baselines", "tensor", "float32", "score of the greedy response to the row's prompt, with adv_estimator=remax", "trainer/ppo", ("trainer/advantages",)),
    Column("old_log_probs", "ragged", "float32", "per response token: log-prob under the policy before the update", "roles/actor.compute_log_prob or roles/actor.update_actor or trainer/ppo", ("roles/actor.update_actor", "trainer/advantages", "trainer/metrics")),
    Column("entropy", "ragged", "float32", "per response token: entropy of the policy before the update", "roles/actor.compute_log_prob or roles/actor.update_actor", ("trainer/metrics",)),
    Column("ref_log_prob", "ragged", "float32", "per response token: log-prob under the reference policy", "roles/ref.compute_ref_log_prob", ("trainer/advantages", "roles/actor.update_actor")),
    Column("full_kl", "ragged", "float32", "per response token: KL divergence of the policy from the reference over the whole vocabulary", "roles/exact_kl", ("trainer/advantages",)),
    Column("log_q", "ragged", "float32", "per token of a micro-batch: the reference's log-probs of the whole vocabulary, which `full_kl` is measured from", "roles/exact_kl", ("engine",)),
    Column("values", "ragged", "float32", "per response token: the critic's value before the update", "roles/critic.compute_values", ("trainer/advantages", "roles/critic.update_critic")),
    Column("token_level_rewards", "ragged", "float32", "per response token: score minus the KL penalty", "trainer/advantages", ("trainer/advantages", "trainer/metrics")),
    Column("advantages", "ragged", "float32", "per response token: how much better than expected", "trainer/advantages", ("roles/actor.update_actor",)),
    Column("returns", "ragged", "float32", "per response token: the target of the critic", "trainer/advantages", ("roles/critic.update_critic",)),
    Column("input_ids", "ragged", "int64", "the whole sequence, as an engine sees it; of a pair, both", "roles/base or data/sft or roles/rm", ("engine",)),
    Column("chosen", "ragged", "int64", "prompt and preferred answer, as a reward model reads them", "data/preferences", ("roles/rm",)),
    Column("rejected", "ragged", "int64", "prompt and the other answer", "data/preferences", ("roles/rm",)),
    Column("margin", "tensor", "float32", "by how much the preferred answer's score is to lead at least; 0 unless the data say more", "data/preferences", ("roles/rm",)),
    Column("chosen_scores", "tensor", "float32", "the reward model's score of the preferred answer", "roles/rm.compute_scores", ("trainer/rm",)),
    Column("rejected_scores", "tensor", "float32", "its score of the other answer", "roles/rm.compute_scores", ("trainer/rm",)),
    Column("loss_mask", "ragged", "bool", "per token: true where an output is wanted and the loss counts it", "roles/base or data/sft", ("engine",)),
)  # fmt: skip

COLUMNS: dict[str, Column] = {column.name: column for column in _TABLE}
