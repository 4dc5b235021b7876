"""Metrics of several responses to one prompt: mean@n, best@k, worst@k and maj@k, computed exactly.

    at_n([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])        # {"mean@3": 0.5, ..., "best@2/mean": 0.83, "best@3/mean": 1.0}

Metrics @k are expectations over draws of k of the n responses without replacement. Each is the exact mean over
all C(n, k) draws, computed without sampling. For scores of 0 and 1, best@k is the unbiased pass@k (Chen et al., 2021,
arXiv:2107.03374). Each metric is averaged over prompts. The majority vote dominates the cost: with 1319 prompts, it
takes about 6 s for 32 responses per prompt and 20 s for 64.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Answer = str | None
"""Answer extracted from a response. None (no answer) counts as a distinct answer in the majority vote."""

MAX_MAJORITY_SIZE = 1000
"""Maximum n for maj@k with k < n. For larger n, the number of draws overflows float64. maj@n has no limit."""


def draw_sizes(n: int) -> list[int]:
    """Return the values of k for n responses: the powers of 2 below n, and n. Return an empty list for n = 1."""
    return [*(2**i for i in range(1, n.bit_length()) if 2**i < n), *([n] if n > 1 else [])]


def at_n(
    scores: Sequence[Sequence[float]], answers: Sequence[Sequence[Answer]] | None = None, n: int | None = None
) -> dict[str, float]:
    """Compute all metrics from the n scores of each prompt and average them over prompts.

    `maj@k` is computed only if `answers` is given. `std@n` is the population standard deviation of the scores of a
    prompt. A prompt may have less than `n` scores, and at least one: metrics @k are averaged over prompts with k
    scores, and are left out if there is none. `mean@n` and `std@n` use the scores that there are.
    """
    n = n or len(scores[0])
    metrics = {f"mean@{n}": [fmean(row) for row in scores]}
    if n > 1:
        metrics[f"std@{n}"] = [pstdev(row) for row in scores]
    for k in draw_sizes(n):
        rows = [row for row in scores if len(row) >= k]
        metrics[f"best@{k}/mean"] = [best_score(row, k) for row in rows]
        metrics[f"worst@{k}/mean"] = [-best_score([-score for score in row], k) for row in rows]
        if answers is not None and (k == n or n <= MAX_MAJORITY_SIZE):
            pairs = zip(rows, (row for row in answers if len(row) >= k), strict=True)
            metrics[f"maj@{k}/mean"] = [majority_score(row, row_answers, k) for row, row_answers in pairs]
    return {name: fmean(values) for name, values in metrics.items() if values}


def pass_at(scores: Sequence[float], k: int, threshold: float = 1.0) -> float:
    """Compute pass@k = 1 - C(n - c, k) / C(n, k), where c of the n scores are at least `threshold`."""
    num_failed = sum(score < threshold for score in scores)
    return 1 - math.comb(num_failed, k) / math.comb(len(scores), k)


def best_score(scores: Sequence[float], k: int) -> float:
    """Compute the expected maximum of k of the n scores: sum_i x_i C(i - 1, k - 1) / C(n, k).

    x_i is the i-th lowest score, counted from 1. It is the maximum of C(i - 1, k - 1) draws, which contain x_i and k -
    1 of the i - 1 lower scores.
    """
    num_draws = math.comb(len(scores), k)
    return math.fsum(x * (math.comb(i, k - 1) / num_draws) for i, x in enumerate(sorted(scores)))


def majority_score(scores: Sequence[float], answers: Sequence[Answer], k: int) -> float:
    """Compute the expected score of the majority answer among k of the n responses.

    The score of an answer is the mean score of its responses. Ties are broken uniformly at random.
    """
    scores_by_answer: dict[Answer, list[float]] = {}
    for score, answer in zip(scores, answers, strict=True):
        scores_by_answer.setdefault(answer, []).append(score)
    max_count = max(map(len, scores_by_answer.values()))
    if k == len(scores):
        return fmean(fmean(values) for values in scores_by_answer.values() if len(values) == max_count)
    means = {answer: fmean(values) for answer, values in scores_by_answer.items()}
    # The win probabilities sum to 1, so those of answers with the most common score need not be computed.
    base = Counter(means.values()).most_common(1)[0][0]
    counts = Counter(len(values) for values in scores_by_answer.values())
    sizes = tuple(sorted(counts.items()))
    return base + math.fsum(
        (means[answer] - base) * _win_probability(len(values), sizes, k)
        for answer, values in scores_by_answer.items()
        if means[answer] != base
    )


@lru_cache(maxsize=4096)
def _win_probability(count: int, sizes: tuple[tuple[int, int], ...], k: int) -> float:
    """Compute the probability that an answer with `count` responses is the majority answer of a draw of k responses.

    `sizes` contains pairs (s, number of answers with s responses) over all answers. If the draw contains j responses
    with this answer, the answer wins if every other answer is drawn at most j times. It shares the win equally with the
    t answers that are drawn exactly j times. There are C(s, i) ways to draw i of s responses, so the product

        p_s(x) + y C(s, j) x^j      with p_s(x) = sum_{i < j} C(s, i) x^i

    over the other answers is a generating function: the coefficient of x^(k - j) y^t counts the draws of the other
    k - j responses with t ties. Its weight 1 / (t + 1) is the integral of y^t from 0 to 1, which a Gauss-Legendre rule
    with enough points computes exactly. All terms are positive, so there is no cancellation in float64.
    """
    other_sizes = [(size, answers - (size == count)) for size, answers in sizes]
    total = 0.0
    for j in range(1, min(count, k) + 1):
        degree = k - j
        max_ties = min(degree // j, sum(answers for size, answers in other_sizes if size >= j))
        for y, weight in _gauss_legendre(max_ties // 2 + 1):
            ways = np.ones(1)
            for size, answers in other_sizes:
                factor = [_choose(size, i) * (y if i == j else 1.0) for i in range(min(size, j, degree) + 1)]
                ways = _multiply_power(ways, np.array(factor), answers, degree)
            total += weight * _choose(count, j) * (ways[degree] if degree < len(ways) else 0.0)
    return float(total / math.comb(sum(size * answers for size, answers in sizes), k))


def _multiply_power(polynomial: Array, factor: Array, power: int, max_degree: int) -> Array:
    """Compute `polynomial * factor ** power` without the terms above x^max_degree."""
    while power:
        if power % 2:
            polynomial = np.convolve(polynomial, factor)[: max_degree + 1]
        power //= 2
        factor = np.convolve(factor, factor)[: max_degree + 1] if power else factor
    return polynomial


@lru_cache(maxsize=256)
def _gauss_legendre(points: int) -> list[tuple[float, float]]:
    """Return (node, weight) pairs of the Gauss-Legendre rule on [0, 1], which is exact up to y^(2 points - 1)."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    return [((x + 1) / 2, w / 2) for x, w in zip(nodes.tolist(), weights.tolist(), strict=True)]


@cache
def _choose(n: int, k: int) -> float:
    return float(math.comb(n, k))
