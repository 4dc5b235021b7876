"""Table of all metrics: names, units, descriptions and sources.

    find("val-core/gsm8k/acc/mean@8").description
    reference_page()                              # camshaft metrics docs: docs/metrics.md

`LEGEND` explains the placeholders in names. A test compares the table with the metrics of real runs: every logged
metric is in the table, and every metric in the table is logged.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product

from camshaft.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """A metric name, or several names with alternatives in braces."""

    name: str
    unit: str
    description: str
    source: str
    """The file that computes it."""
    trainer: str = "ppo"

    def names(self) -> Iterator[str]:
        """Expand the alternatives in braces."""
        parts = re.split(r"\{(.*?)\}", self.name)
        for combination in product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))):
            yield "".join(combination)


SPREAD = "{mean,max,min}"
"""Statistics over the rows or tokens of all ranks."""
_UPDATE = "{actor,critic}"
_PAIRS = "{train,val}"

METRICS = (
    # -- rewards and advantages
    Metric(
        f"critic/score/{SPREAD}",
        "score",
        "score of a response: the sum of its token-level scores",
        "trainer/metrics.py",
    ),
    Metric(
        f"critic/rewards/{SPREAD}",
        "score",
        "reward of a response: its score minus the KL penalty",
        "trainer/metrics.py",
    ),
    Metric(f"critic/advantages/{SPREAD}", "", "advantages of the response tokens", "trainer/metrics.py"),
    Metric(f"critic/returns/{SPREAD}", "score", "returns of the response tokens", "trainer/metrics.py"),
    Metric(f"critic/values/{SPREAD}", "score", "the critic's values of the response tokens", "trainer/metrics.py"),
    Metric(
        "critic/vf_explained_var",
        "1",
        "explained variance 1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 predicts only the mean",
        "trainer/metrics.py",
    ),
    Metric(
        "reward/{errors,invalid,timeouts,crashes}",
        "responses",
        "failed reward calls: exception, no finite number, timeout, process crash",
        "rewards/manager.py",
    ),
    Metric("reward/slow", "responses", "reward calls that took more than half of the time limit", "rewards/manager.py"),
    Metric(
        "reward/model/mean",
        "score",
        "mean score of the reward model, before reward_model.weight",
        "rewards/combined.py",
    ),
    Metric(
        "reward/model/truncated",
        "responses",
        "responses truncated for the reward model (max_length)",
        "rewards/combined.py",
    ),
    Metric(
        "reward/function/mean",
        "score",
        "mean score of the reward function when a reward model is used",
        "rewards/combined.py",
    ),
    Metric(
        "reward/overlong/mean", "fraction of responses", "responses with an overlong penalty", "rewards/overlong.py"
    ),
    Metric("reward/overlong_reward/mean", "score", "mean overlong penalty, 0 or negative", "rewards/overlong.py"),
    Metric("reward/<value>/mean", "", "mean of a number in the reward function's dict results", "rewards/manager.py"),
    Metric("baseline/score/mean", "score", "score of the greedy baseline responses of ReMax", "trainer/ppo.py"),
    Metric(
        "baseline/{errors,invalid,timeouts,crashes,slow}",
        "responses",
        "as in reward/, for the baseline responses",
        "trainer/ppo.py",
    ),
    Metric("baseline/<value>/mean", "", "as reward/<value>/mean, for the baseline responses", "trainer/ppo.py"),
    # -- dynamic sampling
    Metric("train/num_gen_batches", "batches", "generation batches of the step", "trainer/dynamic_sampling.py"),
    Metric(
        "filter_groups/same_share",
        "fraction of prompts",
        "prompts whose responses all have the same reward",
        "trainer/dynamic_sampling.py",
    ),
    Metric(
        "filter_groups/given_back",
        "prompts",
        "unused prompts that the next step uses first",
        "trainer/dynamic_sampling.py",
    ),
    Metric(
        "filter_groups/<value>/mean",
        "",
        "mean of the value that prompts are filtered by",
        "trainer/dynamic_sampling.py",
    ),
    # -- updates
    Metric("actor/pg_loss", "", "policy loss, aggregated by loss_agg_mode", "roles/actor.py"),
    Metric("actor/pg_clipfrac", "fraction of tokens", "tokens with an active policy clip", "algorithms/losses.py"),
    Metric("actor/pg_clipfrac_lower", "fraction of tokens", "tokens with an active dual clip", "algorithms/losses.py"),
    Metric("actor/ppo_kl", "nats", "mean of log pi_old - log pi over response tokens", "algorithms/losses.py"),
    Metric("actor/entropy", "nats", "mean entropy of the policy at response tokens", "trainer/metrics.py"),
    Metric("actor/kl_loss", "nats", "KL loss with respect to the reference (use_kl_loss)", "roles/actor.py"),
    Metric(
        "actor/reward_kl_penalty",
        "nats",
        "KL divergence from the reference in the reward, mean over responses",
        "trainer/advantages.py",
    ),
    Metric("actor/reward_kl_penalty_coeff", "1", "KL coefficient in the reward (kl_ctrl)", "trainer/advantages.py"),
    Metric("critic/vf_loss", "score^2", "value loss", "roles/critic.py"),
    Metric("critic/vf_clipfrac", "fraction of tokens", "tokens with an active value clip", "algorithms/losses.py"),
    Metric("critic/vpred_mean", "score", "mean of the predicted values during the update", "algorithms/losses.py"),
    Metric(f"{_UPDATE}/grad_norm", "", "gradient norm before clipping, mean over optimizer steps", "roles/base.py"),
    Metric(f"{_UPDATE}/lr", "1", "learning rate of the update", "roles/base.py"),
    Metric(
        f"{_UPDATE}/skipped_steps", "steps", "optimizer steps skipped because of a non-finite gradient", "roles/base.py"
    ),
    # -- lengths
    Metric(f"response_length/{SPREAD}", "tokens", "response length", "trainer/metrics.py"),
    Metric(
        "response_length/clip_ratio",
        "fraction of responses",
        "responses truncated at data.max_response_length",
        "trainer/metrics.py",
    ),
    Metric(f"prompt_length/{SPREAD}", "tokens", "prompt length", "trainer/metrics.py"),
    # -- generation
    Metric(
        "rollout/prompt_tokens_computed",
        "tokens",
        "prompt tokens computed by the generator",
        "rollout/builtin/scheduler.py",
    ),
    Metric("rollout/prompt_tokens_cached", "tokens", "prompt tokens read from the prefix cache", "rollout/external.py"),
    Metric("rollout/response_tokens", "tokens", "generated tokens", "rollout/builtin/scheduler.py"),
    Metric("rollout/decode_steps", "steps", "decode steps of the built-in generator", "rollout/builtin/scheduler.py"),
    Metric(
        "rollout/rows_decoded", "rows", "active sequences, summed over decode steps", "rollout/builtin/scheduler.py"
    ),
    Metric(
        "rollout/slot_use",
        "fraction",
        "cache slots in use, mean over decode steps",
        "rollout/builtin/scheduler.py",
    ),
    Metric(
        "rollout/http_retries", "requests", "HTTP requests retried by the server rollout", "rollout/server/rollout.py"
    ),
    Metric("rollout/sync_bytes", "bytes", "weights sent to the generator in the weight sync", "reshard/hybrid.py"),
    # -- generator against trainer
    Metric(
        "rollout/log_prob_diff_{max,mean}",
        "nats",
        "|log pi_train - log pi_rollout| per token",
        "algorithms/mismatch.py",
    ),
    Metric(
        "rollout/log_prob_diff_above_0.1",
        "fraction of tokens",
        "tokens with a difference above 0.1",
        "algorithms/mismatch.py",
    ),
    Metric("rollout/kl_{k1,k3}", "nats", "KL(rollout || train), estimators k1 and k3", "algorithms/mismatch.py"),
    Metric(
        "rollout/effective_sample_share",
        "fraction of responses",
        "effective sample size with sequence-level importance weights",
        "algorithms/mismatch.py",
    ),
    Metric("rollout_corr/rollout_is_{mean,max,min}", "1", "token-level importance weights", "trainer/advantages.py"),
    Metric(
        "rollout_corr/rollout_is_eff_sample_size",
        "fraction of tokens",
        "effective sample size with these weights",
        "trainer/advantages.py",
    ),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_high",
        "fraction of tokens",
        "importance ratios above the threshold",
        "trainer/advantages.py",
    ),
    Metric(
        "rollout_corr/rollout_rs_masked_fraction",
        "fraction of tokens",
        "tokens masked by rejection",
        "trainer/advantages.py",
    ),
    Metric(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "fraction of responses",
        "responses with masked tokens",
        "trainer/advantages.py",
    ),
    # -- validation
    Metric("val/reward/mean", "score", "mean over all responses", "trainer/validate.py"),
    Metric("val-core/<source>/reward/mean", "score", "mean over the responses of a data source", "trainer/validate.py"),
    Metric(
        "val-core/<source>/{reward,acc}/mean@<n>",
        "score",
        "mean over the n responses to a prompt",
        "algorithms/at_n.py",
    ),
    Metric(
        "val-core/<source>/{reward,acc}/{best,maj}@<n>/mean",
        "score",
        "best of the n responses, and majority vote",
        "algorithms/at_n.py",
    ),
    Metric("val-aux/<source>/<value>/mean@<n>", "", "mean over the n responses of another value", "algorithms/at_n.py"),
    Metric("val-aux/<source>/<value>/std@<n>", "", "standard deviation over the n responses", "algorithms/at_n.py"),
    Metric(
        "val-aux/<source>/<value>/{best,worst,maj}@<k>/mean",
        "",
        "expected best, worst and majority vote of k of the n responses",
        "algorithms/at_n.py",
    ),
    Metric("val-aux/response_length/mean", "tokens", "response length", "trainer/validate.py"),
    Metric(
        "val-aux/reward/{errors,invalid,timeouts,crashes,slow}", "responses", "as in reward/", "trainer/validate.py"
    ),
    Metric("val-aux/reward/model/truncated", "responses", "as in reward/model/", "trainer/validate.py"),
    # -- times and speed
    Metric(
        "timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor}",
        "seconds",
        "time that the step waited for this phase; roles in separate resource pools, and reward functions from the "
        "first"
        " rank's responses on, run concurrently",
        "trainer/ppo.py",
    ),
    Metric("timing_s/{gen_max,reward_max}", "seconds", "time of the baseline responses of ReMax", "trainer/ppo.py"),
    Metric("timing_s/reward_call_max", "seconds", "slowest call of the reward function", "rewards/manager.py"),
    Metric("timing_s/{sync,sync_check}", "seconds", "weight sync, and weight check", "reshard/hybrid.py"),
    Metric("timing_s/step", "seconds", "whole step, without validation and saving", "trainer/metrics.py"),
    Metric("perf/total_num_tokens", "tokens", "prompt and response tokens of the step", "trainer/metrics.py"),
    Metric(
        "perf/throughput", "tokens/second", "total tokens divided by the step time, all ranks", "trainer/metrics.py"
    ),
    Metric(
        "perf/rollout_tokens_per_second", "tokens/second", "generated tokens per second, all ranks", "roles/rollout.py"
    ),
    Metric(
        "perf/sync_peak_memory_bytes",
        "bytes",
        "peak memory during the weight sync, maximum over ranks",
        "reshard/hybrid.py",
    ),
    # -- supervised
    Metric("train/loss", "nats", "cross-entropy per trained token", "roles/sft.py", "sft"),
    Metric("val/loss", "nats", "cross-entropy per trained token of the validation rows", "trainer/sft.py", "sft"),
    # -- reward models
    Metric(f"{_PAIRS}/loss", "nats", "mean over pairs, including the centering term", "algorithms/preference.py", "rm"),
    Metric(
        f"{_PAIRS}/accuracy",
        "fraction of pairs",
        "pairs whose chosen response has the higher score",
        "algorithms/preference.py",
        "rm",
    ),
    Metric(f"{_PAIRS}/margin", "score", "mean of chosen score minus rejected score", "algorithms/preference.py", "rm"),
    Metric(f"{_PAIRS}/chosen_reward", "score", "mean score of chosen responses", "algorithms/preference.py", "rm"),
    Metric(f"{_PAIRS}/rejected_reward", "score", "mean score of rejected responses", "algorithms/preference.py", "rm"),
    # -- both
    *(
        Metric(name, unit, description, source, trainer)
        for trainer in ("sft", "rm")
        for name, unit, description, source in (
            ("train/grad_norm", "", "gradient norm before clipping", "roles/supervised.py"),
            ("train/lr", "1", "learning rate of the step", "roles/supervised.py"),
            ("train/skipped_steps", "steps", "1 if the gradient was not finite", "roles/supervised.py"),
            ("timing_s/step", "seconds", "whole step", "trainer/supervised.py"),
            (
                "perf/throughput",
                "tokens/second",
                "tokens of the batch divided by the step time",
                "trainer/supervised.py",
            ),
        )
    ),
)

LEGEND = """\
`{mean,max}` lists alternatives. `<source>` is a data source, `<value>` is `reward` or a number that the reward function
returns, `<n>` is `actor_rollout_ref.rollout.val_kwargs.n`, and `<k>` is 2, 4, 8, ... up to n.
"""

_PLACEHOLDERS = {"source": ".+", "value": "[^/]+", "n": r"\d+", "k": r"\d+"}


def matches(pattern: str, name: str) -> bool:
    """Return True if `name` matches a pattern with placeholders."""
    parts = re.split(r"<(\w+)>", pattern)
    return bool(re.fullmatch("".join(_PLACEHOLDERS[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)), name))


def find(name: str, trainer: str | None = None) -> Metric:
    """Return the first table entry that matches a logged name."""
    candidates = [metric for metric in METRICS if trainer in (None, metric.trainer)]
    for metric in candidates:
        if any(name == pattern or matches(pattern, name) for pattern in (metric.name, *metric.names())):
            return metric
    close = get_close_matches(name, [name for metric in candidates for name in metric.names()], n=3)
    hint = f" Nearest: {', '.join(close)}." if close else ""
    raise ConfigError(f"unknown metric '{name}'.{hint} docs/metrics.md and `camshaft metrics docs` list all metrics")


def explain(name: str) -> str:
    """Describe a metric as text."""
    metric = find(name)
    rows = [("unit", metric.unit), ("trainer", f"camshaft {metric.trainer}"), ("source", f"camshaft/{metric.source}")]
    return "\n".join(
        [metric.name, f"  {metric.description}", "", *(f"  {label:<8}  {text}" for label, text in rows if text)]
    )


def reference_page() -> str:
    """Return the table as a Markdown page."""
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
