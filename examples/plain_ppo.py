"""PPO and GRPO for language models in one file, written from the definitions.

    python examples/plain_ppo.py --model models/tiny --data data/sums/train.parquet --steps 4

This program favors clarity over speed and imports nothing from camshaft. Prompts are padded on the left, responses
on the right. Every forward pass calls `transformers` on a whole mini-batch, every sampled token costs a full forward
pass, and advantages are computed by loops over Python floats. Start reading at `train`, at the end of the file: it is
the algorithm. `tests/parity` runs it beside camshaft and compares metrics and weights after every step.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

Reward = Callable[[str, str, Any, dict[str, Any]], float]
Rows = list[list[float]]
U64 = 2**64
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of a run. Batch sizes count prompts; every prompt is sampled `n` times."""

    actor: str
    data: str
    critic: str | None = None
    dtype: str = "float32"
    seed: int = 1
    steps: int = 10
    batch_size: int = 8
    mini_batch_size: int = 4
    epochs: int = 2
    n: int = 1
    response_length: int = 8
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    estimator: str = "gae"
    gamma: float = 1.0
    lam: float = 1.0
    kl_in_reward: bool = False
    kl_penalty: str = "kl"
    kl_control: str = "fixed"
    kl_coef: float = 0.005
    kl_target: float = 0.1
    kl_horizon: int = 10000
    kl_loss: bool = False
    kl_loss_type: str = "low_var_kl"
    kl_loss_coef: float = 0.001
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float = 3.0
    clip_value: float = 0.5
    entropy_coeff: float = 0.001
    aggregation: str = "token-mean"
    loss: str = "vanilla"
    norm_by_std: bool = True
    actor_lr: float = 1e-6
    actor_lr_warmup: int = 0
    critic_lr: float = 1e-5
    critic_lr_warmup: int = 0
    critic_warmup: int = 0
    weight_decay: float = 0.01
    grad_clip: float = 1.0


@dataclass(frozen=True)
class Step:
    """Results of one step, with the weights after it."""

    metrics: dict[str, float]
    prompts: list[list[int]]
    responses: list[list[int]]
    rollout_log_probs: Rows
    actor: dict[str, Tensor]
    critic: dict[str, Tensor]


@dataclass
class Batch:
    """B padded sequences: P prompt columns (padded on the left), then T response columns (padded on the right)."""

    ids: Tensor
    """(B, P + T) token ids"""
    attention: Tensor
    """(B, P + T) 1 for a token, 0 for padding"""
    mask: Tensor
    """(B, T) bool, true for response tokens"""
    columns: dict[str, Tensor]
    """(B, T) each, zero at padding; `ref_distribution` is (B, T, V)"""

    @property
    def responses(self) -> Tensor:
        """(B, T) token ids"""
        return self.ids[:, -self.mask.shape[1] :]

    def rows(self, index: Tensor) -> "Batch":
        columns = {name: column[index] for name, column in self.columns.items()}
        return Batch(self.ids[index], self.attention[index], self.mask[index], columns)


# -- models -----------------------------------------------------------------------------------------


def load(path: str, head: Any, dtype: str) -> Any:
    return head.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="sdpa").eval()


def logits(model: Any, batch: Batch) -> Tensor:
    """Return the (B, T, ...) outputs at the position before each response token."""
    positions = (batch.attention.cumsum(1) - 1).clamp(min=0)
    outputs = model(batch.ids, attention_mask=batch.attention, position_ids=positions, use_cache=False).logits
    return outputs[:, batch.ids.shape[1] - batch.mask.shape[1] - 1 : -1]


def log_probs_and_entropy(model: Any, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    logp = distribution(model, batch, temperature)
    entropy = -(logp.exp() * logp).sum(-1)
    return logp.gather(-1, batch.responses[:, :, None])[:, :, 0] * batch.mask, entropy * batch.mask


def distribution(model: Any, batch: Batch, temperature: float) -> Tensor:
    """Return the (B, T, V) log-probs of the vocabulary."""
    return torch.log_softmax(logits(model, batch) / temperature, dim=-1)


def values_of(model: Any, batch: Batch) -> Tensor:
    return logits(model, batch)[:, :, 0] * batch.mask


def weights(model: Any) -> dict[str, Tensor]:
    return {} if model is None else {name: p.detach().clone() for name, p in model.named_parameters()}


# -- data and sampling --------------------------------------------------------------------------------


def load_prompts(settings: Settings, tokenizer: Any) -> Iterator[list[tuple[list[int], dict[str, Any]]]]:
    """Yield one batch of (token ids, row) per step. The incomplete last batch of an epoch is dropped."""
    rows = pq.read_table(settings.data).to_pylist()
    ids = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"] for row in rows]
    for epoch in range(settings.steps):
        order = np.random.default_rng((settings.seed, epoch)).permutation(len(rows))
        for start in range(0, len(rows) - settings.batch_size + 1, settings.batch_size):
            yield [(ids[i], rows[i]) for i in order[start : start + settings.batch_size] for _ in range(settings.n)]


def mix(x: int) -> int:
    """Apply the finalizer of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % U64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % U64
    return x ^ x >> 31


def uniform(seed: int, position: int) -> float:
    """Return the uniform variate in [0, 1) for `position` in the random stream of `seed`."""
    return (mix((mix((seed + GOLDEN) % U64) + (position + 1) * GOLDEN) % U64) >> 11) * 2.0**-53


def draw(scores: Tensor, settings: Settings, u: float) -> tuple[int, float]:
    """Sample a token by inverse CDF after temperature, top-k and top-p; also return its log-prob."""
    scores = scores.double() / settings.temperature
    if settings.top_k > 0:
        scores[scores < scores.sort(descending=True).values[settings.top_k - 1]] = -math.inf
    if settings.top_p < 1:
        probs, order = scores.softmax(0).sort(descending=True)
        before = probs.cumsum(0) - probs
        scores[order[before >= settings.top_p]] = -math.inf
    probs = scores.softmax(0)
    token = int((probs.cumsum(0) <= u).sum())
    return token, math.log(float(probs[token]))


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], settings: Settings, step: int, stop: int) -> tuple[Batch, Rows]:
    """Sample responses up to the `stop` token or the length limit; return them with their log-probs."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    attention = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    log_probs: Rows = [[] for _ in prompts]
    active = [True] * len(prompts)
    for t in range(settings.response_length):
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        scores = model(ids, attention_mask=attention, position_ids=positions, use_cache=False).logits[:, -1]
        tokens = [0] * len(prompts)
        was_active = list(active)
        for row in [row for row, flag in enumerate(was_active) if flag]:
            seed = (settings.seed * 2**20 + step) * 2**24 + row
            tokens[row], log_prob = draw(scores[row], settings, uniform(seed, len(prompts[row]) + t))
            log_probs[row].append(log_prob)
            active[row] = tokens[row] != stop
        ids = torch.cat([ids, torch.tensor(tokens)[:, None]], dim=1)
        attention = torch.cat([attention, torch.tensor(was_active).long()[:, None]], dim=1)
    return Batch(ids, attention, attention[:, width:].bool(), {}), log_probs


# -- rewards and advantages, one list of floats per response ------------------------------------------


def rows_of(column: Tensor, mask: Tensor) -> Rows:
    return [values[: int(m.sum())].tolist() for values, m in zip(column, mask, strict=True)]


def grid(rows: Rows, like: Tensor) -> Tensor:
    return torch.tensor([row + [0.0] * (like.shape[1] - len(row)) for row in rows], dtype=like.dtype)


def kl(d: Tensor, kind: str) -> Tensor:
    """Estimate the KL divergence per token from d = log pi - log pi_ref."""
    if kind == "low_var_kl":
        d = d.clamp(-20, 20)
        return ((-d).exp() + d - 1).clamp(-10, 10)
    return {"kl": d, "abs": d.abs(), "mse": d * d / 2}[kind]


def gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """Return whitened advantages and returns by generalized advantage estimation."""
    advantages: Rows = []
    for r, v in zip(rewards, values, strict=True):
        row, advantage, next_value = [0.0] * len(r), 0.0, 0.0
        for t in range(len(r) - 1, -1, -1):
            advantage = r[t] + gamma * next_value - v[t] + gamma * lam * advantage
            row[t], next_value = advantage, v[t]
        advantages.append(row)
    returns = [[a + x for a, x in zip(row, v, strict=True)] for row, v in zip(advantages, values, strict=True)]
    flat = [a for row in advantages for a in row]
    mean, std = statistics.fmean(flat), math.sqrt(statistics.variance(flat) + 1e-8)
    return [[(a - mean) / std for a in row] for row in advantages], returns


def grpo(rewards: Rows, n: int, norm_by_std: bool) -> tuple[Rows, Rows]:
    """Normalize each response's reward within its group of `n`; return advantages and returns per token."""
    totals = [math.fsum(r) for r in rewards]
    advantages: Rows = []
    for row, r in enumerate(rewards):
        group = totals[row // n * n : row // n * n + n]
        spread = statistics.stdev(group) + 1e-6 if norm_by_std else 1.0
        advantages.append([(totals[row] - statistics.fmean(group)) / spread] * len(r))
    return advantages, [[total] * len(r) for total, r in zip(totals, rewards, strict=True)]


# -- losses -------------------------------------------------------------------------------------------


def aggregate(x: Tensor, mask: Tensor, mode: str) -> Tensor:
    x = x * mask
    if mode == "token-mean":
        return x.sum() / mask.sum()
    if mode == "seq-mean-token-mean":
        return (x.sum(1) / mask.sum(1)).mean()
    if mode == "seq-mean-token-sum-norm":
        return x.sum(1).mean() / x.shape[1]
    assert mode == "seq-mean-token-sum"
    return x.sum(1).mean()


def policy_terms(log_probs: Tensor, batch: Batch, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (B, T) losses and the (B, T) masks of clipped tokens."""
    advantages = batch.columns["advantages"]
    difference = (log_probs - batch.columns["old_log_probs"]).clamp(-20, 20)
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    if settings.loss == "cispo":
        ratio = difference.exp().detach()
        return -ratio.clamp(low, high) * advantages * log_probs, {"pg_clipfrac": ratio != ratio.clamp(low, high)}
    if settings.loss == "gspo":  # one ratio per sequence
        ratio = ((difference * batch.mask).sum(1) / batch.mask.sum(1)).exp()
        unclipped, clipped = -advantages * ratio[:, None], -advantages * ratio.clamp(low, high)[:, None]
        return torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped}
    unclipped, clipped = -advantages * difference.exp(), -advantages * difference.exp().clamp(low, high)
    worse = torch.maximum(unclipped, clipped)
    bounded = torch.where(advantages < 0, torch.minimum(worse, -advantages * settings.clip_dual), worse)
    lower = (advantages < 0) & (worse > -advantages * settings.clip_dual)
    return bounded, {"pg_clipfrac": clipped > unclipped, "pg_clipfrac_lower": lower}


def actor_loss(model: Any, batch: Batch, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    log_probs, entropy = log_probs_and_entropy(model, batch, settings.temperature)
    per_token, clips = policy_terms(log_probs, batch, settings)
    policy = aggregate(per_token, batch.mask, settings.aggregation)
    loss = policy - settings.entropy_coeff * aggregate(entropy, batch.mask, settings.aggregation)
    metrics = {
        "pg_loss": policy,
        "ppo_kl": aggregate(batch.columns["old_log_probs"] - log_probs, batch.mask, "token-mean"),
        **{name: aggregate(where.to(log_probs), batch.mask, "token-mean") for name, where in clips.items()},
    }
    if settings.kl_loss:
        if settings.kl_loss_type == "full":
            logp = distribution(model, batch, settings.temperature)
            distance = (logp.exp() * (logp - batch.columns["ref_distribution"])).sum(-1)
        else:
            distance = kl(log_probs - batch.columns["ref_log_prob"], settings.kl_loss_type)
        metrics["kl_loss"] = aggregate(distance, batch.mask, settings.aggregation)
        loss = loss + settings.kl_loss_coef * metrics["kl_loss"]
    return loss, metrics


def critic_loss(model: Any, batch: Batch, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    old, returns = batch.columns["values"], batch.columns["returns"]
    values = values_of(model, batch)
    near = torch.minimum(torch.maximum(values, old - settings.clip_value), old + settings.clip_value)
    unclipped, clipped = (values - returns) ** 2, (near - returns) ** 2
    loss = aggregate(torch.maximum(unclipped, clipped) / 2, batch.mask, settings.aggregation)
    fraction = aggregate((clipped > unclipped).to(values), batch.mask, "token-mean")
    return loss, {"vf_loss": loss, "vf_clipfrac": fraction, "vpred_mean": aggregate(values, batch.mask, "token-mean")}


# -- training -----------------------------------------------------------------------------------------


class Learner:
    """A model with its optimizer. The learning rate warms up over the first calls of `update`."""

    def __init__(self, model: Any, loss: Any, lr: float, warmup: int, settings: Settings):
        self.model, self.loss, self.lr, self.warmup, self.settings = model, loss, lr, warmup, settings
        self.optimizer = torch.optim.AdamW(model.parameters(), weight_decay=settings.weight_decay)
        self.updates = 0

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Train for `epochs` over the batch; return metrics averaged over the optimizer steps."""
        settings, size = self.settings, self.settings.mini_batch_size * self.settings.n
        self.updates += 1
        self.optimizer.param_groups[0]["lr"] = self.lr * min(1.0, self.updates / max(self.warmup, 1))
        shuffle = torch.Generator().manual_seed(settings.seed * 2**20 + step)
        history: list[dict[str, float]] = []
        for _ in range(settings.epochs):
            for index in torch.randperm(len(batch.ids), generator=shuffle).split(size):
                loss, metrics = self.loss(self.model, batch.rows(index), settings)
                self.optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.grad_clip)
                self.optimizer.step()
                history.append({name: value.item() for name, value in (metrics | {"grad_norm": norm}).items()})
        return {name: statistics.fmean(each[name] for each in history) for name in history[0]}


class KLInReward:
    """Subtract a KL penalty from the rewards, with a fixed or adaptive coefficient `beta`."""

    def __init__(self, settings: Settings):
        self.settings, self.beta = settings, settings.kl_coef

    def __call__(self, rewards: Rows, batch: Batch) -> tuple[Rows, dict[str, float]]:
        if not self.settings.kl_in_reward:
            return rewards, {}
        penalty = kl(batch.columns["old_log_probs"] - batch.columns["ref_log_prob"], self.settings.kl_penalty)
        penalties, beta = rows_of(penalty, batch.mask), self.beta
        # The controller tracks the KL averaged over the tokens of each sequence, then over sequences.
        current = statistics.fmean(statistics.fmean(row) for row in penalties)
        if self.settings.kl_control == "adaptive":
            error = min(max(current / self.settings.kl_target - 1, -0.2), 0.2)
            self.beta *= 1 + error * len(rewards) / self.settings.kl_horizon
        penalized = [[r - beta * d for r, d in zip(*row, strict=True)] for row in zip(rewards, penalties, strict=True)]
        return penalized, {"actor/reward_kl_penalty": current, "actor/reward_kl_penalty_coeff": beta}


def scores_of(texts: list[str], rows: list[dict[str, Any]], reward: Reward) -> list[float]:
    return [
        reward(row["data_source"], text, row["reward_model"]["ground_truth"], row["extra_info"])
        for text, row in zip(texts, rows, strict=True)
    ]


def train(settings: Settings, reward: Reward) -> Iterator[Step]:
    """Run the algorithm, one `Step` at a time: sample, score, estimate advantages, update critic and policy."""
    tokenizer = AutoTokenizer.from_pretrained(settings.actor)
    policy, reference = (load(settings.actor, AutoModelForCausalLM, settings.dtype) for _ in range(2))
    critic = load(settings.critic, AutoModelForTokenClassification, settings.dtype) if settings.critic else None
    learner = Learner(policy, actor_loss, settings.actor_lr, settings.actor_lr_warmup, settings)
    critic_learner = critic and Learner(critic, critic_loss, settings.critic_lr, settings.critic_lr_warmup, settings)
    penalize = KLInReward(settings)
    for step, samples in zip(range(1, settings.steps + 1), load_prompts(settings, tokenizer), strict=False):
        prompts, rows = [ids for ids, _ in samples], [row for _, row in samples]
        batch, rollout_log_probs = generate(policy, prompts, settings, step, tokenizer.eos_token_id)
        columns = batch.columns
        responses = [ids[m].tolist() for ids, m in zip(batch.responses, batch.mask, strict=True)]
        scores = scores_of(tokenizer.batch_decode(responses, skip_special_tokens=True), rows, reward)
        with torch.no_grad():
            columns["old_log_probs"], entropy = log_probs_and_entropy(policy, batch, settings.temperature)
            columns["ref_log_prob"], _ = log_probs_and_entropy(reference, batch, settings.temperature)
            columns["ref_distribution"] = distribution(reference, batch, settings.temperature)
            if critic:
                columns["values"] = values_of(critic, batch)
        rewards = [[0.0] * (len(tokens) - 1) + [score] for tokens, score in zip(responses, scores, strict=True)]
        rewards, metrics = penalize(rewards, batch)
        if critic:
            advantages, returns = gae(rewards, rows_of(columns["values"], batch.mask), settings.gamma, settings.lam)
        else:
            advantages, returns = grpo(rewards, settings.n, settings.norm_by_std)
        columns["advantages"], columns["returns"] = grid(advantages, entropy), grid(returns, entropy)
        metrics |= {
            "actor/entropy": (entropy.sum() / batch.mask.sum()).item(),
            "critic/score/mean": statistics.fmean(scores),
            "critic/rewards/mean": statistics.fmean(map(math.fsum, rewards)),
            "critic/advantages/max": max(map(max, advantages)),
            "critic/returns/mean": statistics.fmean(r for row in returns for r in row),
        }
        if critic_learner:
            metrics |= {f"critic/{name}": value for name, value in critic_learner.update(batch, step).items()}
        if step > settings.critic_warmup:
            metrics |= {f"actor/{name}": value for name, value in learner.update(batch, step).items()}
        yield Step(metrics, prompts, responses, rollout_log_probs, weights(policy), weights(critic))


def digit_share(data_source: str, solution: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """Score the share of characters that are digits: dense enough for an untrained model to learn from."""
    return sum(map(str.isdigit, solution)) / max(len(solution), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model with GRPO, or with PPO when a critic is given.")
    parser.add_argument("--model", required=True, help="Hugging Face folder of the policy")
    parser.add_argument("--critic", help="Hugging Face folder of the critic (token classification with one label)")
    parser.add_argument("--data", required=True, help="parquet file with the columns of `camshaft ppo`")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    group: dict[str, Any] = {} if options.critic else {"estimator": "grpo", "n": 8}
    settings = Settings(
        actor=options.model, critic=options.critic, data=options.data, steps=options.steps, actor_lr=1e-3, **group
    )
    for number, step in enumerate(train(settings, digit_share), start=1):
        shown = {name: step.metrics[name] for name in ("critic/score/mean", "actor/entropy", "actor/grad_norm")}
        print(f"step {number}:", *(f"{name} {value:.4f}" for name, value in shown.items()), sep="  ")


if __name__ == "__main__":
    main()
