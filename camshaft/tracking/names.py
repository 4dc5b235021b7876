"""What is logged: THE table of metric names.

    find("val-core/gsm8k/acc/mean@8").meaning
    reference_page()                              # camshaft metrics docs: docs/metrics.md

What stands for what in a name is said in `LEGEND`. A test holds the table to what runs log: all of it is here, and all
that is here is logged.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product

from camshaft.errors import ConfigError


@dataclass(frozen=True)
class Metric:
    """One name, or several that differ by what stands in braces."""

    name: str
    unit: str
    meaning: str
    source: str
    """The file that computes it."""
    trainer: str = "ppo"

    def names(self) -> Iterator[str]:
        """With each of the words in braces."""
        parts = re.split(r"\{(.*?)\}", self.name)
        for chosen in product(*(part.split(",") if i % 2 else [part] for i, part in enumerate(parts))):
            yield "".join(chosen)


SPREAD = "{mean,max,min}"
"""Over the rows, or over the tokens, of all ranks."""
_UPDATE = "{actor,critic}"
_PAIRS = "{train,val}"

METRICS = (
    # -- rewards and advantages
    Metric(f"critic/score/{SPREAD}", "score", "of a response: the sum of its tokens' scores", "trainer/metrics.py"),
    Metric(f"critic/rewards/{SPREAD}", "score", "of a response: its score less the KL penalty", "trainer/metrics.py"),
    Metric(f"critic/advantages/{SPREAD}", "", "advantages of the response tokens", "trainer/metrics.py"),
    Metric(f"critic/returns/{SPREAD}", "score", "returns of the response tokens", "trainer/metrics.py"),
    Metric(f"critic/values/{SPREAD}", "score", "the critic's values of the response tokens", "trainer/metrics.py"),
    Metric(
        "critic/vf_explained_var",
        "1",
        "1 - Var(returns - values) / Var(returns): 1 is a perfect critic, 0 one that knows the mean alone",
        "trainer/metrics.py",
    ),
    Metric(
        "reward/{errors,invalid,timeouts,crashes}",
        "responses",
        "that the reward function failed on: it raised, gave no number, took too long, its process died",
        "rewards/manager.py",
    ),
    Metric("reward/slow", "responses", "that took more than half of the time limit", "rewards/manager.py"),
    Metric(
        "reward/model/mean", "score", "what the reward model gave, before reward_model.weight", "rewards/combined.py"
    ),
    Metric(
        "reward/model/truncated", "responses", "that were cut for the reward model (max_length)", "rewards/combined.py"
    ),
    Metric("reward/function/mean", "score", "what the function gave, beside a reward model", "rewards/combined.py"),
    Metric("reward/overlong/mean", "share of responses", "with a penalty for their length", "rewards/overlong.py"),
    Metric("reward/overlong_reward/mean", "score", "that penalty, 0 or below", "rewards/overlong.py"),
    Metric("reward/<value>/mean", "", "a number of the function's dict results", "rewards/manager.py"),
    Metric("baseline/score/mean", "score", "of the greedy responses that ReMax compares with", "trainer/remax.py"),
    Metric(
        "baseline/{errors,invalid,timeouts,crashes,slow}", "responses", "as in reward/, of these", "trainer/remax.py"
    ),
    Metric("baseline/<value>/mean", "", "as reward/<value>/mean, of these", "trainer/remax.py"),
    # -- dynamic sampling
    Metric("train/num_gen_batches", "batches", "of prompts that the step generated for", "trainer/dynamic_sampling.py"),
    Metric(
        "filter_groups/same_share",
        "share of prompts",
        "whose responses are all worth the same",
        "trainer/dynamic_sampling.py",
    ),
    Metric("filter_groups/given_back", "prompts", "that were not needed and come again", "trainer/dynamic_sampling.py"),
    Metric("filter_groups/<value>/mean", "", "what prompts are filtered by", "trainer/dynamic_sampling.py"),
    # -- updates
    Metric("actor/pg_loss", "", "policy loss, as loss_agg_mode puts it together", "roles/actor.py"),
    Metric("actor/pg_clipfrac", "share of tokens", "where the clip raised the loss", "algorithms/losses.py"),
    Metric("actor/pg_clipfrac_lower", "share of tokens", "where the dual clip bounded it", "algorithms/losses.py"),
    Metric("actor/ppo_kl", "nats", "mean of log pi_old - log pi of the response tokens", "algorithms/losses.py"),
    Metric("actor/entropy", "nats", "mean entropy of the policy at response tokens", "trainer/metrics.py"),
    Metric("actor/kl_loss", "nats", "distance to the reference in the loss (use_kl_loss)", "roles/actor.py"),
    Metric("actor/reward_kl_penalty", "nats", "KL to the reference, mean of responses", "trainer/advantages.py"),
    Metric("actor/reward_kl_penalty_coeff", "1", "its weight in the reward (kl_ctrl)", "trainer/advantages.py"),
    Metric("critic/vf_loss", "score^2", "value loss", "roles/critic.py"),
    Metric("critic/vf_clipfrac", "share of tokens", "where the clip raised the loss", "algorithms/losses.py"),
    Metric("critic/vpred_mean", "score", "mean of the values during the update", "algorithms/losses.py"),
    Metric(f"{_UPDATE}/grad_norm", "", "length of the gradient before clipping, mean of the steps", "roles/base.py"),
    Metric(f"{_UPDATE}/lr", "1", "learning rate of the update", "roles/base.py"),
    Metric(f"{_UPDATE}/skipped_steps", "steps", "left out because the gradient was not finite", "roles/base.py"),
    # -- lengths
    Metric(f"response_length/{SPREAD}", "tokens", "of a response", "trainer/metrics.py"),
    Metric("response_length/clip_ratio", "share of responses", "cut at data.max_response_length", "trainer/metrics.py"),
    Metric(f"prompt_length/{SPREAD}", "tokens", "of a prompt", "trainer/metrics.py"),
    # -- generation
    Metric(
        "rollout/prompt_tokens_computed",
        "tokens",
        "of prompts that the generator computed",
        "rollout/builtin/scheduler.py",
    ),
    Metric("rollout/prompt_tokens_cached", "tokens", "of prompts that it had already", "rollout/external.py"),
    Metric("rollout/response_tokens", "tokens", "generated", "rollout/builtin/scheduler.py"),
    Metric("rollout/decode_steps", "steps", "of the built-in generators", "rollout/builtin/scheduler.py"),
    Metric("rollout/rows_decoded", "rows", "summed over these steps", "rollout/builtin/scheduler.py"),
    Metric(
        "rollout/slot_use",
        "share",
        "of the rows of these steps that had a token to choose",
        "rollout/builtin/scheduler.py",
    ),
    Metric("rollout/http_retries", "requests", "repeated by the server rollout", "rollout/server/rollout.py"),
    Metric("rollout/sync_bytes", "bytes", "of weights handed to the generator", "reshard/hybrid.py"),
    # -- generator against trainer
    Metric(
        "rollout/log_prob_diff_{max,mean}",
        "nats",
        "|log pi_train - log pi_rollout| of a token",
        "algorithms/mismatch.py",
    ),
    Metric("rollout/log_prob_diff_above_0.1", "share of tokens", "where that is above 0.1", "algorithms/mismatch.py"),
    Metric("rollout/kl_{k1,k3}", "nats", "KL(rollout || train) by two estimators", "algorithms/mismatch.py"),
    Metric(
        "rollout/effective_sample_share",
        "share of responses",
        "that is left when each is weighted by its ratio of probabilities",
        "algorithms/mismatch.py",
    ),
    Metric(
        "rollout_corr/rollout_is_{mean,max,min}", "1", "importance weights of tokens", "trainer/rollout_correction.py"
    ),
    Metric(
        "rollout_corr/rollout_is_eff_sample_size",
        "share of tokens",
        "left by these weights",
        "trainer/rollout_correction.py",
    ),
    Metric(
        "rollout_corr/rollout_is_ratio_fraction_high",
        "share of tokens",
        "above the threshold",
        "trainer/rollout_correction.py",
    ),
    Metric("rollout_corr/rollout_rs_masked_fraction", "share of tokens", "left out", "trainer/rollout_correction.py"),
    Metric(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "share of responses",
        "that lost tokens",
        "trainer/rollout_correction.py",
    ),
    # -- validation
    Metric("val/reward/mean", "score", "of all responses", "trainer/validate.py"),
    Metric("val-core/<source>/reward/mean", "score", "of the responses of a data source", "trainer/validate.py"),
    Metric(
        "val-core/<source>/{reward,acc}/mean@<n>",
        "score",
        "mean over all n responses to a question",
        "algorithms/at_n.py",
    ),
    Metric(
        "val-core/<source>/{reward,acc}/{best,maj}@<n>/mean",
        "score",
        "of the best of all n responses, and of the answer that most of them give",
        "algorithms/at_n.py",
    ),
    Metric("val-aux/<source>/<value>/mean@<n>", "", "the same of other numbers", "algorithms/at_n.py"),
    Metric("val-aux/<source>/<value>/std@<n>", "", "standard deviation of the n responses", "algorithms/at_n.py"),
    Metric(
        "val-aux/<source>/<value>/{best,worst,maj}@<k>/mean",
        "",
        "expected best, worst and majority of k of the n responses",
        "algorithms/at_n.py",
    ),
    Metric("val-aux/response_length/mean", "tokens", "of a response", "trainer/validate.py"),
    Metric(
        "val-aux/reward/{errors,invalid,timeouts,crashes,slow}", "responses", "as in reward/", "trainer/validate.py"
    ),
    Metric("val-aux/reward/model/truncated", "responses", "as in reward/model/", "trainer/validate.py"),
    # -- times and speed
    Metric(
        "timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor}",
        "seconds",
        "that the step waited for this phase; roles on devices of their own, and reward functions from the first"
        " rank's responses on, work at the same time",
        "trainer/ppo.py",
    ),
    Metric("timing_s/{gen_max,reward_max}", "seconds", "of the responses that ReMax compares with", "trainer/remax.py"),
    Metric("timing_s/reward_call_max", "seconds", "of the slowest call of the reward function", "rewards/manager.py"),
    Metric(
        "timing_s/{sync,sync_check}", "seconds", "of the hand-over of weights, and of its check", "reshard/hybrid.py"
    ),
    Metric("timing_s/step", "seconds", "of the whole step, without validation and saving", "trainer/metrics.py"),
    Metric("perf/total_num_tokens", "tokens", "prompts and responses of the step", "trainer/metrics.py"),
    Metric("perf/throughput", "tokens/second", "these by the time of the step, all ranks", "trainer/metrics.py"),
    Metric("perf/rollout_tokens_per_second", "tokens/second", "generated, all ranks", "roles/rollout.py"),
    Metric("perf/sync_peak_memory_bytes", "bytes", "most at the hand-over, of the fullest rank", "reshard/hybrid.py"),
    # -- supervised
    Metric("train/loss", "nats", "cross-entropy per trained token", "roles/sft.py", "sft"),
    Metric("val/loss", "nats", "cross-entropy per token of the held-out rows", "trainer/sft.py", "sft"),
    # -- reward models
    Metric(f"{_PAIRS}/loss", "nats", "mean over pairs, the centering included", "algorithms/preference.py", "rm"),
    Metric(
        f"{_PAIRS}/accuracy",
        "share of pairs",
        "whose chosen answer has the higher score",
        "algorithms/preference.py",
        "rm",
    ),
    Metric(
        f"{_PAIRS}/margin", "score", "of the chosen answers less that of the others", "algorithms/preference.py", "rm"
    ),
    Metric(f"{_PAIRS}/chosen_reward", "score", "mean of the chosen answers", "algorithms/preference.py", "rm"),
    Metric(f"{_PAIRS}/rejected_reward", "score", "mean of the others", "algorithms/preference.py", "rm"),
    # -- both
    *(
        Metric(name, unit, meaning, source, trainer)
        for trainer in ("sft", "rm")
        for name, unit, meaning, source in (
            ("train/grad_norm", "", "length of the gradient before clipping", "roles/supervised.py"),
            ("train/lr", "1", "learning rate of the step", "roles/supervised.py"),
            ("train/skipped_steps", "steps", "1 if the gradient was not finite", "roles/supervised.py"),
            ("timing_s/step", "seconds", "of the step", "trainer/supervised.py"),
            ("perf/throughput", "tokens/second", "read, by the time of the step", "trainer/supervised.py"),
        )
    ),
)

LEGEND = """\
`{mean,max}` stands for one of these, `<source>` for a data source, `<value>` for `reward` or a number that the reward
function gives, `<n>` for `actor_rollout_ref.rollout.val_kwargs.n` and `<k>` for 2, 4, 8, ... up to n.
"""

_STANDS_FOR = {"source": ".+", "value": "[^/]+", "n": r"\d+", "k": r"\d+"}


def matches(pattern: str, name: str) -> bool:
    """Whether `name` is one of those that a name without braces stands for."""
    parts = re.split(r"<(\w+)>", pattern)
    return bool(re.fullmatch("".join(_STANDS_FOR[p] if i % 2 else re.escape(p) for i, p in enumerate(parts)), name))


def find(name: str, trainer: str | None = None) -> Metric:
    """What the table says of a name that was logged; the first entry that has it counts."""
    known = [metric for metric in METRICS if trainer in (None, metric.trainer)]
    for metric in known:
        if any(name == pattern or matches(pattern, name) for pattern in (metric.name, *metric.names())):
            return metric
    close = get_close_matches(name, [one for metric in known for one in metric.names()], n=3)
    hint = f" Nearest: {', '.join(close)}." if close else ""
    raise ConfigError(f"there is no metric '{name}'.{hint} All of them: docs/metrics.md, or camshaft metrics docs")


def explain(name: str) -> str:
    """One metric, for a reader."""
    metric = find(name)
    rows = [("unit", metric.unit), ("trainer", f"camshaft {metric.trainer}"), ("from", f"camshaft/{metric.source}")]
    return "\n".join([metric.name, f"  {metric.meaning}", "", *(f"  {what:<8}  {text}" for what, text in rows if text)])


def reference_page() -> str:
    """The table as Markdown."""
    parts = [
        "# Metrics\n",
        "Written by `camshaft metrics docs`. [Tracking](tracking.md) says where they go.\n",
        LEGEND,
    ]
    for trainer in ("ppo", "sft", "rm"):
        parts.append(f"## `camshaft {trainer}`\n")
        parts.append("| metric | unit | meaning | from |\n|---|---|---|---|")
        for metric in METRICS:
            if metric.trainer == trainer:
                cells = [f"`{metric.name}`", metric.unit, metric.meaning, f"`{metric.source}`"]
                parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        parts.append("")
    return "\n".join(parts)
