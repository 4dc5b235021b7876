"""Table of all metrics: names, units, descriptions and sources.

    find("val-core/gsm8k/acc/mean@8").description
    reference_page()                              # `camshaft metrics docs` writes it to docs/metrics.md

`LEGEND` explains the placeholders in names. A test compares the table with the metrics that runs log, in both
directions.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product

from camshaft.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """A metric, or several similar metrics whose names differ in the alternatives in braces."""

    name: str
    unit: str
    description: str
    source: str
    """File that computes the metric."""
    trainer: str

    def names(self) -> Iterator[str]:
        """Yield all names that the alternatives in braces describe."""
        parts = re.split(r"\{(.*?)\}", self.name)
        for combination in product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))):
            yield "".join(combination)


def _table(trainer: str, text: str) -> list[Metric]:
    """Return the metrics of a table: entries `name | unit | source | description`.

    Further lines of an entry are indented. Lines that start with # are headings.
    """
    entries = [entry for entry in re.split(r"\n+(?! )", text.strip()) if not entry.startswith("#")]
    rows = ([" ".join(cell.split()) for cell in entry.split("|", 3)] for entry in entries)
    return [Metric(name, unit, description, source, trainer) for name, unit, source, description in rows]


_LEARNING = """
# rewards and advantages
critic/score/{mean,max,min} | score | trainer/metrics.py |
    Score of a response, which is the sum of its token-level scores.
critic/score/{p10,p50,p90} | score | trainer/metrics.py |
    Quantiles of the scores: 10 %, 50 % (the median) and 90 % of the responses have at most this score.
critic/score/<source>/mean | score | trainer/metrics.py | Mean score of the responses to prompts of the data source.
groups/same_share | fraction of groups | trainer/metrics.py |
    Groups (the responses to one prompt) whose scores are all equal, so that a group-relative advantage has no
    signal. Logged if a prompt has several responses.
critic/rewards/{mean,max,min} | score | trainer/metrics.py |
    Reward of a response, which is its score minus the KL penalty.
critic/advantages/{mean,max,min} | | trainer/metrics.py | Advantages of the response tokens.
critic/returns/{mean,max,min} | score | trainer/metrics.py | Returns of the response tokens.
critic/values/{mean,max,min} | score | trainer/metrics.py | Values that the critic predicts for the response tokens.
critic/vf_explained_var | 1 | trainer/metrics.py |
    Explained variance of the critic, 1 - Var(returns - values) / Var(returns). 1 means perfect predictions; a
    constant prediction gives 0.
reward/{errors,invalid,timeouts,crashes} | responses | rewards/manager.py |
    Responses with a failed call of a reward function, by the kind of the first failure: exceptions, invalid scores
    (not finite, or above max_abs_score in absolute value), timeouts, and crashes of the scoring process.
reward/slow | responses | rewards/manager.py | Calls of the reward function that took more than half of the time limit.
reward/model/mean | score | rewards/combined.py |
    Mean score of the reward model, before multiplication by reward_model.weight.
reward/model/truncated | responses | rewards/combined.py | Sequences that were truncated to reward_model.max_length.
reward/function/mean | score | rewards/combined.py |
    Mean score of the reward function in runs that also have a reward model.
reward/environment/mean | score | rewards/environments.py |
    Mean reward of the environments, summed over the turns of an episode, over the episodes that are trained on.
reward/overlong/mean | fraction of responses | rewards/overlong.py | Responses with an overlong penalty.
reward/overlong_reward/mean | score | rewards/overlong.py | Mean overlong penalty, which is 0 or negative.
reward/<value>/mean | | rewards/manager.py | Mean of a number that the reward function returns in its dict.
reward/<function>/{std,min,max} | score | rewards/manager.py |
    Scores of one of several reward functions, before multiplication by its weight, over the responses that it
    scored. reward/<function>/mean is their mean.
reward/<function>/{scored,failed} | responses | rewards/manager.py |
    Responses that one of several reward functions scored, and failed calls of this function. It returned None for
    the remaining responses.
baseline/score/mean | score | trainer/ppo.py | Mean score of the greedy baseline responses of ReMax.
baseline/{errors,invalid,timeouts,crashes,slow,model/truncated} | responses | trainer/ppo.py |
    Same as reward/..., for the baseline responses.
baseline/<value>/mean | | trainer/ppo.py | Same as reward/<value>/mean, for the baseline responses.
baseline/<function>/{std,min,max,scored,failed} | | trainer/ppo.py |
    Same as reward/<function>/..., for the baseline responses.
# dynamic sampling
train/num_gen_batches | batches | trainer/dynamic_sampling.py | Generation batches that the step required.
filter_groups/same_share | fraction of prompts | trainer/dynamic_sampling.py |
    Generated prompts whose responses all have the same value of the filter metric. They are dropped, or given back
    if they follow the last prompt that the step uses.
filter_groups/given_back | prompts | trainer/dynamic_sampling.py |
    Unused prompts after the last one that the step uses. The next step uses them first if they fill a batch
    together with the remaining rows of the epoch.
filter_groups/<value>/mean | | trainer/dynamic_sampling.py |
    Mean of the value that prompts are filtered by, over all generated responses.
# updates
actor/pg_loss | | roles/actor.py | Policy loss, aggregated with loss_agg_mode.
actor/pg_clipfrac | fraction of tokens | algorithms/losses.py | Tokens whose policy loss is clipped.
actor/pg_clipfrac_lower | fraction of tokens | algorithms/losses.py |
    Tokens whose policy loss is limited by the dual clip.
actor/ppo_kl | nats | algorithms/losses.py | Mean of log pi_old - log pi over the response tokens.
actor/signal_share | fraction of tokens | trainer/idle.py |
    Fraction of response tokens that contribute to the policy loss: their advantage is not 0, and rollout correction
    does not reject them. 0 means that the policy cannot learn from the step.
train/idle_steps | steps | trainer/idle.py |
    Consecutive steps up to this one in which no token has a coefficient other than 0 in any loss (max_idle_steps).
actor/entropy | nats | trainer/metrics.py | Mean entropy of the policy over the response tokens.
actor/entropy_coeff | 1 | trainer/ppo.py |
    Coefficient of the entropy bonus in the update. It changes with entropy_target.
actor/cov_selected | fraction of tokens | algorithms/policy_losses.py |
    Tokens that the policy losses clip_cov (which leaves them out) and kl_cov (which penalizes their change) select.
actor/kl_loss | nats | roles/actor.py | KL loss with respect to the reference policy (use_kl_loss).
actor/reward_kl_penalty | nats | trainer/advantages.py |
    Mean KL divergence from the reference policy in the reward, averaged over responses.
actor/reward_kl_penalty_coeff | 1 | trainer/advantages.py | Coefficient of the KL penalty in the reward (kl_ctrl).
critic/vf_loss | score^2 | roles/critic.py | Value loss.
critic/vf_clipfrac | fraction of tokens | algorithms/losses.py | Tokens whose value loss is clipped.
critic/vpred_mean | score | algorithms/losses.py | Mean of the values that the critic predicts during the update.
{actor,critic}/grad_norm | | roles/base.py |
    Mean gradient norm before clipping, over the optimizer steps of the iteration.
{actor,critic}/lr | 1 | roles/base.py | Learning rate of the update.
{actor,critic}/skipped_steps | steps | roles/base.py |
    Optimizer steps that were skipped because the gradient was not finite.
"""
_GENERATION = """
# lengths
response_length/{mean,max,min} | tokens | trainer/metrics.py | Response length.
response_length/clip_ratio | fraction of responses | trainer/metrics.py |
    Responses that reached the maximum length without finishing.
prompt_length/{mean,max,min} | tokens | trainer/metrics.py | Prompt length.
# generation
rollout/prompt_tokens_computed | tokens | rollout/builtin/scheduler.py |
    Prompt tokens that the rollout computed, including padding (hf only).
rollout/prompt_tokens_cached | tokens | rollout/external.py | Prompt tokens that the rollout read from its prefix cache.
rollout/response_tokens | tokens | rollout/builtin/scheduler.py | Generated tokens.
rollout/decode_steps | steps | rollout/builtin/scheduler.py | Decode steps of the rollouts torch and hf.
rollout/rows_decoded | rows | rollout/builtin/scheduler.py | Active sequences, summed over the decode steps.
rollout/slot_use | fraction | rollout/builtin/scheduler.py |
    Mean fraction of KV cache slots in use, over the decode steps.
rollout/http_retries | requests | rollout/server/rollout.py | HTTP requests that the server rollout retried.
rollout/sync_bytes | bytes | reshard/hybrid.py | Size of the weights that were sent in the weight sync.
rollout/weights_version | steps | roles/rollout.py |
    Number of training steps of the weights that a rollout on devices of its own holds.
# asynchronous training
async/staleness_{mean,max} | versions | trainer/metrics.py |
    Version that the step trains, minus the oldest version among the weights that sampled the tokens of a response.
async/age_<age>_share | fraction of tokens | trainer/metrics.py |
    Response tokens that were sampled by weights which are this many versions old.
async/age_<age>_{log_prob_diff_mean,kl_k3} | nats | trainer/metrics.py |
    Mismatch of the response tokens that were sampled by weights which are this many versions old. That of age 0 is due
    to the generator, and that of others also to the updates in between.
async/probe_{log_prob_diff_mean,kl_k3} | nats | trainer/probes.py |
    Mismatch of a few responses of an earlier step, whose log-probs trainer and rollout have computed with the same
    weights. It is free of staleness.
async/probe_version | versions | trainer/probes.py | Version of these weights.
async/generated_length/{mean,max,p50,p90} | tokens | trainer/metrics.py | Length of the responses of the batch.
async/learned_length/{mean,max,p50,p90} | tokens | trainer/metrics.py |
    Length of those with a token in the policy loss. rollout_rs has rejected the others, or their reward failed.
async/batches_in_flight | batches | trainer/ledger.py |
    Batches that are sent to the rollout and not learned, besides that of the step.
async/trainer_wait | seconds | trainer/async_ppo.py | Time for which the step waited for its responses.
async/trainer_wait_share | fraction of time | trainer/async_ppo.py |
    The same, relative to the time since the previous step got its responses.
async/generation | seconds | roles/rollout.py | Time in which the rollout generated the batch. Maximum over ranks.
async/generator_idle | seconds | roles/rollout.py |
    Time for which the rollout had nothing to do since its previous batch. Mean over ranks.
async/generator_idle_share | fraction of time | roles/rollout.py | The same, relative to the time since that batch.
# episodes with environments or programs
agent/turns | answers | rewards/environments.py | Mean number of answers in an episode.
agent/stop/{done,turns,length,prompt,timeout,error} | fraction of episodes | rewards/environments.py |
    Why episodes ended: the environment ended it, the maximum number of answers, the length limit, a prompt that is too
    long after reset, the time limit of the environment's calls, or a failed environment. Those with prompt and error
    are not trained on.
agent/tokens_not_sampled | tokens | rewards/environments.py |
    Response tokens that the environment and the chat template contribute. They have no loss.
agent/tool_seconds | seconds | roles/episodes.py |
    Time of the calls of environments, or of programs without the time in which they wait for answers, summed over all
    episodes.
agent/tool_calls | calls | roles/episodes.py | Calls of tools in answers.
agent/tool_errors | calls | roles/episodes.py |
    Failed calls: of tools, which the policy is told, with those that cannot be read, and of environments or programs
    (exceptions, timeouts and crashes, including those that were repeated with success).
agent/other_rows | rows | roles/episodes.py |
    Further rows of the sessions of programs, besides the first row of each session. They are trained on too.
agent/prompt_tokens_recomputed | tokens | roles/episodes.py |
    Tokens of the history of an episode that were computed again for a later answer. An upper bound for rollouts with a
    prefix cache, whose hits it does not subtract.
# generator against trainer
rollout/log_prob_diff_{max,mean} | nats | algorithms/mismatch.py |
    Absolute difference |log pi_train - log pi_rollout| of the tokens.
rollout/log_prob_diff_above_0.1 | fraction of tokens | algorithms/mismatch.py |
    Tokens with an absolute log-prob difference above 0.1.
rollout/kl_{k1,k3} | nats | algorithms/mismatch.py | KL(rollout || train), estimated with k1 and k3.
rollout/effective_sample_share | fraction of responses | algorithms/mismatch.py |
    Relative effective sample size with sequence-level importance weights.
rollout/routing_mismatch | fraction of choices | trainer/metrics.py |
    Expert choices of the trainer's routers that differ from those of the rollout, over all layers.
rollout/routing_mismatch_tokens | fraction of tokens | trainer/metrics.py |
    Tokens for which the expert choices of trainer and rollout differ in at least one layer.
rollout_corr/rollout_is_{mean,max,min,std} | 1 | trainer/advantages.py | Importance weights of the tokens.
rollout_corr/rollout_is_batch_norm_factor | 1 | trainer/advantages.py |
    Mean importance weight, by which rollout_is_batch_normalize divides the weights.
rollout_corr/rollout_is_eff_sample_size | fraction of tokens | trainer/advantages.py |
    Relative effective sample size with these weights.
rollout_corr/rollout_is_ratio_fraction_high | fraction of tokens | trainer/advantages.py |
    Tokens whose importance ratio exceeds the threshold.
rollout_corr/rollout_is_ratio_fraction_low | fraction of tokens | trainer/advantages.py |
    Tokens whose importance ratio is below the lower bound of rollout_is_threshold.
rollout_corr/rollout_rs_masked_fraction | fraction of tokens | trainer/advantages.py |
    Tokens that the rejection rules mask out.
rollout_corr/rollout_rs_seq_masked_fraction | fraction of responses | trainer/advantages.py |
    Responses in which the rejection rules mask out tokens.
rollout_corr/rollout_rs_<rule>_masked_fraction | fraction of tokens | trainer/advantages.py |
    Tokens that one of several rejection rules, such as token_k1, masks out.
rollout_corr/rollout_rs_<rule>_seq_masked_fraction | fraction of responses | trainer/advantages.py |
    Responses in which one of several rejection rules masks out tokens.
rollout_corr/{training,rollout}_ppl | 1 | algorithms/mismatch.py |
    Mean perplexity of the responses under the policy of the trainer and of the rollout.
rollout_corr/{training,rollout}_log_ppl | nats | algorithms/mismatch.py |
    Mean log-perplexity of the responses, which is the mean of -log pi over the tokens of a response.
rollout_corr/{log_ppl_diff,log_ppl_abs_diff,log_ppl_diff_max,log_ppl_diff_min} | nats | algorithms/mismatch.py |
    Log-perplexity of a response under the trainer minus that under the rollout: mean, mean of the absolute value,
    largest and smallest.
rollout_corr/ppl_ratio | 1 | algorithms/mismatch.py |
    Mean perplexity of a response under the trainer divided by that under the rollout.
rollout_corr/chi2_{token,seq} | 1 | algorithms/mismatch.py |
    Estimated chi-squared divergence of the trainer's policy from that of the rollout, per token and per response: the
    mean of the squared importance ratio, minus 1.
actor/rollout_is_mean | 1 | roles/bypass.py |
    Mean importance weight of the tokens in the update, with rollout_correction.bypass_mode and loss_type=reinforce or
    interpolated.
actor/rollout_rs_masked_fraction | fraction of tokens | roles/bypass.py |
    Tokens that the rejection rules exclude from the policy loss in the update, with rollout_correction.bypass_mode.
actor/rollout_rs_<rule>_masked_fraction | fraction of tokens | roles/bypass.py |
    Tokens that one of several rejection rules excludes from the policy loss in the update.
# validation
val/reward/mean | score | trainer/validate.py | Mean reward over all responses.
val-core/<source>/reward/mean | score | trainer/validate.py |
    Mean reward over the responses to prompts of the data source.
val-core/<source>/{reward,acc}/mean@<n> | score | algorithms/at_n.py |
    Mean over the n responses to a prompt, averaged over prompts.
val-core/<source>/{reward,acc}/{best,maj}@<n>/mean | score | algorithms/at_n.py |
    Best of the n responses to a prompt, and majority vote among them, averaged over prompts.
val-aux/<source>/<value>/mean@<n> | | algorithms/at_n.py |
    Mean of another value over the n responses to a prompt, averaged over prompts.
val-aux/<source>/<value>/std@<n> | | algorithms/at_n.py |
    Standard deviation over the n responses to a prompt, averaged over prompts.
val-aux/<source>/<value>/{best,worst,maj}@<k>/mean | | algorithms/at_n.py |
    Expected best, worst and majority vote of k of the n responses to a prompt, averaged over prompts.
val-aux/response_length/mean | tokens | trainer/validate.py | Response length.
val-aux/agent/unplayed | episodes | trainer/validate.py |
    Validation episodes without a score, because the environment failed or the prompt is too long after reset. All other
    validation metrics of scores leave them out; @k metrics are averaged over prompts with k scores.
val-aux/reward/{errors,invalid,timeouts,crashes,slow,model/truncated} | responses | trainer/validate.py |
    Same as reward/..., for the validation responses.
val-aux/reward/<function>/{scored,failed} | responses | trainer/validate.py |
    Same as reward/<function>/..., for the validation responses.
# times and speed
timing_s/{sync,gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor} | seconds | trainer/ppo.py |
    Time that the step waited for this phase; `sync` is the weight sync. Roles in separate resource pools run
    concurrently, and the reward function scores the responses of a rank as soon as they are generated.
timing_s/{gen_max,reward_max} | seconds | trainer/ppo.py | Time to generate and score the baseline responses of ReMax.
timing_s/reward_call_max | seconds | rewards/manager.py | Duration of the slowest call of the reward function.
timing_s/sync_check | seconds | reshard/hybrid.py | Duration of the weight check, which is a part of the weight sync.
timing/at | Unix seconds | tracking/run_folder.py | Time at which the step was logged. Only in `metrics.jsonl`.
timing/generated | Unix seconds | roles/rollout.py |
    Time at which the last rank of the rollout had generated the batch, in asynchronous training.
timing/received | Unix seconds | trainer/async_ppo.py |
    Time at which the step had its batch, in asynchronous training. With the times of the phases, it gives the lanes of
    the run page.
timing_s/step | seconds | trainer/metrics.py | Duration of the step, without validation and saving.
perf/total_num_tokens | tokens | trainer/metrics.py | Prompt and response tokens of the step.
perf/throughput | tokens/second | trainer/metrics.py |
    Prompt and response tokens divided by the duration of the step, summed over all ranks.
perf/rollout_tokens_per_second | tokens/second | roles/rollout.py |
    Generated tokens divided by the time of generation without weight sync, summed over the data-parallel ranks.
perf/reward_processes | processes | rewards/manager.py |
    Processes that reward functions have started and left running, such as servers. A number that grows is a leak.
perf/sync_peak_memory_bytes | bytes | reshard/hybrid.py |
    Peak memory of a process up to the end of the weight sync: of device tensors or, on a CPU, resident memory.
    Maximum over ranks.
perf/rank_seconds/<pool>/{mean,max} | seconds | trainer/metrics.py |
    Time for which a rank has executed calls since the last step: mean and maximum over the ranks of a pool of several.
perf/slowest_rank/<pool> | rank | trainer/metrics.py | Rank with this maximum.
"""
_MODEL = """
train/padding | 1 | engine/micro_batches.py |
    Fraction of the computed tokens that are padding, for models that run on right-padded rows. The value of rank 0.
train/moe/max_vio | 1 | engine/routing.py |
    Load of the busiest expert of a layer above the mean load, as a fraction of the mean, averaged over layers. 0
    means balanced experts.
train/moe/avg_vio | 1 | engine/routing.py |
    Absolute deviation of an expert's load from the mean load of its layer, as a fraction of the mean, averaged over
    experts and layers.
train/moe/aux_loss | 1 | engine/routing.py |
    Load-balancing loss without its coefficient (router_aux_loss_coef). It equals the number of experts per token if
    the experts are balanced.
train/moe/z_loss | 1 | engine/megatron/routing.py |
    Mean square of the logarithm of the routers' sums of exponentials, summed over layers. Engine `megatron` only.
train/moe/router_entropy | nats | engine/routing.py | Mean entropy of the router's distribution over the experts.
"""
"""Metrics of some model families, over all tokens of a mini-batch."""
_SFT = """
train/loss | nats | roles/sft.py |
    Mean cross-entropy of the trained tokens, plus the load-balancing loss of a mixture of experts times
    router_aux_loss_coef.
val/loss | nats | trainer/supervised.py | Mean cross-entropy of the trained tokens in the validation data.
"""
_RM = """
train/loss | nats | roles/supervised.py |
    Mean loss of the pairs, including the centering term, plus the load-balancing loss of a mixture of experts times
    router_aux_loss_coef.
val/loss | nats | algorithms/preference.py | Mean loss of the pairs, including the centering term.
{train,val}/accuracy | fraction of pairs | algorithms/preference.py |
    Pairs in which the chosen response has the higher score.
{train,val}/margin | score | algorithms/preference.py | Mean difference of the chosen and the rejected score.
{train,val}/chosen_reward | score | algorithms/preference.py | Mean score of the chosen responses.
{train,val}/rejected_reward | score | algorithms/preference.py | Mean score of the rejected responses.
"""
_SUPERVISED = """
train/grad_norm | | roles/supervised.py | Gradient norm before clipping.
train/lr | 1 | roles/supervised.py | Learning rate of the step.
train/skipped_steps | steps | roles/supervised.py |
    1 if the step was skipped because the gradient was not finite, else 0.
timing_s/step | seconds | trainer/supervised.py | Duration of the step.
timing_s/train | seconds | trainer/supervised.py | Time of the forward and backward passes and of the optimizer step.
timing_s/validate | seconds | trainer/supervised.py | Duration of the validation after the step.
timing/at | Unix seconds | tracking/run_folder.py | Time at which the step was logged. Only in `metrics.jsonl`.
perf/throughput | tokens/second | trainer/supervised.py | Tokens of the batch divided by the duration of the step.
perf/rank_seconds/<pool>/{mean,max} | seconds | trainer/metrics.py |
    Time for which a rank has executed calls since the last step: mean and maximum over the ranks of a pool of several.
perf/slowest_rank/<pool> | rank | trainer/metrics.py | Rank with this maximum.
"""

_SERVE = """
train/loss | | service/history.py |
    Sum of the losses of all tokens since the last step, in all calls of forward_backward. It is a sum, as clients see
    it.
train/loss_per_token | | service/history.py | train/loss divided by train/tokens.
train/{calls,rows,tokens} | | service/history.py |
    Calls of forward_backward, datums and target tokens since the last step. The SDK splits large calls.
train/lr | 1 | service/history.py | Learning rate of the step.
train/grad_norm | | service/history.py | Gradient norm before clipping.
train/command | | service/history.py | Number of the command in the session of the client.
timing_s/step | seconds | service/history.py |
    Time since the last step of the model. The parts of it are those of the session of its client.
timing_s/train | seconds | service/history.py | Time in which training commands of the session were executed.
timing_s/sample | seconds | service/history.py |
    Time in which samples of the session were generated: its share of the rows of a batch.
timing_s/queue | seconds | service/history.py |
    Time in which commands or samples of the session waited, mostly for other clients. It is a lower bound if they were
    executed at the same time (`sampling_ranks`).
timing_s/client | seconds | service/history.py | Time in which the server had nothing to do for the client.
timing/at | Unix seconds | tracking/run_folder.py | Time at which the step was logged. Only in `metrics.jsonl`.
perf/throughput | tokens/second | service/history.py | Target tokens divided by the time of the step.
"""

METRICS = (
    *_table("ppo", _LEARNING + _MODEL.replace("train/", "{actor,critic}/") + _GENERATION),
    *_table("sft", _MODEL + _SFT + _SUPERVISED),
    *_table("rm", _MODEL + _RM + _SUPERVISED),
    *_table("serve", _SERVE),
)

SCREEN: dict[str, tuple[str, ...]] = {
    "reward": ("critic/score/mean", "reward/mean"),
    "loss": ("train/loss",),
    "accuracy": ("train/accuracy",),
    "val": ("val/reward/mean", "val/accuracy", "val/loss"),
    "kl penalty": ("actor/reward_kl_penalty",),
    "kl loss": ("actor/kl_loss",),
    "length": ("response_length/mean",),
    "clipped": ("response_length/clip_ratio",),
    "grad": ("actor/grad_norm", "train/grad_norm"),
    "tok/s": ("perf/throughput",),
    "policy kl": ("actor/ppo_kl",),
}
"""Maps each word on the line of a step to metrics, of which the first available one is shown. If the line is too
narrow, the last words are omitted."""

LEGEND = """\
`{mean,max}` lists alternatives. `<source>` is a data source, `<value>` is `reward`, `score` or a number that the reward
function returns, `<function>` is the name of one of several reward functions, `<rule>` is a value of `rollout_rs`,
`<n>` is `actor_rollout_ref.rollout.val_kwargs.n`, `<k>` are the powers of 2 below n, and n, `<age>` is a number of
versions, and `<pool>` is the name of a resource pool.
"""

_PLACEHOLDERS = {
    "source": ".+",
    "value": "[^/]+(/[^/]+)?",
    "function": "[^/]+",
    "rule": "(token|seq_(sum|mean|max))_k[123]",
    "n": r"\d+",
    "k": r"\d+",
    "age": r"\d+",
    "pool": "[^/]+",
}


def matches(pattern: str, name: str) -> bool:
    """Return True if `name` matches `pattern`, which can contain placeholders such as `<source>`."""
    parts = re.split(r"<(\w+)>", pattern)
    return bool(re.fullmatch("".join(_PLACEHOLDERS[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)), name))


def find(name: str, trainer: str | None = None) -> Metric:
    """Return the table entry of a logged metric; raise ConfigError if there is none."""
    candidates = [metric for metric in METRICS if trainer in (None, metric.trainer)]
    for metric in candidates:
        if any(name == pattern or matches(pattern, name) for pattern in (metric.name, *metric.names())):
            return metric
    suggestions = get_close_matches(name, [name for metric in candidates for name in metric.names()], n=3)
    hint = f" Nearest: {', '.join(suggestions)}." if suggestions else ""
    raise ConfigError(f"unknown metric '{name}'.{hint} docs/metrics.md and `camshaft metrics docs` list all metrics")


def explain(name: str) -> str:
    """Describe a metric with its unit and source, a word on the line of a step, or the metrics that contain a text."""
    if name in SCREEN:
        logged = [metric for metric in METRICS if set(metric.names()) & set(SCREEN[name])]
        heading = f"'{name}' on the line of a step is the first of these metrics that the run logs:"
        return "\n\n".join([heading, *map(_description, logged)])
    if found := [] if "/" in name else search(name):
        lines = [f"  {metric.name}\n      {metric.description}" for metric in found]
        return "\n".join([f"no metric is called '{name}'; {len(found)} contain it:", *lines])
    return _description(find(name))


def search(text: str) -> list[Metric]:
    """Return the metrics whose names or descriptions contain words that start with each word of a text."""
    words = [re.compile(rf"(?<![a-z]){re.escape(word)}") for word in re.findall(r"\w+", text.lower())]
    found = {metric.name: metric for metric in METRICS if _matches_all(words, f"{metric.name} {metric.description}")}
    in_name = [metric for metric in found.values() if _matches_all(words, metric.name)]
    return in_name or list(found.values())


def _matches_all(words: Sequence[re.Pattern[str]], text: str) -> bool:
    return bool(words) and all(word.search(text.lower()) for word in words)


def _description(metric: Metric) -> str:
    rows = [("unit", metric.unit), ("trainer", f"camshaft {metric.trainer}"), ("source", f"camshaft/{metric.source}")]
    lines = [f"  {label:<8}  {text}" for label, text in rows if text]
    return "\n".join([metric.name, f"  {metric.description}", "", *lines])


def reference_page() -> str:
    """Return a Markdown page that describes all metrics."""
    parts = [
        "# Metrics\n",
        "Generated by `camshaft metrics docs`. [Tracking](tracking.md) describes the trackers that receive them.\n",
        LEGEND,
    ]
    for trainer in ("ppo", "sft", "rm", "serve"):
        parts += [f"## `camshaft {trainer}`\n", "| metric | unit | description | source |\n|---|---|---|---|"]
        for metric in METRICS:
            if metric.trainer == trainer:
                cells = [f"`{metric.name}`", metric.unit, metric.description, f"`{metric.source}`"]
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)
