"""The careful loop of `careful.py` with a critic, a reference, KL in the reward, and GAE.

loop = CarefulPPO(folder, learning_rate)
loop.step(prompts)      # generate, score, log-probs, reference, values, GAE, critic and actor update
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from careful import CarefulCritic, CarefulLoop, evaluate, log_probs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from workload import KL, LAMBDA, SAMPLES, Rows, even_share


class CarefulPPO(CarefulLoop):
    """Careful loop whose critic is a second model with a separate optimizer."""

    def __init__(self, folder: Path, learning_rate: float):
        super().__init__(folder, learning_rate)
        self.reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.critic = CarefulCritic(folder, learning_rate)

    def step(self, prompts: list[Tensor]) -> dict[str, list[int]]:
        responses = self.generate(prompts)
        rows = Rows([prompt for prompt in prompts for _ in range(SAMPLES)], responses, [], [])
        old = evaluate(rows, self.log_probs)
        reference = evaluate(rows, lambda part: log_probs(self.reference, part))
        values = evaluate(rows, self.critic.values)
        rewards = [KL * (ref_log_prob - log_prob) for ref_log_prob, log_prob in zip(reference, old, strict=True)]
        for reward, response in zip(rewards, responses, strict=True):
            reward[-1] += even_share(response.tolist())
        advantages = gae(rewards, values)
        returns = [a + v for a, v in zip(advantages, values, strict=True)]
        mean, std = torch.cat(advantages).mean(), torch.cat(advantages).std()
        whitened = [(a - mean) / (std + 1e-8) for a in advantages]
        valued = Rows(rows.prompts, responses, old, whitened, values, returns)
        self.critic.update(valued)
        self.update(valued)
        return {"lengths": [len(response) for response in responses]}


def gae(rewards: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Compute the advantages of each row with gamma 1; padding is 0 and adds nothing."""
    reward, value = pad_sequence(rewards, batch_first=True), pad_sequence(values, batch_first=True)
    advantages = torch.zeros_like(reward)
    after = next_value = torch.zeros(len(rewards))
    for t in reversed(range(reward.shape[1])):
        after = reward[:, t] + next_value - value[:, t] + LAMBDA * after
        next_value = value[:, t]
        advantages[:, t] = after
    return [row[: len(reward_row)] for row, reward_row in zip(advantages, rewards, strict=True)]
