"""The greedy response to each prompt, whose score is what the samples are compared with (ReMax).

    prompts = with_baselines(prompts, parts, metrics)       # `reward_baselines`, one number for each prompt

Scored as the samples are, by the same functions and the same reward model; without a KL penalty. A greedy response
whose scoring failed and is dropped leaves its prompt without a baseline, nan, and `with_scores` drops the samples.
Li et al., arXiv:2310.10505.
"""

from __future__ import annotations

import torch

from camshaft.dataproto import DataProto
from camshaft.trainer.build import PPOParts
from camshaft.trainer.metrics import StepMetrics
from camshaft.trainer.scoring import check_left


def with_baselines(prompts: DataProto, parts: PPOParts, metrics: StepMetrics) -> DataProto:
    """`prompts` with the score of the greedy response to each; what scoring counts is told as `baseline/...`."""
    with metrics.phase("gen_max"):
        generated, begun = parts.generate(prompts, greedy=True)
    with metrics.phase("reward_max"):
        answered = parts.model_scored(prompts.union(DataProto(generated.columns)))
        scored = parts.rewards.score(answered, parts.decode, begun)
    check_left(scored.kept, scored, "greedy responses")
    baselines = torch.where(scored.kept, scored.token_level_scores.sum(), torch.nan)
    told = {name.replace("reward/", "baseline/", 1): value for name, value in scored.metrics.items()}
    metrics.add(told | {"baseline/score/mean": float(baselines.nanmean())})
    return prompts.with_columns(reward_baselines=baselines)
