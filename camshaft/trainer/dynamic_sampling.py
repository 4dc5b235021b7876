"""Dynamic sampling: prompts whose responses are all worth the same are dropped, and others generated in their place.

    batch = informative(prompts, answered, loader, config, metrics)     # train_batch_size prompts that differ

Where responses are compared with each other, such a prompt has no gradient: the policy always solves it, or never does.
Batches of prompts are drawn from the loader until enough are left (Yu et al., arXiv:2503.14476).

The prompts behind the last one that was needed are given back and come again in the next step: their responses are
thrown away, the prompts are not, nothing is trained on that an older policy said, and the place in the data is all
that a checkpoint has to hold. A prompt that was dropped comes again in the next epoch.
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

Answered = Callable[[DataProto, StepMetrics, int], tuple[DataProto, RewardResult]]
"""(prompts, metrics, how many rows the step has drawn before) -> their responses, scored, `rollout.n` rows for each."""


def informative(
    prompts: DataProto, answered: Answered, loader: StatefulLoader, config: PPOConfig, metrics: StepMetrics
) -> DataProto:
    """`data.train_batch_size` prompts with their responses; `prompts` is the loader's last batch, where it begins."""
    wanted, n, metric = config.data.train_batch_size, config.actor_rollout_ref.rollout.n, _metric(config)
    kept: list[DataProto] = []
    told: list[dict[str, float]] = []
    counted: list[Tensor] = []
    missing, drawn, same, unused = wanted, 0, 0, 0
    while True:
        call = StepMetrics()
        batch, scored = answered(prompts, call, drawn * n)
        worths = worth(scored, metric)
        counted.append(worths[scored.kept])
        differs = _differs(worths, scored.kept, n)
        chosen = differs.nonzero().flatten()[:missing]
        told.append(call.values)
        kept.append(batch.reorder((chosen[:, None] * n + torch.arange(n)).flatten()))
        missing, drawn, same = missing - len(chosen), drawn + len(prompts), same + int((~differs).sum())
        if not missing:
            unused = len(prompts) - 1 - int(chosen[-1])
            break
        _check_hope(config, len(told), wanted - missing, drawn >= len(loader.data))
        prompts = loader.next_batch()
    loader.give_back(unused)
    metrics.add(over_calls(told))
    metrics.add(
        {
            "train/num_gen_batches": float(len(told)),
            "filter_groups/same_share": same / drawn,
            "filter_groups/given_back": float(unused),
            f"filter_groups/{metric}/mean": float(torch.cat(counted).mean()),
        }
    )
    return DataProto.concat(kept)


def _differs(worths: Tensor, kept: Tensor, n: int) -> Tensor:
    """(B / n,) whether the responses to a prompt are worth different things; those that were dropped say nothing."""
    most, least = (torch.where(kept, worths, end).view(-1, n) for end in (-torch.inf, torch.inf))
    return most.amax(1) > least.amin(1)


def _metric(config: PPOConfig) -> str:
    metric = config.algorithm.filter_groups.metric
    return "seq_reward" if metric == "seq_final_reward" else metric


def worth(scored: RewardResult, metric: str) -> Tensor:
    """(B,) what the responses to a prompt must differ in; 0 where the function failed and gave no such number."""
    if metric == "seq_reward":
        return scored.token_level_scores.sum()
    if metric == "score":
        return scored.scores
    if not any(metric in part for part in scored.parts):
        known = sorted({name for part in scored.parts for name in part})
        raise RewardError(
            f"algorithm.filter_groups.metric={metric}: the reward function's results have no number '{metric}' (they "
            f"have: {', '.join(known) or 'the score alone'}). Type algorithm.filter_groups.metric=score, or return a "
            f"dict with '{metric}'"
        )
    return torch.tensor([part.get(metric, 0.0) for part in scored.parts])


def _check_hope(config: PPOConfig, calls: int, found: int, whole_pass: bool) -> None:
    """More batches are allowed, and there is reason to believe that they help."""
    filtering, wanted = config.algorithm.filter_groups, config.data.train_batch_size
    spent = 0 < filtering.max_num_gen_batches <= calls
    if not spent and (found or not whole_pass):
        return
    did = (
        f"{found} of {wanted} prompts have responses that differ in {filtering.metric}, after {calls} batches of "
        f"{config.generated_together()} prompts: the policy solves the others always, or never. Type a larger "
        "data.gen_batch_size or actor_rollout_ref.rollout.n, or use other data"
    )
    limit = "algorithm.filter_groups.max_num_gen_batches"
    more = f"; {limit}={calls} allows no more, {limit}=0 any number" if spent else "; these are all that there are"
    raise BatchError(did + more)
