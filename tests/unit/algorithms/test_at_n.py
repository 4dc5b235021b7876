"""mean@n and related metrics, compared with hand-worked numbers and with an enumeration of all draws."""

import random
from collections import Counter
from itertools import combinations
from statistics import fmean

import pytest

from camshaft.algorithms.at_n import Answer, at_n, best_score, draw_sizes, majority_score, pass_at


def test_draws_are_the_powers_of_two_and_all() -> None:
    assert [draw_sizes(n) for n in (1, 2, 3, 4, 5, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 5], [2, 4, 8]]


def test_best_of_two_of_three_by_hand() -> None:
    # The pairs of 1, 2, 6 are (1, 2), (1, 6), (2, 6): their highest are 2, 6, 6.
    assert best_score([2.0, 6.0, 1.0], 2) == pytest.approx(14 / 3)
    assert best_score([2.0, 6.0, 1.0], 1) == pytest.approx(3)
    assert best_score([2.0, 6.0, 1.0], 3) == 6


def test_best_of_right_and_wrong_is_pass_at_k() -> None:
    # 3 of 10 are correct: 1 - C(7, 4) / C(10, 4) = 1 - 35 / 210.
    assert best_score([1.0] * 3 + [0.0] * 7, 4) == pytest.approx(5 / 6)


def test_majority_by_hand() -> None:
    # Two are a (correct), one b, one c. Pairs: aa -> 1; ab, ab, ac, ac -> a tie, 1/2 each; bc -> 0. (1 + 2) / 6.
    scores, answers = [1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "c"]
    assert majority_score(scores, answers, 2) == pytest.approx(0.5)
    # Triples: aab, aac -> 1; abc, abc -> a tie of three, 1/3 each. (2 + 2/3) / 4.
    assert majority_score(scores, answers, 3) == pytest.approx(2 / 3)
    assert majority_score(scores, answers, 4) == 1


def test_an_answer_scores_the_mean_of_its_responses() -> None:
    # One answer with different rewards, for its format, say.
    assert majority_score([1.0, 0.5], ["7", "7"], 2) == pytest.approx(0.75)
    assert majority_score([0.0, 0.0, 1.0], [None, None, "7"], 3) == 0


def test_a_response_of_two_prompts_by_hand() -> None:
    result = at_n([[1.0, 0.0], [3.0, 3.0]], [["a", "b"], ["c", "c"]])
    assert result == {
        "mean@2": 1.75,  # (0.5 + 3) / 2
        "std@2": 0.25,  # (0.5 + 0) / 2
        "best@2/mean": 2.0,  # (1 + 3) / 2
        "worst@2/mean": 1.5,  # (0 + 3) / 2
        "maj@2/mean": 1.75,  # a tie of a and b: 0.5; and 3
    }


def test_metrics_at_k_need_k_responses_of_a_prompt() -> None:
    result = at_n([[1.0, 0.0, 4.0], [3.0, 2.0], [5.0]], [["a", "b", "b"], ["c", "d"], ["e"]], n=3)
    assert result == pytest.approx(
        {
            "mean@3": (5 / 3 + 2.5 + 5) / 3,
            "std@3": ((26 / 9) ** 0.5 + 0.5 + 0) / 3,
            "best@2/mean": ((1 + 4 + 4) / 3 + 3) / 2,
            "worst@2/mean": ((0 + 1 + 0) / 3 + 2) / 2,
            "maj@2/mean": ((0.5 * (1 + 2) + 0.5 * (1 + 2) + 2) / 3 + 2.5) / 2,  # the answer b scores 2
            "best@3/mean": 4.0,
            "worst@3/mean": 0.0,
            "maj@3/mean": 2.0,
        }
    )
    assert at_n([[1.0], [2.0]], n=2) == {"mean@2": 1.5, "std@2": 0.0}


def test_one_response_has_only_a_mean() -> None:
    assert at_n([[1.0], [0.0]], [["a"], ["b"]]) == {"mean@1": 0.5}
    assert not any("maj" in name for name in at_n([[1.0, 0.0]]))


def enumerated_majority(scores: list[float], answers: list[Answer], k: int) -> float:
    """Compute the same value by enumerating all draws."""
    outcomes = []
    for drawn in combinations(range(len(scores)), k):
        votes = Counter(answers[i] for i in drawn)
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        of = [fmean(s for s, a in zip(scores, answers, strict=True) if a == winner) for winner in winners]
        outcomes.append(fmean(of))
    return fmean(outcomes)


def test_majorities_of_many_responses() -> None:
    # 32 correct answers and 32 distinct wrong ones: a draw of 2 has two correct ones, or a tie.
    answers = ["right"] * 32 + [f"wrong {i}" for i in range(32)]
    scores = [1.0] * 32 + [0.0] * 32
    assert majority_score(scores, answers, 2) == pytest.approx((32 * 31 / 2 + 32 * 32 / 2) / (64 * 63 / 2), rel=1e-12)
    # 63 wrong ones and one correct: a draw of 32 has it with probability 1/2, tied with 31 others.
    answers = ["right", *(f"wrong {i}" for i in range(63))]
    assert majority_score([1.0] + [0.0] * 63, answers, 32) == pytest.approx(1 / 2 / 32, rel=1e-12)
    # Two answers among 500: one half by symmetry, for any draw.
    assert majority_score([1.0] * 500 + [0.0] * 500, ["a"] * 500 + ["b"] * 500, 512) == pytest.approx(0.5, rel=1e-9)
    many = at_n([[1.0] * 600 + [0.0] * 599], [["a"] * 600 + ["b"] * 599])
    assert [name for name in many if "maj" in name] == ["maj@1199/mean"]
    assert many["maj@1199/mean"] == 1.0


@pytest.mark.parametrize("seed", range(20))
def test_every_draw_counts_once(seed: int) -> None:
    chance = random.Random(seed)
    n = chance.randint(2, 9)
    scores: list[float] = [chance.choice([0.0, 0.5, 1.0, -2.0]) for _ in range(n)]
    answers: list[Answer] = [chance.choice(["a", "b", "c", None]) for _ in range(n)]
    for k in range(1, n + 1):
        assert best_score(scores, k) == pytest.approx(fmean(max(drawn) for drawn in combinations(scores, k)))
        assert majority_score(scores, answers, k) == pytest.approx(enumerated_majority(scores, answers, k))
    result = at_n([scores])
    assert result["worst@2/mean"] == pytest.approx(fmean(min(drawn) for drawn in combinations(scores, 2)))


def test_many_responses_with_many_answers_agree_with_simulated_draws() -> None:
    # 64 responses, answers of every size from 1 to 10 and nine more single ones: C(64, 32) is about 10^18 draws.
    answers = [*(str(i) for i in range(1, 11) for _ in range(i)), *(f"x{i}" for i in range(9))]
    scores = [float(answer == "10") for answer in answers]
    chance, shares = random.Random(0), []
    for _ in range(4000):
        votes = Counter(chance.sample(answers, 32))
        most = max(votes.values())
        winners = [answer for answer, count in votes.items() if count == most]
        shares.append(winners.count("10") / len(winners))
    assert majority_score(scores, answers, 32) == pytest.approx(fmean(shares), abs=0.03)
    assert majority_score(scores, answers, 64) == 1


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_fraction_of_passing_draws(k: int) -> None:
    scores = [0.0, 0.5, 1.0, 0.9, 0.2]
    for least in (0.1, 0.5, 0.95, 2.0):
        every = list(combinations(scores, k))
        assert pass_at(scores, k, least) == pytest.approx(sum(max(draw) >= least for draw in every) / len(every))
