"""Table of all metrics: names, units, descriptions and sources.

    find("val-core/gsm8k/acc/mean@8").description
    reference_page()                              # `camshaft metrics docs` writes it to docs/metrics.md

`LEGEND` explains the placeholders in names. A test compares the table with the metrics that runs log, in both
directions.
"""

import re
from collections.abc import Iterator
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
    trainer: str = "ppo"

    def names(self) -> Iterator[str]:
        """Yield all names that the alternatives in braces describe."""
        parts = re.split(r"\{(.*?)\}", self.name)
        for combination in product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))):
            yield "".join(combination)


SPREAD = "{mean,max,min}"
"""Statistics over all rows or tokens, of all ranks."""
_UPDATE = "{actor,critic}"
_PAIRS = "{train,val}"


def _routing(section: str, trainer: str = "ppo") -> tuple[Metric, ...]:
    """Return the metrics of the routers of a mixture of experts, over all tokens of a mini-batch."""
    rows = (
        (
            "max_vio",
            "Load of the busiest expert of a layer above the mean load, as a fraction of the mean, averaged over "
            "layers. 0 means balanced experts.",
        ),
        (
            "avg_vio",
            "Absolute deviation of an expert's load from the mean load of its layer, as a fraction of the mean, "
            "averaged over experts and layers.",
        ),
        (
            "aux_loss",
            "Load-balancing loss without its coefficient (router_aux_loss_coef). It equals the number of experts "
            "per token if the experts are balanced.",
        ),
        ("router_entropy", "Mean entropy of the router's distribution over the experts."),
    )
    return tuple(
        Metric(f"{section}/moe/{name}", "nats" if "entropy" in name else "1", description, "engine/routing.py", trainer)
        for name, description in rows
    )


METRICS = (
    # -- rewards and advantages
    Metric(
        f"critic/score/{SPREAD}",
        "score",
        "Score of a response, which is the sum of its token-level scores.",
        "trainer/metrics.py",
    ),
    Metric(
        "critic/score/{p10,p50,p90}",
        "score",
        "Quantiles of the scores: 10 %, 50 % (the median) and 90 % of the responses have at most this score.",
        "trainer/metrics.py",
    ),
    Metric(
        "critic/score/<source>/mean",
        "score",
        "Mean score of the responses to prompts of the data source.",
        "trainer/metrics.py",
    ),
    Metric(
        "groups/same_share",
        "fraction of groups",
        "Groups (the responses to one prompt) whose scores are all equal, so that a group-relative advantage has no "
        "signal. Logged if a prompt has several responses.",
        "trainer/metrics.py",
    ),
    Metric(
        f"critic/rewards/{SPREAD}",
        "score",
        "Reward of a response, which is its score minus the KL penalty.",
        "trainer/metrics.py",
    ),
    Metric(f"critic/advantages/{SPREAD}", "", "Advantages of the response tokens.", "trainer/metrics.py"),
    Metric(f"critic/returns/{SPREAD}", "score", "Returns of the response tokens.", "trainer/metrics.py"),
    Metric(
        f"critic/values/{SPREAD}",
        "score",
        "Values that the critic predicts for the response tokens.",
        "trainer/metrics.py",
    ),
    Metric(
        "critic/vf_explained_var",
        "1",
        "Explained variance of the critic, 1 - Var(returns - values) / Var(returns). 1 means perfect "
        "predictions; a constant prediction gives 0.",
        "trainer/metrics.py",
    ),
    Metric(
        "reward/{errors,invalid,timeouts,crashes}",
        "responses",
        "Responses with a failed call of a reward function, by the kind of the first failure: exceptions, "
        "invalid scores (not finite, or above max_abs_score in absolute value), timeouts, and crashes of the scoring "
        "process.",
        "rewards/manager.py",
    ),
    Metric(
        "reward/slow",
        "responses",
        "Calls of the reward function that took more than half of the time limit.",
        "rewards/manager.py",
    ),
    Metric(
        "reward/model/mean",
        "score",
        "Mean score of the reward model, before multiplication by reward_model.weight.",
        "rewards/combined.py",
    ),
    Metric(
        "reward/model/truncated",
        "responses",
        "Sequences that were truncated to reward_model.max_length.",
        "rewards/combined.py",
    ),
    Metric(
        "reward/function/mean",
        "score",
        "Mean score of the reward function in runs that also have a reward model.",
        "rewards/combined.py",
    ),
    Metric(
        "reward/overlong/mean", "fraction of responses", "Responses with an overlong penalty.", "rewards/overlong.py"
    ),
    Metric(
        "reward/overlong_reward/mean", "score", "Mean overlong penalty, which is 0 or negative.", "rewards/overlong.py"
    ),
    Metric(
        "reward/<value>/mean",
        "",
        "Mean of a number that the reward function returns in its dict.",
        "rewards/manager.py",
    ),
    Metric(
        "reward/<function>/{std,min,max}",
        "score",
        "Scores of one of several reward functions, before multiplication by its weight, over the responses that it "
        "scored. reward/<function>/mean is their mean.",
        "rewards/manager.py",
    ),
    Metric(
        "reward/<function>/{scored,failed}",
        "responses",
        "Responses that one of several reward functions scored, and failed calls of this function. It returned None "
        "for the remaining responses.",
        "rewards/manager.py",
    ),
    Metric("baseline/score/mean", "score", "Mean score of the greedy baseline responses of ReMax.", "trainer/ppo.py"),
    Metric(
        "baseline/{errors,invalid,timeouts,crashes,slow,model/truncated}",
        "responses",
        "Same as reward/..., for the baseline responses.",
        "trainer/ppo.py",
    ),
    Metric("baseline/<value>/mean", "", "Same as reward/<value>/mean, for the baseline responses.", "trainer/ppo.py"),
    Metric(
        "baseline/<function>/{std,min,max,scored,failed}",
        "",
        "Same as reward/<function>/..., for the baseline responses.",
        "trainer/ppo.py",
    ),
    # -- dynamic sampling
    Metric(
        "train/num_gen_batches", "batches", "Generation batches that the step required.", "trainer/dynamic_sampling.py"
    ),
    Metric(
        "filter_groups/same_share",
        "fraction of prompts",
        "Generated prompts whose responses all have the same value of the filter metric. They are dropped, or given "
        "back if they follow the last prompt that the step uses.",
        "trainer/dynamic_sampling.py",
    ),
    Metric(
        "filter_groups/given_back",
        "prompts",
        "Unused prompts after the last one that the step uses. The next step uses them first if they fill a "
        "batch together with the remaining rows of the epoch.",
        "trainer/dynamic_sampling.py",
    ),
    Metric(
        "filter_groups/<value>/mean",
        "",
        "Mean of the value that prompts are filtered by, over all generated responses.",
        "trainer/dynamic_sampling.py",
    ),
    # -- updates
    Metric("actor/pg_loss", "", "Policy loss, aggregated with loss_agg_mode.", "roles/actor.py"),
    Metric("actor/pg_clipfrac", "fraction of tokens", "Tokens whose policy loss is clipped.", "algorithms/losses.py"),
    Metric(
        "actor/pg_clipfrac_lower",
        "fraction of tokens",
        "Tokens whose policy loss is limited by the dual clip.",
        "algorithms/losses.py",
    ),
    Metric("actor/ppo_kl", "nats", "Mean of log pi_old - log pi over the response tokens.", "algorithms/losses.py"),
    Metric("actor/entropy", "nats", "Mean entropy of the policy over the response tokens.", "trainer/metrics.py"),
    Metric("actor/kl_loss", "nats", "KL loss with respect to the reference policy (use_kl_loss).", "roles/actor.py"),
    Metric(
        "actor/reward_kl_penalty",
        "nats",
        "Mean KL divergence from the reference policy in the reward, averaged over responses.",
        "trainer/advantages.py",
    ),
    Metric(
        "actor/reward_kl_penalty_coeff",
        "1",
        "Coefficient of the KL penalty in the reward (kl_ctrl).",
        "trainer/advantages.py",
    ),
    Metric("critic/vf_loss", "score^2", "Value loss.", "roles/critic.py"),
    Metric("critic/vf_clipfrac", "fraction of tokens", "Tokens whose value loss is clipped.", "algorithms/losses.py"),
    Metric(
        "critic/vpred_mean",
        "score",
        "Mean of the values that the critic predicts during the update.",
        "algorithms/losses.py",
    ),
    Metric(
        f"{_UPDATE}/grad_norm",
        "",
        "Mean gradient norm before clipping, over the optimizer steps of the iteration.",
        "roles/base.py",
    ),
    Metric(f"{_UPDATE}/lr", "1", "Learning rate of the update.", "roles/base.py"),
    Metric(
        f"{_UPDATE}/skipped_steps",
        "steps",
        "Optimizer steps that were skipped because the gradient was not finite.",
        "roles/base.py",
    ),
    *_routing(_UPDATE),
    # -- lengths
    Metric(f"response_length/{SPREAD}", "tokens", "Response length.", "trainer/metrics.py"),
    Metric(
        "response_length/clip_ratio",
        "fraction of responses",
        "Responses that reached the maximum length without finishing.",
        "trainer/metrics.py",
    ),
    Metric(f"prompt_length/{SPREAD}", "tokens", "Prompt length.", "trainer/metrics.py"),
    # -- generation
    Metric(
        "rollout/prompt_tokens_computed",
        "tokens",
        "Prompt tokens that the rollout computed, including padding (hf only).",
        "rollout/builtin/scheduler.py",
    ),
    Metric(
        "rollout/prompt_tokens_cached",
        "tokens",
        "Prompt tokens that the rollout read from its prefix cache.",
        "rollout/external.py",
    ),
    Metric("rollout/response_tokens", "tokens", "Generated tokens.", "rollout/builtin/scheduler.py"),
    Metric(
        "rollout/decode_steps", "steps", "Decode steps of the rollouts torch and hf.", "rollout/builtin/scheduler.py"
    ),
    Metric(
        "rollout/rows_decoded",
        "rows",
        "Active sequences, summed over the decode steps.",
        "rollout/builtin/scheduler.py",
    ),
    Metric(
        "rollout/slot_use",
        "fraction",
        "Mean fraction of KV cache slots in use, over the decode steps.",
        "rollout/builtin/scheduler.py",
    ),
    Metric(
        "rollout/http_retries",
        "requests",
        "HTTP requests that the server rollout retried.",
        "rollout/server/rollout.py",
    ),
    Metric(
        "rollout/sync_bytes", "bytes", "Size of the weights that were sent in the weight sync.", "reshard/hybrid.py"
    ),
    # -- generator against trainer
    Metric(
        "rollout/log_prob_diff_{max,mean}",
        "nats",
        "Absolute difference |log pi_train - log pi_rollout| of the tokens.",
        "algorithms/mismatch.py",
    ),
    Metric(
        "rollout/log_prob_diff_above_0.1",
        "fraction of tokens",
        "Tokens with an absolute log-prob difference above 0.1.",
        "algorithms/mismatch.py",
    ),
    Metric("rollout/kl_{k1,k3}", "nats", "KL(rollout || train), estimated with k1 and k3.", "algorithms/mismatch.py"),
    Metric(
        "rollout/effective_sample_share",
        "fraction of responses",
        "Relative effective sample size with sequence-level importance weights.",
        "algorithms/mismatch.py",
    ),
    Metric(
        "rollout/routing_mismatch",
        "fraction of choices",
        "Expert choices of the trainer's routers that differ from those of the rollout, over all layers.",
        "trainer/metrics.py",
    ),
    Metric(
        "rollout/routing_mismatch_tokens",
        "fraction of tokens",
        "Tokens for which the expert choices of trainer and rollout differ in at least one layer.",
        "trainer/metrics.py",
    ),
    Metric("rollout_corr/rollout_is_{mean,max,min}", "1", "Importance weights of the tokens.", "trainer/advantages.py"),
    Metric(
        "rollout_corr/rollout_is_eff_sample_size",
        "fraction of tokens",
        "Relative effective sample size with these weights.",
        "trainer/advantages.py",
    ),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_high",
        "fraction of tokens",
        "Tokens whose importance ratio exceeds the threshold.",
        "trainer/advantages.py",
    ),
    Metric(
        "rollout_corr/rollout_rs_masked_fraction",
        "fraction of tokens",
        "Tokens that the rejection rules mask out.",
        "trainer/advantages.py",
    ),
    Metric(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "fraction of responses",
        "Responses in which the rejection rules mask out tokens.",
        "trainer/advantages.py",
    ),
    # -- validation
    Metric("val/reward/mean", "score", "Mean reward over all responses.", "trainer/validate.py"),
    Metric(
        "val-core/<source>/reward/mean",
        "score",
        "Mean reward over the responses to prompts of the data source.",
        "trainer/validate.py",
    ),
    Metric(
        "val-core/<source>/{reward,acc}/mean@<n>",
        "score",
        "Mean over the n responses to a prompt, averaged over prompts.",
        "algorithms/at_n.py",
    ),
    Metric(
        "val-core/<source>/{reward,acc}/{best,maj}@<n>/mean",
        "score",
        "Best of the n responses to a prompt, and majority vote among them, averaged over prompts.",
        "algorithms/at_n.py",
    ),
    Metric(
        "val-aux/<source>/<value>/mean@<n>",
        "",
        "Mean of another value over the n responses to a prompt, averaged over prompts.",
        "algorithms/at_n.py",
    ),
    Metric(
        "val-aux/<source>/<value>/std@<n>",
        "",
        "Standard deviation over the n responses to a prompt, averaged over prompts.",
        "algorithms/at_n.py",
    ),
    Metric(
        "val-aux/<source>/<value>/{best,worst,maj}@<k>/mean",
        "",
        "Expected best, worst and majority vote of k of the n responses to a prompt, averaged over prompts.",
        "algorithms/at_n.py",
    ),
    Metric("val-aux/response_length/mean", "tokens", "Response length.", "trainer/validate.py"),
    Metric(
        "val-aux/reward/{errors,invalid,timeouts,crashes,slow,model/truncated}",
        "responses",
        "Same as reward/..., for the validation responses.",
        "trainer/validate.py",
    ),
    Metric(
        "val-aux/reward/<function>/{scored,failed}",
        "responses",
        "Same as reward/<function>/..., for the validation responses.",
        "trainer/validate.py",
    ),
    # -- times and speed
    Metric(
        "timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor}",
        "seconds",
        "Time that the step waited for this phase. Roles in separate resource pools run concurrently, and the reward "
        "function scores the responses of a rank as soon as they are generated.",
        "trainer/ppo.py",
    ),
    Metric(
        "timing_s/{gen_max,reward_max}",
        "seconds",
        "Time to generate and score the baseline responses of ReMax.",
        "trainer/ppo.py",
    ),
    Metric(
        "timing_s/reward_call_max",
        "seconds",
        "Duration of the slowest call of the reward function.",
        "rewards/manager.py",
    ),
    Metric(
        "timing_s/{sync,sync_check}",
        "seconds",
        "Duration of the weight sync, and of the weight check.",
        "reshard/hybrid.py",
    ),
    Metric(
        "timing/at",
        "Unix seconds",
        "Time at which the step was logged. Only in `metrics.jsonl`.",
        "tracking/run_folder.py",
    ),
    Metric("timing_s/step", "seconds", "Duration of the step, without validation and saving.", "trainer/metrics.py"),
    Metric("perf/total_num_tokens", "tokens", "Prompt and response tokens of the step.", "trainer/metrics.py"),
    Metric(
        "perf/throughput",
        "tokens/second",
        "Prompt and response tokens divided by the duration of the step, summed over all ranks.",
        "trainer/metrics.py",
    ),
    Metric(
        "perf/rollout_tokens_per_second",
        "tokens/second",
        "Generated tokens divided by the time of weight sync and generation, summed over the data-parallel ranks.",
        "roles/rollout.py",
    ),
    Metric(
        "perf/sync_peak_memory_bytes",
        "bytes",
        "Peak memory of a process up to the end of the weight sync: of device tensors or, on a CPU, resident memory. "
        "Maximum over ranks.",
        "reshard/hybrid.py",
    ),
    # -- supervised
    *_routing("train", "sft"),
    *_routing("train", "rm"),
    Metric(
        "train/loss",
        "nats",
        "Mean cross-entropy of the trained tokens, plus the load-balancing loss of a mixture of experts times "
        "router_aux_loss_coef.",
        "roles/sft.py",
        "sft",
    ),
    Metric(
        "val/loss",
        "nats",
        "Mean cross-entropy of the trained tokens in the validation data.",
        "trainer/supervised.py",
        "sft",
    ),
    # -- reward models
    Metric(
        "train/loss",
        "nats",
        "Mean loss of the pairs, including the centering term, plus the load-balancing loss of a mixture of experts "
        "times router_aux_loss_coef.",
        "roles/supervised.py",
        "rm",
    ),
    Metric(
        "val/loss", "nats", "Mean loss of the pairs, including the centering term.", "algorithms/preference.py", "rm"
    ),
    Metric(
        f"{_PAIRS}/accuracy",
        "fraction of pairs",
        "Pairs in which the chosen response has the higher score.",
        "algorithms/preference.py",
        "rm",
    ),
    Metric(
        f"{_PAIRS}/margin",
        "score",
        "Mean difference of the chosen and the rejected score.",
        "algorithms/preference.py",
        "rm",
    ),
    Metric(f"{_PAIRS}/chosen_reward", "score", "Mean score of the chosen responses.", "algorithms/preference.py", "rm"),
    Metric(
        f"{_PAIRS}/rejected_reward", "score", "Mean score of the rejected responses.", "algorithms/preference.py", "rm"
    ),
    # -- both
    *(
        Metric(name, unit, description, source, trainer)
        for trainer in ("sft", "rm")
        for name, unit, description, source in (
            ("train/grad_norm", "", "Gradient norm before clipping.", "roles/supervised.py"),
            ("train/lr", "1", "Learning rate of the step.", "roles/supervised.py"),
            (
                "train/skipped_steps",
                "steps",
                "1 if the step was skipped because the gradient was not finite, else 0.",
                "roles/supervised.py",
            ),
            ("timing_s/step", "seconds", "Duration of the step.", "trainer/supervised.py"),
            (
                "timing/at",
                "Unix seconds",
                "Time at which the step was logged. Only in `metrics.jsonl`.",
                "tracking/run_folder.py",
            ),
            (
                "perf/throughput",
                "tokens/second",
                "Tokens of the batch divided by the duration of the step.",
                "trainer/supervised.py",
            ),
        )
    ),
)

LEGEND = """\
`{mean,max}` lists alternatives. `<source>` is a data source, `<value>` is `reward`, `score` or a number that the reward
function returns, `<function>` is the name of one of several reward functions, `<n>` is
`actor_rollout_ref.rollout.val_kwargs.n`, and `<k>` are the powers of 2 below n, and n.
"""

_PLACEHOLDERS = {"source": ".+", "value": "[^/]+(/[^/]+)?", "function": "[^/]+", "n": r"\d+", "k": r"\d+"}


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
    """Format the description, the unit and the source of a metric as text."""
    metric = find(name)
    rows = [("unit", metric.unit), ("trainer", f"camshaft {metric.trainer}"), ("source", f"camshaft/{metric.source}")]
    return "\n".join(
        [metric.name, f"  {metric.description}", "", *(f"  {label:<8}  {text}" for label, text in rows if text)]
    )


def reference_page() -> str:
    """Return a Markdown page that describes all metrics."""
    parts = [
        "# Metrics\n",
        "Generated by `camshaft metrics docs`. [Tracking](tracking.md) describes the trackers that receive them.\n",
        LEGEND,
    ]
    for trainer in ("ppo", "sft", "rm"):
        parts.append(f"## `camshaft {trainer}`\n")
        parts.append("| metric | unit | description | source |\n|---|---|---|---|")
        for metric in METRICS:
            if metric.trainer == trainer:
                cells = [f"`{metric.name}`", metric.unit, metric.description, f"`{metric.source}`"]
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)
