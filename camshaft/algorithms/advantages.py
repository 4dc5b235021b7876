"""Advantage estimators, which the trainer calls once per step.

    estimator = ESTIMATORS["grpo"]
    advantages, returns = estimator(AdvantageInputs(rewards, mask, groups=groups), AdvantageOptions())

Rewards, values and results are (B, T) grids with one row per sequence and left-aligned responses. `mask` (B, T) is
True at the tokens that the policy sampled. Entries at other tokens (padding, tool output), including rewards, are never
read, and the results are 0 there. `groups` (B,) int64 has the same value for all responses to one prompt.

`returns` is the regression target of a critic. It is advantages plus values for GAE, the total reward R of the row for
estimators with one advantage per row, and the reward-to-go otherwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from camshaft.algorithms.masked import masked_sum, whiten

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator, which raises ValueError if an optional one that it reads is missing."""

    rewards: Tensor
    """(B, T) float: reward of each token."""
    mask: Tensor
    """(B, T) bool: True at tokens that the policy sampled."""
    values: Tensor | None = None
    """(B, T) float: values of the critic."""
    groups: Tensor | None = None
    """(B,) int64: equal for all responses to one prompt."""
    baselines: Tensor | None = None
    """(B,) float: total reward of the greedy response to the same prompt."""
    reward_parts: Tensor | None = None
    """(B, K) float: several rewards of each row; NaN if the row lacks one of them."""
    old_log_probs: Tensor | None = None
    """(B, T) float: log-probs of the sampled tokens under the policy before the update."""
    sum_pi_squared: Tensor | None = None
    """(B, T) float: sum of the squared probabilities of the vocabulary under this policy, at each token."""
    importance_weights: Tensor | None = None
    """(B, T) float: weights of rollout correction by which the policy loss is multiplied. None without it."""


@dataclass(frozen=True)
class AdvantageOptions:
    """Hyperparameters from the config. Each estimator reads only those in its formula."""

    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    """Divide the advantages of GRPO and its variants by the standard deviation of the group."""
    part_weights: tuple[float, ...] = ()
    """Weight of each column of `reward_parts`; empty for equal weights."""


Estimator = Callable[[AdvantageInputs, AdvantageOptions], Result]
"""`estimator(inputs, options) -> (advantages, returns)`"""


# -- estimators with a critic ----------------------------------------------------------------------------------


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> Result:
    """Generalized advantage estimation (GAE), computed from right to left over the masked-in tokens:

    delta_t = r_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}

    t+1 denotes the next masked-in token; masked-out tokens between the two are skipped. `returns` is A + V before A is
    whitened over all masked-in tokens of the batch. All tensors are (B, T).
    Schulman et al., arXiv:1506.02438.
    """
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(len(values))
    next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return whiten(advantages, mask), torch.where(mask, advantages + values, 0)


# -- estimators with the reward-to-go ----------------------------------------------------------------------------


@torch.no_grad()
def reinforce_plus_plus(rewards: Tensor, mask: Tensor, *, gamma: float) -> Result:
    """REINFORCE++: whiten the reward-to-go G over all masked-in tokens of the batch; `returns` is G.

    G_t = r_t + gamma G_{t+1}, where t+1 is the next masked-in token. All tensors are (B, T).
    Hu et al., arXiv:2501.03262.
    """
    returns = _reward_to_go(rewards, mask, gamma)
    return whiten(returns, mask), returns


@torch.no_grad()
def remax(rewards: Tensor, mask: Tensor, baselines: Tensor) -> Result:
    """ReMax: A_t = G_t - b with the undiscounted reward-to-go G_t = sum_{s >= t} r_s; `returns` is G.

    b is the total reward of the greedy response to the same prompt. `baselines` is (B,); other tensors are (B, T).
    Li et al., arXiv:2310.10505.
    """
    returns = _reward_to_go(rewards, mask, gamma=1.0)
    return torch.where(mask, returns - baselines[:, None], 0), returns


# -- estimators with groups of responses to one prompt --------------------------------------------------------
# These estimators compute one advantage per row from its total reward R and broadcast it to the tokens of the row;
# `returns` is R. A group of one row has baseline 0 and standard deviation 1.


@torch.no_grad()
def group_advantages(
    scores: Tensor, groups: Tensor, *, norm_by_std: bool = True, leave_one_out: bool = False
) -> Tensor:
    """Compute an advantage per row from the scores R of its group: A = (R - b_g) / (std_g + 1e-6) as in GRPO.

    b_g is the mean R of the group, or with `leave_one_out` that of its other rows, and std_g is unbiased. Without
    `norm_by_std`, A = R - b_g. The arithmetic is in float64. `scores`, `groups` and the result are (B,).
    """
    totals, members = scores.double(), _Groups(groups)
    mean = members.mean(totals)
    baseline = members.mean_of_others(totals) if leave_one_out else mean
    advantages = totals - baseline
    if norm_by_std:
        advantages = advantages / (members.std(totals) + 1e-6)
    return advantages.to(scores.dtype)


@torch.no_grad()
def grpo(rewards: Tensor, mask: Tensor, groups: Tensor, *, norm_by_std: bool = True) -> Result:
    """GRPO: A = (R - mean_g) / (std_g + 1e-6) with the unbiased std_g; without `norm_by_std` (Dr.GRPO) A = R - mean_g.

    `groups` is (B,); all other tensors are (B, T).
    Shao et al., arXiv:2402.03300; Liu et al., arXiv:2503.20783.
    """
    totals = _totals(rewards, mask)
    return _broadcast(group_advantages(totals, groups, norm_by_std=norm_by_std), totals, rewards, mask)


@torch.no_grad()
def rloo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Result:
    """RLOO: subtract the mean R of the other rows in the group from the R of each row.

    `groups` is (B,); all other tensors are (B, T). Ahmadian et al., arXiv:2402.14740.
    """
    totals = _totals(rewards, mask)
    advantages = group_advantages(totals, groups, norm_by_std=False, leave_one_out=True)
    return _broadcast(advantages, totals, rewards, mask)


@torch.no_grad()
def reinforce_plus_plus_baseline(rewards: Tensor, mask: Tensor, groups: Tensor) -> Result:
    """REINFORCE++ with a baseline: whiten R - mean_g over all masked-in tokens of the batch.

    `groups` is (B,); all other tensors are (B, T). Hu et al., arXiv:2501.03262.
    """
    totals = _totals(rewards, mask)
    advantages, returns = _broadcast(group_advantages(totals, groups, norm_by_std=False), totals, rewards, mask)
    return whiten(advantages, mask), returns


@torch.no_grad()
def opo(rewards: Tensor, mask: Tensor, groups: Tensor) -> Result:
    """OPO: A = R - b_g with the length-weighted mean b_g = sum_g len R / sum_g len.

    len is the number of masked-in tokens of a row. `groups` is (B,); all other tensors are (B, T). Hao et al.,
    arXiv:2505.23585.
    """
    totals, members = _totals(rewards, mask), _Groups(groups)
    lengths = mask.sum(1).double()
    baseline = members.sum(lengths * totals) / members.sum(lengths).clamp(min=1)
    return _broadcast(totals - torch.where(members.size > 1, baseline, 0.0), totals, rewards, mask)


@torch.no_grad()
def turn_return(
    rewards: Tensor, mask: Tensor, groups: Tensor, *, gamma: float = 1.0, norm_by_std: bool = True
) -> Result:
    """Compare the return of each turn of an episode with that of the same turn in the other episodes of the group.

    G_k = sum_{j >= k} gamma^(j - k) r_j                    A_k = (G_k - mean_g G_k) / (std_g G_k + 1e-6)

    A turn k is a run of masked-in tokens, and r_k is the sum of their rewards. The mean and the unbiased std are over
    the episodes of the group that have a turn k. If there is only one, its A_k is 0, because nothing is compared with
    it. Without `norm_by_std`, A_k is not divided. `returns` is G_k at the tokens of turn k. `groups` is (B,); all other
    tensors are (B, T).
    """
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    turns = begins.cumsum(1) - 1
    index = torch.where(mask, turns, 0)
    count = max(int(begins.sum(1).max()), 1)
    shape = (len(rewards), count)
    turn_rewards = rewards.new_zeros(shape, dtype=torch.float64)
    turn_rewards.scatter_add_(1, index, torch.where(mask, rewards, 0).double())
    exists = torch.arange(count, device=mask.device) < begins.sum(1, keepdim=True)
    returns = _reward_to_go(turn_rewards, exists, gamma)
    turn_groups = (groups[:, None] * count + torch.arange(count, device=groups.device)).expand(shape)
    advantages = torch.zeros_like(returns)
    advantages[exists] = group_advantages(returns[exists], turn_groups[exists], norm_by_std=norm_by_std)
    advantages[exists] *= _Groups(turn_groups[exists]).size > 1
    grids = [torch.where(mask, grid.gather(1, index).to(rewards.dtype), 0) for grid in (advantages, returns)]
    return grids[0], grids[1]


@torch.no_grad()
def grpo_passk(rewards: Tensor, mask: Tensor, groups: Tensor, *, norm_by_std: bool = True) -> Result:
    """GRPO for pass@k: A = (max_g R - max of the other R) / (std_g + 1e-6) for the best row, and 0 for the other rows.

    This is the leave-one-out advantage of the objective max_g R. If several rows have the highest R, each A of the
    group is 0. Without `norm_by_std`, A is not divided. `groups` is (B,); all other tensors are (B, T).
    Tang et al., arXiv:2503.19595.
    """
    totals, members = _totals(rewards, mask), _Groups(groups)
    is_best = totals == members.max(totals)
    runner_up = members.max(totals.masked_fill(is_best, -torch.inf))
    is_only_best = is_best & (members.sum(is_best.double()) == 1)
    advantages = torch.where(is_only_best, totals - torch.where(members.size > 1, runner_up, 0.0), 0.0)
    if norm_by_std:
        advantages = advantages / (members.std(totals) + 1e-6)
    return _broadcast(advantages, totals, rewards, mask)


@torch.no_grad()
def gdpo(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    reward_parts: Tensor,
    *,
    part_weights: Sequence[float] = (),
    norm_by_std: bool = True,
) -> Result:
    """GDPO: normalize each reward r_k within its groups as GRPO does, and whiten the weighted sum over the batch.

    A = whiten(sum_k w_k (r_k - mean_g r_k) / (std_g r_k + 1e-6))

    `reward_parts` (B, K) contains r_k. A row without r_k (NaN) is not part of the statistics of its group, and the
    term is 0. w_k are the `part_weights`, or 1. Whitening is over all masked-in tokens. `norm_by_std` has the same
    meaning as for GRPO. `rewards` and `mask` are (B, T); `rewards` determine only `returns`.
    Liu et al., arXiv:2601.05242.
    """
    total = reward_parts.new_zeros(len(groups), dtype=torch.float64)
    for part, weight in zip(
        reward_parts.double().unbind(1), part_weights or [1.0] * reward_parts.shape[1], strict=True
    ):
        has_part = ~part.isnan()
        total[has_part] += weight * group_advantages(part[has_part], groups[has_part], norm_by_std=norm_by_std)
    advantages, returns = _broadcast(total, _totals(rewards, mask), rewards, mask)
    return whiten(advantages, mask), returns


@torch.no_grad()
def gpg(rewards: Tensor, mask: Tensor, groups: Tensor) -> Result:
    """GPG: A = alpha (R - mean_g), alpha = number of rows / number of rows with R != 0.

    alpha compensates for rows without a gradient. Rows without masked-in tokens do not count. With R = 0 in all rows,
    A is 0. The paper counts as rows without a gradient those of groups with equal R; this is verl's definition.
    `groups` is (B,); all other tensors are (B, T). Chu et al., arXiv:2504.02546.
    """
    totals = _totals(rewards, mask)
    alpha = mask.any(dim=1).sum() / (totals != 0).sum().clamp(min=1)
    return _broadcast(alpha * (totals - _Groups(groups).mean(totals)), totals, rewards, mask)


@torch.no_grad()
def maxrl(rewards: Tensor, mask: Tensor, groups: Tensor) -> Result:
    """MaxRL: A = (R - mean_g) / (mean_g + 1e-6), and 0 in groups whose mean is not positive.

    For R in {0, 1} and n rows in a group, it follows the gradient of log p = -sum_k (1 - p)^k / k up to k = n - 1,
    where p is the probability of R = 1. R must not be negative. A group of one has A = R. `groups` is (B,); all other
    tensors are (B, T). Tajwar et al., arXiv:2602.02710.
    """
    totals, members = _totals(rewards, mask), _Groups(groups)
    mean = members.mean(totals)
    normalized = torch.where(mean > 0, (totals - mean) / (mean + 1e-6), 0.0)
    return _broadcast(torch.where(members.size > 1, normalized, totals), totals, rewards, mask)


# -- estimators with a baseline per token ----------------------------------------------------------------------


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    importance_weights: Tensor | None = None,
) -> Result:
    """Optimal token baseline: A_t = G_t - b_t with the reward-to-go G_t = sum_{s >= t} r_s; `returns` is G.

    b_t = sum_g W_t G_t / sum_g W_t        W_t = sum_{s <= t} w_s^2 (1 - 2 pi_s + sum_v pi_s(v)^2)

    W_t approximates the squared norm of the gradient of the log-prob of the tokens up to t: each term is that of
    log pi_s with respect to its logits. This b_t minimizes the variance of the gradient. pi_s is the probability of the
    sampled token, sum_v that of `sum_pi_squared` over the vocabulary, and w_s its importance weight, or 1. Positions t
    are those in the response, and masked-out tokens count nowhere. At a position that only one row of the group
    reaches, b_t = 0. `groups` is (B,); all other tensors are (B, T). Li et al., arXiv:2602.07078.
    """
    members, returns = _Groups(groups), _reward_to_go(rewards.double(), mask, gamma=1.0)
    energy = (1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()).clamp(min=0)  # rounding can be below 0
    if importance_weights is not None:
        energy = energy * importance_weights.double().square()
    weights = torch.where(mask, torch.where(mask, energy, 0).cumsum(dim=1), 0)
    counts = members.sum(mask.double())
    mean = members.sum(returns) / counts.clamp(min=1)
    # Relative to the mean, equal returns cancel exactly. If all weights are 0, the baseline is the mean.
    deviations = torch.where(mask, returns - mean, 0)
    baseline = mean + members.sum(weights * deviations) / (members.sum(weights) + 1e-8)
    advantages = torch.where(mask, returns - torch.where(counts > 1, baseline, 0), 0)
    return advantages.to(rewards.dtype), returns.to(rewards.dtype)


@torch.no_grad()
def tir_optimal_token_baseline(
    rewards: Tensor,
    mask: Tensor,
    groups: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    importance_weights: Tensor | None = None,
) -> Result:
    """Optimal token baseline for responses with tool output: t counts the masked-in tokens of a row only.

    Responses with tool output of different lengths are thus compared after the same number of sampled tokens. Without
    masked-out tokens, it equals `optimal_token_baseline`, whose arguments it has. Li et al., arXiv:2602.07078.
    """
    order = (~mask).long().argsort(dim=1, stable=True)  # masked-in tokens first
    grids = [
        None if grid is None else grid.gather(1, order)
        for grid in (rewards, mask, old_log_probs, sum_pi_squared, importance_weights)
    ]
    inputs: list[Any] = [*grids[:2], groups, *grids[2:]]
    advantages, returns = (torch.zeros_like(grid).scatter(1, order, grid) for grid in optimal_token_baseline(*inputs))
    return advantages, returns


class _Groups:
    """Statistics per group of a (B,) or (B, T) tensor. Each row of the result has the value of its group."""

    def __init__(self, groups: Tensor):
        untyped: Any = groups  # torch does not annotate `unique`
        names, inverse = untyped.unique(return_inverse=True)
        self._num_groups = len(names)
        self._inverse: Tensor = inverse
        self.size = torch.bincount(self._inverse, minlength=self._num_groups)[self._inverse]

    def sum(self, x: Tensor) -> Tensor:
        return x.new_zeros(self._num_groups, *x.shape[1:]).index_add(0, self._inverse, x)[self._inverse]

    def max(self, x: Tensor) -> Tensor:
        return x.new_full((self._num_groups,), -torch.inf).scatter_reduce(0, self._inverse, x, "amax")[self._inverse]

    def std(self, x: Tensor) -> Tensor:
        """Return the unbiased standard deviation over the group of each row; 1 for a group of one."""
        variance = self.sum((x - self.mean(x)).square()) / (self.size - 1).clamp(min=1)
        return torch.where(self.size > 1, variance.sqrt(), 1.0)

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over the group of each row; 0 for a group of one."""
        return torch.where(self.size > 1, self.sum(x) / self.size, 0.0)

    def mean_of_others(self, x: Tensor) -> Tensor:
        """Return the mean over the other rows in the group of each row; 0 for a group of one."""
        return torch.where(self.size > 1, (self.sum(x) - x) / (self.size - 1).clamp(min=1), 0.0)


def _totals(rewards: Tensor, mask: Tensor) -> Tensor:
    """Sum the rewards of each row, (B, T) -> (B,), in float64 so that equal rewards of a group cancel exactly."""
    return masked_sum(rewards.double(), mask, dim=1)


def _broadcast(advantages: Tensor, totals: Tensor, rewards: Tensor, mask: Tensor) -> Result:
    """Broadcast (B,) advantages and totals to masked (B, T) grids in the dtype of the rewards."""
    grids = [torch.where(mask, row[:, None].to(rewards.dtype), 0) for row in (advantages, totals)]
    return grids[0], grids[1]


def _reward_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    returns = torch.zeros_like(rewards)
    running = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return torch.where(mask, returns, 0)


def _required(inputs: AdvantageInputs, name: str) -> Tensor:
    tensor = getattr(inputs, name)
    if tensor is None:
        raise ValueError(f"this advantage estimator requires `{name}`; pass AdvantageInputs(..., {name}=...)")
    return tensor


def _token_baseline_inputs(x: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    names = "groups", "old_log_probs", "sum_pi_squared"
    groups, old_log_probs, sum_pi_squared = (_required(x, name) for name in names)
    return x.rewards, x.mask, groups, old_log_probs, sum_pi_squared


ESTIMATORS: dict[str, Estimator] = {
    "gae": lambda x, o: gae(x.rewards, _required(x, "values"), x.mask, gamma=o.gamma, lam=o.lam),
    "grpo": lambda x, o: grpo(x.rewards, x.mask, _required(x, "groups"), norm_by_std=o.norm_by_std),
    "rloo": lambda x, _: rloo(x.rewards, x.mask, _required(x, "groups")),
    "reinforce_plus_plus": lambda x, o: reinforce_plus_plus(x.rewards, x.mask, gamma=o.gamma),
    "reinforce_plus_plus_baseline": lambda x, _: reinforce_plus_plus_baseline(
        x.rewards, x.mask, _required(x, "groups")
    ),
    "remax": lambda x, _: remax(x.rewards, x.mask, _required(x, "baselines")),
    "opo": lambda x, _: opo(x.rewards, x.mask, _required(x, "groups")),
    "grpo_passk": lambda x, o: grpo_passk(x.rewards, x.mask, _required(x, "groups"), norm_by_std=o.norm_by_std),
    "gdpo": lambda x, o: gdpo(
        x.rewards,
        x.mask,
        _required(x, "groups"),
        _required(x, "reward_parts"),
        part_weights=o.part_weights,
        norm_by_std=o.norm_by_std,
    ),
    "turn_return": lambda x, o: turn_return(
        x.rewards, x.mask, _required(x, "groups"), gamma=o.gamma, norm_by_std=o.norm_by_std
    ),
    "gpg": lambda x, _: gpg(x.rewards, x.mask, _required(x, "groups")),
    "maxrl": lambda x, _: maxrl(x.rewards, x.mask, _required(x, "groups")),
    "optimal_token_baseline": lambda x, _: optimal_token_baseline(*_token_baseline_inputs(x), x.importance_weights),
    "tir_optimal_token_baseline": lambda x, _: tir_optimal_token_baseline(
        *_token_baseline_inputs(x), x.importance_weights
    ),
}
"""Estimator of each value of `algorithm.adv_estimator`."""
