"""Dynamic sampling (DAPO): replace prompts whose responses all have equal scores.

    batch = sample_informative_prompts(prompts, generate_and_score, loader, config, metrics)

A prompt that the policy always or never solves has zero group-relative advantages and thus no gradient. This module
draws batches of prompts until enough of them have responses with different scores (Yu et al., arXiv:2503.14476).

Surplus prompts are returned to the loader for the next step, and their responses are discarded. Every response
therefore comes from the current policy, and a checkpoint needs to store only the position in the data. Prompts without
a gradient are drawn again in the next epoch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from camshaft.config import PPOConfig
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto
from camshaft.errors import BatchError
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.advantages import require_part
from camshaft.trainer.metrics import StepMetrics, reduce_calls

GenerateAndScore = Callable[[DataProto, StepMetrics, int], tuple[DataProto, RewardResult]]
"""Function (prompts, metrics, number of rows already generated in this step) -> (scored batch, reward result).

The results have `rollout.n` rows per prompt.
"""


def sample_informative_prompts(
    prompts: DataProto,
    generate_and_score: GenerateAndScore,
    loader: StatefulLoader,
    config: PPOConfig,
    metrics: StepMetrics,
) -> DataProto:
    """Return scored responses to `data.train_batch_size` informative prompts from `prompts` and the loader."""
    target, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    metric = config.algorithm.filter_groups.metric
    metric = "seq_reward" if metric == "seq_final_reward" else metric
    batches: list[DataProto] = []
    call_metrics: list[dict[str, float]] = []
    values: list[Tensor] = []
    num_missing, num_drawn, num_equal, num_unused = target, 0, 0, 0
    while True:
        batch_metrics = StepMetrics(metrics.status)
        batch, scored = generate_and_score(prompts, batch_metrics, num_drawn * n)
        row_values = filter_values(scored, metric)
        values.append(row_values[scored.keep_mask])
        is_informative = _find_informative(row_values, scored.keep_mask, n)
        informative_rows = is_informative.nonzero().flatten()[:num_missing]
        call_metrics.append(batch_metrics.values)
        batches.append(batch.reorder((informative_rows[:, None] * n + torch.arange(n)).flatten()))
        num_missing -= len(informative_rows)
        num_drawn += len(prompts)
        num_equal += int((~is_informative).sum())
        if not num_missing:
            num_unused = len(prompts) - 1 - int(informative_rows[-1])
            break
        _check_progress(config, len(call_metrics), target - num_missing, num_drawn >= len(loader.data))
        prompts = loader.next_batch()
    loader.return_rows(num_unused)
    sampling_metrics = {
        "train/num_gen_batches": float(len(call_metrics)),
        "filter_groups/same_share": num_equal / num_drawn,
        "filter_groups/given_back": float(num_unused),
        f"filter_groups/{metric}/mean": float(torch.cat(values).mean()),
    }
    metrics.add(reduce_calls(call_metrics) | sampling_metrics)
    return DataProto.concat(batches)


def _find_informative(values: Tensor, keep_mask: Tensor, n: int) -> Tensor:
    """Return a mask, (B / n,) bool, of the prompts whose responses have different values. Dropped rows are ignored."""
    maxima, minima = (torch.where(keep_mask, values, end).view(-1, n) for end in (-torch.inf, torch.inf))
    return maxima.amax(1) > minima.amin(1)


def filter_values(scored: RewardResult, metric: str) -> Tensor:
    """Return the filter metric of each response, (B,). Responses that could not be scored have 0."""
    if metric == "seq_reward":
        return scored.token_level_scores.sum()
    if metric == "score":
        return scored.scores
    require_part(scored.parts, metric, "algorithm.filter_groups.metric")
    return torch.tensor([part.get(metric, 0.0) for part in scored.parts])


def _check_progress(config: PPOConfig, calls: int, num_informative: int, epoch_finished: bool) -> None:
    """Raise BatchError if the maximum number of batches is reached, or if an epoch has no informative prompt."""
    filtering, target = config.algorithm.filter_groups, config.data.train_batch_size
    limit_reached = 0 < filtering.max_num_gen_batches <= calls
    if not limit_reached and (num_informative or not epoch_finished):
        return
    problem = (
        f"only {num_informative} of {target} prompts have responses that differ in {filtering.metric} after {calls} "
        f"batches of {config.prompts_per_generation_batch()} prompts, because the policy always or never solves the "
        "other prompts; increase data.gen_batch_size or actor_rollout_ref.rollout.n, or use other data"
    )
    limit = "algorithm.filter_groups.max_num_gen_batches"
    reason = f"{limit}={filtering.max_num_gen_batches} is reached; {limit}=0 removes the limit"
    raise BatchError(f"{problem}. {reason if limit_reached else 'All prompts of the data were tried'}")
