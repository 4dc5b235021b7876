"""Sampling, compared with hand-worked numbers, transformers' warpers, and splitmix64 on Python integers."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from camshaft.rollout import sampling
from camshaft.rollout.sampling import draw, restrict, row_seeds, sample_greedy, uniform_numbers

INF = math.inf


def logs(*probs: float) -> Tensor:
    return torch.tensor([probs], dtype=torch.float64).log()


# -- restrict -------------------------------------------------------------------------------------


def test_default_sampling_leaves_logits_unchanged() -> None:
    logits = torch.randn(3, 9)
    assert torch.equal(restrict(logits, temperature=1.0), logits)
    assert torch.equal(restrict(logits, 1.0, top_k=-1, top_p=1.0), logits)
    assert torch.equal(restrict(logits, 1.0, top_k=50), logits)


def test_half_precision_logits_become_float32_and_float64_stays() -> None:
    assert restrict(torch.randn(2, 5).bfloat16(), 0.7).dtype == torch.float32
    assert restrict(torch.randn(2, 5).double(), 0.7).dtype == torch.float64


def test_top_p_keeps_the_likeliest_tokens_up_to_its_mass() -> None:
    # 0.5 is not enough for 0.6, 0.5 + 0.3 is: two tokens stay.
    assert restrict(logs(0.15, 0.5, 0.05, 0.3), 1.0, top_p=0.6).isfinite().tolist() == [[False, True, False, True]]
    # 0.5 is enough for 0.5.
    assert restrict(logs(0.15, 0.5, 0.05, 0.3), 1.0, top_p=0.49).isfinite().tolist() == [[False, True, False, False]]
    # The likeliest token remains for any top_p.
    assert restrict(logs(0.15, 0.5, 0.05, 0.3), 1.0, top_p=1e-9).isfinite().sum() == 1


def test_top_p_counts_probability_after_temperature_and_top_k() -> None:
    # At temperature 0.5 the probabilities are squared: 0.25, 0.09, 0.0225, 0.0025 of a total of 0.365. The first has
    # 0.685 of it, so top_p=0.6 keeps one token; at temperature 1 it keeps two.
    assert restrict(logs(0.5, 0.3, 0.15, 0.05), 0.5, top_p=0.6).isfinite().sum() == 1
    # Of the best two, the first has 0.5 / 0.8 = 0.625: enough for 0.6, unlike without top_k.
    assert restrict(logs(0.5, 0.3, 0.15, 0.05), 1.0, top_k=2, top_p=0.6).isfinite().sum() == 1


def test_tokens_that_tie_at_the_edge_stay_together() -> None:
    assert restrict(logs(0.4, 0.2, 0.2, 0.2), 1.0, top_k=2).isfinite().tolist() == [[True] * 4]
    assert restrict(logs(0.4, 0.2, 0.2, 0.2), 1.0, top_p=0.5).isfinite().tolist() == [[True] * 4]
    assert restrict(logs(0.4, 0.3, 0.15, 0.15), 1.0, top_p=0.5).isfinite().sum() == 2


def test_a_flat_row_needs_more_candidates_than_a_steep_one(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    flat, steep = torch.randn(64, generator=random), 20 * torch.randn(64, generator=random)
    expected = restrict(torch.stack([flat, steep]), 1.0, top_p=0.9)
    monkeypatch.setattr(sampling, "NUCLEUS_CANDIDATES", 4)
    assert torch.equal(restrict(torch.stack([flat, steep]), 1.0, top_p=0.9), expected)
    assert expected.isfinite().sum(-1)[0] > 4 >= expected.isfinite().sum(-1)[1]


@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
)
def test_restrict_matches_transformers(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    logits = 4 * torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))
    steps = [TemperatureLogitsWarper(temperature)]
    steps += [TopKLogitsWarper(top_k)] if top_k else []
    steps += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    no_tokens: Any = torch.zeros(3, 1, dtype=torch.long)
    unrestricted: Any = logits
    expected = LogitsProcessorList(steps)(no_tokens, unrestricted)
    torch.testing.assert_close(restrict(logits, temperature, top_k, top_p), expected)


# -- draw -----------------------------------------------------------------------------------------


def test_the_uniform_picks_by_the_cumulative_distribution() -> None:
    scores = logs(0.25, 0.0, 0.5, 0.25).expand(7, 4)
    uniforms = torch.tensor([0.0, 0.2499, 0.2501, 0.5, 0.7499, 0.7501, 1 - 2.0**-53], dtype=torch.float64)
    tokens, log_probs = draw(scores, uniforms)
    assert tokens.tolist() == [0, 0, 2, 2, 2, 3, 3]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.25, 0.25, 0.5, 0.5, 0.5, 0.25, 0.25]))


@pytest.mark.parametrize("size", [3, sampling.MAX_SINGLE_PASS, sampling.MAX_SINGLE_PASS + 1, 10 * sampling.BLOCK, 2000])
def test_excluded_tokens_are_never_sampled(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    scores = torch.randn(400, size, generator=random)
    scores[torch.rand(400, size, generator=random) < 0.7] = -INF
    scores[:, -1], scores[:, size // 2] = -INF, 0.0
    edges = torch.tensor([0.0, 2.0**-53, 0.5, 1 - 2.0**-53], dtype=torch.float64)
    for uniforms in (edges.repeat(100), torch.rand(400, generator=random, dtype=torch.float64)):
        tokens, log_probs = draw(scores, uniforms)
        assert scores.gather(-1, tokens[:, None]).isfinite().all()
        expected = scores.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        # Sums of up to 2000 exponentials lose some eps of the probability, and its logarithm is rounded once more.
        bound = torch.finfo(torch.float32).eps * (16 + expected.abs())
        assert ((log_probs.double() - expected).abs() <= bound).all()


def test_the_tail_is_not_lost_in_rounding() -> None:
    # One token has half the mass, and 300000 share the rest at 1.7e-6 each; float32 sums would misplace the last ones
    # by hundreds of tokens. At u = 0.5 + i / 400 the token is 300000 * i / 200.
    scores = torch.cat([torch.tensor([math.log(300_000)]), torch.zeros(300_000)])
    uniforms = 0.5 + torch.arange(1, 200, dtype=torch.float64) / 400
    tokens, _ = draw(scores.expand(199, -1), uniforms)
    torch.testing.assert_close(tokens.double(), torch.arange(1, 200).double() * 1500, atol=2, rtol=0)


@pytest.mark.parametrize("size", [100, 40_000])
def test_draw_follows_the_distribution_to_the_last_token(size: int) -> None:
    # At u = i / 500 a uniform row gives token size * i / 500.
    uniforms = torch.linspace(0, 1, 501, dtype=torch.float64)[:500]
    tokens, _ = draw(torch.zeros(500, size), uniforms)
    torch.testing.assert_close(tokens.double(), torch.arange(500).double() * size / 500, atol=1, rtol=0)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    scores = 3 * torch.randn(300, 2000, generator=random)
    uniforms = torch.rand(300, generator=random, dtype=torch.float64)
    in_blocks = draw(scores, uniforms)
    monkeypatch.setattr(sampling, "MAX_SINGLE_PASS", 2000)
    at_once = draw(scores, uniforms)
    assert torch.equal(in_blocks[0], at_once[0])
    assert torch.equal(in_blocks[1], at_once[1])


@pytest.mark.parametrize("size", [10, 2000])
def test_non_finite_scores_give_non_finite_log_probs(size: int) -> None:
    scores = torch.zeros(2, size)
    scores[0, 3] = math.nan
    tokens, log_probs = draw(scores, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert log_probs.isfinite().tolist() == [False, True]
    assert (tokens < size).all()


def test_greedy_takes_the_first_argmax_at_temperature_one() -> None:
    tokens, log_probs = sample_greedy(torch.tensor([[0.1, 0.4, 0.4, 0.1], [0.2, 0.1, 0.1, 0.6]]).log())
    assert tokens.tolist() == [1, 3]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([0.4, 0.6]))


def test_greedy_compares_logits_not_rounded_probabilities() -> None:
    # 100 and the next float32 above it: their difference of 1e-5 barely changes the probabilities.
    logits = torch.tensor([[100.0, torch.nextafter(torch.tensor(100.0), torch.tensor(INF)).item()]])
    assert sample_greedy(logits)[0].tolist() == [1]


# -- uniforms -------------------------------------------------------------------------------------

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_mix_is_splitmix64() -> None:
    # The first outputs of splitmix64 from state 1234567, as published with the algorithm's reference code.
    state = torch.tensor([1234567]) + torch.arange(1, 4) * torch.tensor(GOLDEN - 2**64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [int(x) & MASK for x in sampling._mix(state)] == published


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 987654321])
def test_uniform_is_the_documented_integer_hash(seed: int) -> None:
    positions = [0, 1, 2, 1000, 2**40]
    expected = [(mix((mix((seed + GOLDEN) & MASK) + (p + 1) * GOLDEN) & MASK) >> 11) * 2.0**-53 for p in positions]
    actual = uniform_numbers(torch.tensor([seed] * 5), torch.tensor(positions))
    assert actual.dtype == torch.float64
    assert actual.tolist() == expected


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    count = 100_000
    for seeds, positions in (
        (torch.arange(count), torch.zeros(count, dtype=torch.int64)),
        (torch.zeros(count, dtype=torch.int64), torch.arange(count)),
    ):
        u = uniform_numbers(seeds, positions)
        assert u.min() >= 0
        assert u.max() < 1
        counts = torch.histc(u.float(), bins=50, min=0, max=1).double()
        # 49 degrees of freedom: chi-square above 100 has a probability below 1e-4.
        assert ((counts - count / 50) ** 2 / (count / 50)).sum() < 100
        # Neighbours are uncorrelated: the standard error is 1 / sqrt(100000).
        assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.015


def test_a_rows_uniform_does_not_depend_on_its_batch() -> None:
    seeds, positions = torch.arange(50) * 7919, torch.arange(50) % 9
    together = uniform_numbers(seeds, positions)
    alone = torch.cat([uniform_numbers(seeds[i : i + 1], positions[i : i + 1]) for i in range(50)])
    assert torch.equal(together, alone)


def test_row_seeds_differ_between_rows_calls_and_seeds() -> None:
    seeds = torch.cat([row_seeds(seed, call, 100) for seed in (0, 1, -3) for call in (1, 2, 3)])
    assert len(seeds.unique()) == 900
    assert torch.equal(row_seeds(5, 2, 10), row_seeds(5, 2, 10))
