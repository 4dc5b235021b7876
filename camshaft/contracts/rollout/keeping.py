"""Rules of the rollout contract about rows that are kept between calls (`row_ids`). `suite.py` lists them.

They apply to a rollout that declares `keeps_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from camshaft.contracts.rollout.harness import ROUNDINGS, Case, RolloutHarness, check_with_seeds, expect_close
from camshaft.contracts.rules import expect
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams

SAMPLING = SamplingParams(8, ignore_eos=True)


def kept_rows_have_the_tokens_of_computed_ones(harness: RolloutHarness) -> None:
    """Conversations whose rows are kept have the tokens of those that are computed again, in any order, with other rows
    beside them, with a longer context, with another context under the same id, and after `close_rows`. Log-probs differ
    by rounding errors. `num_cached` counts the tokens that were not computed. This applies if the rollout declares
    `keeps_rows`."""
    case = harness.case(max_num_seqs=4)
    if not case.rollout.capabilities.keeps_rows:
        return
    check_with_seeds(lambda seed: _check_kept(harness, case, seed))


def _check_kept(harness: RolloutHarness, case: Case, seed: int) -> None:
    ids = ["a", "b", "c", "d", "e", "f"]
    contexts = dict(zip(ids, harness.prompts(5, 9, 2, 14, 1, 7, seed=seed).rows(), strict=True))
    first = _generate(case, contexts, ids, seed, keep=True)
    expect(_cached(first) == [0] * 6, "num_cached is not 0 in the first call with an id")
    sizes = {}
    for row_id, response in zip(ids, first.responses.rows(), strict=True):
        sizes[row_id] = len(contexts[row_id]) + len(response)
        contexts[row_id] = torch.cat([contexts[row_id], response])
    told = dict(zip(ids, harness.prompts(3, 0, 11, 1, 6, 2, seed=seed + 1).rows(), strict=True))
    contexts = {row_id: torch.cat([context, told[row_id]]) for row_id, context in contexts.items()}
    contexts["e"] = contexts["e"].flip(0)  # another context under the same id
    contexts["g"] = contexts["c"][:4]
    case.rollout.close_rows(["f", "unknown"])
    order = ["g", "d", "f", "a", "e", "c", "b"]
    kept = _generate(case, contexts, order, seed, keep=True)
    again = _generate(case, contexts, order, seed, keep=False)
    _expect_equal(harness, case, contexts, order, kept, again)
    cached = dict(zip(order, _cached(kept), strict=True))
    expect(cached["g"] == cached["f"] == 0, f"num_cached is {cached}, with a new row g and a closed row f")
    limits = {row_id: min(sizes[row_id], len(contexts[row_id])) - 1 for row_id in "abcd"}
    is_kept = {row_id: cached[row_id] in (0, limit) for row_id, limit in limits.items()}
    expect(all(is_kept.values()) and any(cached.values()), f"num_cached is {cached}, at most {limits} were computed")


def new_weights_end_kept_rows(harness: RolloutHarness) -> None:
    """After load_weights and after sleep, a kept row is computed again: log-probs match the new weights. This applies
    if the rollout declares `keeps_rows`."""
    case = harness.case()
    if not case.rollout.capabilities.keeps_rows:
        return
    ids = ["a", "b"]
    contexts = dict(zip(ids, harness.prompts(6, 11).rows(), strict=True))
    _generate(case, contexts, ids, 0, keep=True)
    with torch.no_grad():
        for (_, weight), (_, other) in zip(case.weights(), case.other_weights(), strict=True):
            weight.copy_(other)
    case.rollout.load_weights(case.weights())
    longer = {row_id: torch.cat([context, context]) for row_id, context in contexts.items()}
    out = _generate(case, longer, ids, 0, keep=True)
    prompts = Ragged.from_rows([longer[row_id] for row_id in ids])
    case.check_log_probs(prompts, out, SAMPLING, "log-probs of a kept row after load_weights", harness.tolerance)
    expect(_cached(out) == [0, 0], f"num_cached is {_cached(out)} after load_weights")
    case.rollout.sleep()
    case.rollout.wake_up()
    case.rollout.load_weights(case.weights())
    expect(_cached(_generate(case, longer, ids, 0, keep=True)) == [0, 0], "rows are kept during sleep")


def _generate(case: Case, contexts: dict[str, torch.Tensor], ids: Sequence[str], seed: int, keep: bool) -> Generation:
    prompts, seeds = Ragged.from_rows([contexts[row_id] for row_id in ids]), torch.tensor([ord(i) for i in ids]) + seed
    options: dict[str, Any] = {"row_ids": ids} if keep else {}
    return case.rollout.generate_sequences(prompts, SAMPLING, seeds, **options)


def _cached(generation: Generation) -> list[int]:
    expect(generation.num_cached is not None, "num_cached is None in a call with row_ids")
    return [] if generation.num_cached is None else generation.num_cached.tolist()


def _expect_equal(
    harness: RolloutHarness,
    case: Case,
    contexts: dict[str, torch.Tensor],
    ids: Sequence[str],
    kept: Generation,
    again: Generation,
) -> None:
    """Raise `Violation` unless two generations have equal tokens, and log-probs that differ by rounding."""
    for row_id, tokens, expected in zip(ids, kept.responses.rows(), again.responses.rows(), strict=True):
        expect(
            torch.equal(tokens, expected),
            f"kept row {row_id} has the new tokens {tokens.tolist()}, computed again it has {expected.tolist()}",
        )
    prompts = Ragged.from_rows([contexts[row_id] for row_id in ids])
    allowed = max(harness.tolerance, 2 * ROUNDINGS * case.rounding(prompts, again.responses, SAMPLING))
    expect_close(kept.log_probs, again.log_probs, allowed, "log-probs of kept rows")
