"""Dynamic sampling (DAPO): replace prompts whose responses all have the same score.

    batch = informative(prompts, generate_and_score, loader, config, metrics)     # train_batch_size prompts

With group-relative advantages such a prompt has no gradient: the policy always or never solves it. Batches of prompts
are drawn from the loader until enough prompts have different scores (Yu et al., arXiv:2503.14476).

Surplus prompts are returned to the loader for the next step and their responses are discarded. Every response therefore
comes from the current policy, and a checkpoint stores only the position in the data. A dropped prompt returns in the
next epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from camshaft.config import PPOConfig
from camshaft.data import StatefulLoader
from camshaft.dataproto import DataProto
from camshaft.errors import BatchError, RewardError
from camshaft.rewards.manager import RewardResult
from camshaft.trainer.metrics import StepMetrics, over_calls

GenerateAndScore = Callable[[DataProto, StepMetrics, int], tuple[DataProto, RewardResult]]
"""(prompts, metrics, rows generated before in this step) -> (scored batch, reward result), `rollout.n` rows each."""


def informative(
    prompts: DataProto,
    generate_and_score: GenerateAndScore,
    loader: StatefulLoader,
    config: PPOConfig,
    metrics: StepMetrics,
) -> DataProto:
    """Return `data.train_batch_size` informative prompts with scored responses, starting with `prompts`."""
    target, n, metric = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, _metric(config)
    kept: list[DataProto] = []
    call_metrics: list[dict[str, float]] = []
    values: list[Tensor] = []
    missing, drawn, same, unused = target, 0, 0, 0
    while True:
        call = StepMetrics()
        batch, scored = generate_and_score(prompts, call, drawn * n)
        row_values = filter_values(scored, metric)
        values.append(row_values[scored.kept])
        differs = _differs(row_values, scored.kept, n)
        chosen = differs.nonzero().flatten()[:missing]
        call_metrics.append(call.values)
        kept.append(batch.reorder((chosen[:, None] * n + torch.arange(n)).flatten()))
        missing, drawn, same = missing - len(chosen), drawn + len(prompts), same + int((~differs).sum())
        if not missing:
            unused = len(prompts) - 1 - int(chosen[-1])
            break
        _check_progress(config, len(call_metrics), target - missing, drawn >= len(loader.data))
        prompts = loader.next_batch()
    loader.return_rows(unused)
    metrics.add(over_calls(call_metrics))
    metrics.add(
        {
            "train/num_gen_batches": float(len(call_metrics)),
            "filter_groups/same_share": same / drawn,
            "filter_groups/given_back": float(unused),
            f"filter_groups/{metric}/mean": float(torch.cat(values).mean()),
        }
    )
    return DataProto.concat(kept)


def _differs(values: Tensor, kept: Tensor, n: int) -> Tensor:
    """Return which prompts have responses with different values, (B / n,) bool; dropped responses are ignored."""
    most, least = (torch.where(kept, values, end).view(-1, n) for end in (-torch.inf, torch.inf))
    return most.amax(1) > least.amin(1)


def _metric(config: PPOConfig) -> str:
    metric = config.algorithm.filter_groups.metric
    return "seq_reward" if metric == "seq_final_reward" else metric


def filter_values(scored: RewardResult, metric: str) -> Tensor:
    """Return the filter metric of each response, (B,); 0 if its scoring failed."""
    if metric == "seq_reward":
        return scored.token_level_scores.sum()
    if metric == "score":
        return scored.scores
    if not any(metric in part for part in scored.parts):
        names = sorted({name for part in scored.parts for name in part})
        raise RewardError(
            f"algorithm.filter_groups.metric={metric}: the results of the reward function have no number '{metric}' "
            f"(they have: {', '.join(names) or 'only the score'}); use algorithm.filter_groups.metric=score, or return "
            f"a dict with '{metric}'"
        )
    return torch.tensor([part.get(metric, 0.0) for part in scored.parts])


def _check_progress(config: PPOConfig, calls: int, num_informative: int, whole_epoch: bool) -> None:
    """Raise an error if the limit of batches is reached, or a whole epoch had no informative prompt."""
    filtering, target = config.algorithm.filter_groups, config.data.train_batch_size
    limit_reached = 0 < filtering.max_num_gen_batches <= calls
    if not limit_reached and (num_informative or not whole_epoch):
        return
    problem = (
        f"{num_informative} of {target} prompts have responses that differ in {filtering.metric} after {calls} batches "
        f"of {config.generated_together()} prompts: the policy always or never solves the remaining prompts; increase "
        "data.gen_batch_size or actor_rollout_ref.rollout.n, or use other data"
    )
    limit = "algorithm.filter_groups.max_num_gen_batches"
    reason = (
        f"; {limit}={calls} is reached, {limit}=0 removes the limit"
        if limit_reached
        else "; the data has no more prompts"
    )
    raise BatchError(problem + reason)
