"""Rows that are kept between calls: each token is computed once, idle rows are dropped, and nothing else changes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import LINEAR

from camshaft import machine
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin import kept_rows
from camshaft.rollout.builtin.kept_rows import KeptRows
from camshaft.rollout.builtin.kv_cache import CachedRow
from camshaft.rollout.builtin.rollout import TorchRollout

SAMPLING = SamplingParams(6, ignore_eos=True)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return RolloutHarness(TorchRollout, tmp_path_factory.mktemp("models")).case(max_num_seqs=3)


def converse(case: Case, turns: int, keep: bool = True) -> tuple[list[torch.Tensor], int]:
    """Play `turns` turns of four conversations. Return their tokens, and the number of prompt tokens computed."""
    told = RolloutHarness(TorchRollout, "").prompts(*[3, 1, 5, 2] * turns, seed=5).rows()
    rows, computed = told[:4], 0
    for turn in range(turns):
        ids: dict[str, Any] = {"row_ids": ["a", "b", "c", "d"]} if keep else {}
        out = case.rollout.generate_sequences(Ragged.from_rows(rows), SAMPLING, torch.arange(4), **ids)
        computed += int(out.metrics["prompt_tokens_computed"])
        rows = [torch.cat(pair) for pair in zip(rows, out.responses.rows(), strict=True)]
        if turn + 1 < turns:
            rows = [torch.cat(pair) for pair in zip(rows, told[4 * turn + 4 :], strict=False)]
    return rows, computed


def test_each_token_is_computed_once(case: Case) -> None:
    rows, computed = converse(case, 4)
    again, total = converse(case, 4, keep=False)
    assert [row.tolist() for row in rows] == [row.tolist() for row in again]
    told = 4 * (3 + 1 + 5 + 2)
    assert computed == told + 3 * 4  # and the last token of each answer but the last one, which decoding left out
    assert total == sum(11 + turn * (11 + 4 * 6) for turn in range(4))
    case.rollout.close_rows("abcd")
    assert isinstance(case.rollout, TorchRollout)
    assert case.rollout.kept.num_bytes == 0


def test_rows_are_dropped_when_memory_is_short(case: Case) -> None:
    assert isinstance(case.rollout, TorchRollout)
    kept, rows = case.rollout.kept, converse(case, 2)[0]
    assert kept.num_bytes > 0
    case.rollout.close_rows("abcd")
    limit, kept.max_bytes = kept.max_bytes, kept.num_bytes + 3000
    few, computed = converse(case, 4)
    assert kept.num_bytes <= kept.max_bytes
    kept.max_bytes = limit
    assert [row.tolist() for row in few] == [row.tolist() for row in converse(case, 4, keep=False)[0]]
    assert computed > 4 * 11 + 12
    assert len(rows) == 4


def play(case: Case, keep: bool) -> list[list[int]]:
    """Continue random conversations in random order, between calls without ids. Return all sampled tokens."""
    random = torch.Generator().manual_seed(0)
    rows = dict(enumerate(RolloutHarness(TorchRollout, "").prompts(*[3, 1, 5, 2] * 2, seed=5).rows()))
    sampled: list[list[int]] = []
    for turn in range(10):
        count = int(torch.randint(1, 5, (1,), generator=random))
        chosen = torch.randperm(8, generator=random)[:count].tolist()
        contexts, seeds = Ragged.from_rows([rows[row][-80:] for row in chosen]), torch.tensor(chosen)
        sampling = SamplingParams(int(torch.randint(1, 9, (1,), generator=random)))
        ids: dict[str, Any] = {"row_ids": chosen} if keep else {}
        out = case.rollout.generate_sequences(contexts, sampling, seeds, **ids)
        sampled += [tokens.tolist() for tokens in out.responses.rows()]
        told = torch.randint(3, 100, (count, 2), generator=random)
        for row, tokens, new in zip(chosen, out.responses.rows(), told, strict=True):
            rows[row] = torch.cat([rows[row], tokens, new[: 1 + row % 2]])
        if turn % 4 == 1:
            case.rollout.generate_sequences(Ragged.from_rows([[5, 6, 7]] * 3), SAMPLING, torch.arange(3))
    return sampled


@pytest.mark.parametrize(("family", "sizes"), [("qwen2", {}), ("qwen3_5_text", LINEAR)])
def test_rows_that_other_rows_displace_continue_as_before(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    case = RolloutHarness(TorchRollout, tmp_path).case(family, sizes, max_num_seqs=3)
    assert play(case, keep=True) == play(case, keep=False)


def row(num_bytes: int, states: bool = False) -> CachedRow:
    block = torch.zeros(1, num_bytes // 8, 1)
    return CachedRow({0: (block, block)}, {(0, "conv"): torch.zeros(0)} if states else {})


def test_the_longest_idle_rows_are_dropped_first() -> None:
    kept = KeptRows()
    kept.max_bytes = 800
    tokens = torch.arange(5)
    for row_id in "abc":
        kept.add(row_id, row(256))
        kept.set_tokens(row_id, tokens)
    resumed = kept.take("a", tokens)
    assert resumed is not None
    kept.release(resumed.row)
    kept.add("a", row(256))
    kept.set_tokens("a", tokens)
    kept.add("d", row(256))
    assert kept.num_bytes == 768
    assert [kept.take(row_id, tokens) is not None for row_id in "abcd"] == [True, False, True, False]
    assert kept.num_bytes == 512


def test_a_row_counts_as_far_as_its_tokens_are_those_of_the_context() -> None:
    def length(tokens: list[int], context: list[int], states: bool = False) -> int | None:
        kept = KeptRows()
        kept.add(0, row(64, states))
        kept.set_tokens(0, torch.tensor(tokens))
        resumed = kept.take(0, torch.tensor(context))
        return None if resumed is None else resumed.length

    assert length([1, 2, 3], [1, 2, 3, 4, 5]) == 3
    assert length([1, 2, 3], [1, 2, 3]) == 2  # the last token is computed for its logits
    assert length([1, 2, 3], [1, 2, 9, 3]) == 2
    assert length([1, 2, 3], [9, 2, 3, 4]) is None
    assert length([1, 2, 3], [1, 2, 3, 4], states=True) == 3
    assert length([1, 2, 3], [1, 2, 9, 3], states=True) is None


def test_a_device_reserves_memory_for_kept_rows() -> None:
    kept = KeptRows()
    kept.add("a", row(640))
    assert kept.limit(900) == 600
    assert kept.num_bytes == 0


def test_a_row_counts_until_it_is_in_a_slot() -> None:
    kept = KeptRows()
    kept.max_bytes = 300
    kept.add("a", row(256))
    kept.set_tokens("a", torch.arange(5))
    resumed = kept.take("a", torch.arange(6))
    assert resumed is not None
    kept.add("b", row(256))
    assert kept.num_bytes == 256
    kept.release(resumed.row)
    kept.add("b", row(256))
    assert kept.num_bytes == 256
    kept.clear()
    assert kept.num_bytes == 0


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_rows, "memory_limit", lambda: 1600)
    assert KeptRows().max_bytes == 400
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert KeptRows().max_bytes == 100


def test_a_machine_without_proc_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_facts", lambda: Path("/missing").read_text())
    assert 0 < KeptRows().max_bytes < math.inf


def test_an_error_drops_all_rows(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(case.rollout, TorchRollout)
    converse(case, 2)
    assert case.rollout.kept.num_bytes > 0

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(case.rollout.cache, "check_layers", fail)
    with pytest.raises(MemoryError):
        converse(case, 1)
    assert case.rollout.kept.num_bytes == case.rollout.cache.num_bytes == 0


def test_calls_without_ids_have_the_memory_of_a_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(case.rollout, TorchRollout)
    converse(case, 2)
    assert case.rollout.kept.num_bytes > 0
    monkeypatch.setattr(case.rollout, "cache_budget", lambda: 1 << 24)
    converse(case, 1, keep=False)
    assert case.rollout.kept.num_bytes == 0


@pytest.mark.parametrize("ids", [["a"], ["a", "a"]])
def test_ids_must_be_different(case: Case, ids: list[str]) -> None:
    with pytest.raises(RolloutError, match="row_ids has 1 different ids for 2 prompts"):
        case.rollout.generate_sequences(Ragged.from_rows([[5], [6]]), SAMPLING, row_ids=ids)


def test_ended_rows_have_no_cached_tokens(case: Case) -> None:
    prompts, generated = Ragged.from_rows([[5, 6], [7, 8]]), Ragged.from_rows([[2], [9]], torch.int64)
    sampling = SamplingParams(4)
    case.rollout.generate_sequences(prompts, SamplingParams(1, ignore_eos=True), row_ids=["a", "b"])
    out = case.rollout.generate_sequences(prompts, sampling, generated=generated, row_ids=["a", "b"])
    assert out.num_cached is not None
    assert out.num_cached.tolist() == [0, 2]
