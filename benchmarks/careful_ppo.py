"""The careful loop of `careful.py` with a critic, a reference, the KL in the reward, and GAE.

loop = CarefulPPO(folder, learning_rate)
loop.step(prompts)      # generate, score, log-probs, reference, values, GAE, update of critic and actor
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from careful import CarefulLoop, adam, fit, log_probs, right_padded, told_of
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from workload import CLIP_VALUE, KL, LAMBDA, SAMPLES, Rows, even_share


@dataclass(frozen=True)
class ValuedRows(Rows):
    values: list[Tensor]
    returns: list[Tensor]


class CarefulPPO(CarefulLoop):
    """The critic is a second model with a head of one number, and has an optimizer of its own."""

    def __init__(self, folder: Path, learning_rate: float):
        super().__init__(folder, learning_rate)
        self.reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        backbone: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.critic = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(backbone.config.hidden_size, 1)})
        self.critic_optimizer = adam(self.critic, learning_rate)

    def values(self, rows: Rows) -> Tensor:
        """Before each response token, row after row."""
        ids, predicts = right_padded(rows)
        hidden = self.critic["backbone"](input_ids=ids, use_cache=False).last_hidden_state[:, :-1][predicts]
        return self.critic["head"](hidden)[:, 0]

    def value_loss(self, part: ValuedRows) -> Tensor:
        """Summed over tokens."""
        values, old, returns = self.values(part), torch.cat(part.values), torch.cat(part.returns)
        clipped = old + (values - old).clamp(-CLIP_VALUE, CLIP_VALUE)
        return torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum() / 2

    def step(self, prompts: list[Tensor]) -> dict[str, float]:
        responses = self.generate(prompts)
        rows = Rows([prompt for prompt in prompts for _ in range(SAMPLES)], responses, [], [])
        old = told_of(rows, self.log_probs)
        reference = told_of(rows, lambda part: log_probs(self.reference, part))
        values = told_of(rows, self.values)
        rewards = [KL * (theirs - ours) for theirs, ours in zip(reference, old, strict=True)]
        for reward, response in zip(rewards, responses, strict=True):
            reward[-1] += even_share(response.tolist())
        advantages = gae(rewards, values)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        mean, std = torch.cat(advantages).mean(), torch.cat(advantages).std()
        whitened = [(a - mean) / (std + 1e-8) for a in advantages]
        valued = ValuedRows(rows.prompts, responses, old, whitened, values, returns)
        fit(valued, self.value_loss, self.critic, self.critic_optimizer)
        self.update(valued)
        return {"tokens": float(sum(map(len, responses)))}


def gae(rewards: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Of each row, with a discount of 1; padding after a row's end is 0 and adds nothing."""
    reward, value = pad_sequence(rewards, batch_first=True), pad_sequence(values, batch_first=True)
    found = torch.zeros_like(reward)
    after = next_value = torch.zeros(len(rewards))
    for t in reversed(range(reward.shape[1])):
        after = reward[:, t] + next_value - value[:, t] + LAMBDA * after
        next_value = value[:, t]
        found[:, t] = after
    return [row[: len(own)] for row, own in zip(found, rewards, strict=True)]
