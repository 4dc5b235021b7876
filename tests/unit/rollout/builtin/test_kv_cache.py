"""Cache slots hold the computed keys and values, and attention over them equals attention over each row."""

import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config

from camshaft.errors import RolloutError
from camshaft.models.blockwise import Scores
from camshaft.rollout.builtin import extend
from camshaft.rollout.builtin import kv_cache as slots_module
from camshaft.rollout.builtin.cpu import pages
from camshaft.rollout.builtin.cpu.pages import HUGE_PAGE_BYTES
from camshaft.rollout.builtin.extend import ExtendStep
from camshaft.rollout.builtin.kv_cache import LENGTH_MULTIPLE, KVCache
from camshaft.rollout.builtin.steps import ATTENTION_MULTIPLE, DecodeStep, PrefillStep

HEADS, KEY_HEADS, DIM = 4, 2, 8
CPU = torch.device("cpu")


def layer(index: int) -> Any:
    return SimpleNamespace(layer_idx=index)


def cache(num_layers: int = 1, max_model_len: int = 200) -> KVCache:
    return KVCache(Qwen2Config(num_hidden_layers=num_layers), max_model_len)


def assert_attention(
    mixed: Tensor, query: Tensor, keys: Tensor, values: Tensor, how: Scores, sinks: Tensor | None = None
) -> None:
    """Compare (H, D) float32 attention with float64, within the rounding of scores, softmax and weighted sum.

    A score of D products is off by at most D eps |q| |k|, which a softmax turns into twice that share of its weights.
    """
    eps, wide = torch.finfo(torch.float32).eps, (query.double(), keys.double(), values.double())
    scores = query.shape[-1] * eps * how.scale * float(query.norm(dim=-1).max() * keys.norm(dim=-1).max())
    atol = (2 * scores + (len(keys) + 4) * eps) * float(values.abs().max())
    torch.testing.assert_close(mixed.double(), oracle(*wide, how, sinks), atol=atol, rtol=0)


def oracle(query: Tensor, keys: Tensor, values: Tensor, how: Scores, sinks: Tensor | None) -> Tensor:
    """Return (H, D) attention of a row's last token over its (T, Hkv, D) keys and values, head by head."""
    first = 0 if how.window is None else max(0, len(keys) - how.window)
    mixed = []
    for head in range(HEADS):
        shared = head // (HEADS // KEY_HEADS)
        scores = keys[first:, shared] @ query[head] * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp()))
        mixed.append(weights @ values[first:, shared])
    return torch.stack(mixed)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("sizes", [[4], [2, 1, 1]])
def test_attention_over_slots_equals_attention_per_row(
    sizes: list[int], window: int | None, softcap: float | None, with_sinks: bool
) -> None:
    """`sizes` are the numbers of rows in each length class."""
    random = torch.Generator().manual_seed(0)
    how, sinks = Scores(0.3, window, softcap), torch.randn(HEADS, generator=random) if with_sinks else None
    lengths, slots = [5, 1, 9], cache()
    slots.reserve(4, max(lengths))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    total = sum(lengths)
    keys, values = draw(1, KEY_HEADS, total, DIM), draw(1, KEY_HEADS, total, DIM)
    # Prompt 0 goes to slots 0 and 2, prompt 1 to slot 3, prompt 2 to slot 1.
    step = PrefillStep(slots, lengths, [0, 0, 1, 2], [0, 2, 3, 1], CPU)
    step.attend(layer(0), draw(1, HEADS, total, DIM), keys, values, how, sinks)
    parts = list(zip(keys[0].split(lengths, dim=1), values[0].split(lengths, dim=1), strict=True))
    rows = [tuple(tensor.transpose(0, 1) for tensor in parts[prompt]) for prompt in (0, 2, 0, 1)]
    positions = torch.tensor([len(row[0]) for row in rows])
    steps: list[DecodeStep] = []
    for _ in range(70):
        key, value, query = draw(4, KEY_HEADS, 1, DIM), draw(4, KEY_HEADS, 1, DIM), draw(4, HEADS, 1, DIM)
        length = int(positions.max()) + 1
        slots.reserve(4, length)
        classes = [(size, int(part.max()) + 1) for size, part in zip(sizes, positions.split(sizes), strict=True)]
        if not steps or not steps[-1].advance([longest for _, longest in classes]):
            steps.append(DecodeStep(slots, positions, classes))
        result = steps[-1].attend(layer(0), query, key, value, how, sinks)
        positions += 1
        rows = [
            (torch.cat([k, key[i].transpose(0, 1)]), torch.cat([v, value[i].transpose(0, 1)]))
            for i, (k, v) in enumerate(rows)
        ]
        for i, (k, v) in enumerate(rows):
            assert_attention(result[i, 0], query[i, :, 0], k, v, how, sinks)
    if window:
        assert len(steps) == 70
    elif len(sizes) == 1:
        assert len(steps) == 1 + (9 + 70) // ATTENTION_MULTIPLE


@pytest.mark.parametrize("limits", [(256, 2**22, 2**12), (4, 2**22, 2**12), (256, 60, 2**12), (256, 2**22, 0)])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("window", [None, 3])
def test_new_tokens_attend_to_the_cached_ones_of_their_row(
    window: int | None,
    softcap: float | None,
    with_sinks: bool,
    limits: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, limit in zip(("MAX_QUERIES", "MAX_MASK", "MAX_PADDING"), limits, strict=True):
        monkeypatch.setattr(extend, name, limit)
    random = torch.Generator().manual_seed(0)
    how, sinks = Scores(0.3, window, softcap), torch.randn(HEADS, generator=random) if with_sinks else None
    old, new, slots = [5, 1, 9, 2], [3, 1, 2, 10], cache()
    slots.reserve(5, 20)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(1, heads, tokens, DIM, generator=random)

    given = draw(KEY_HEADS, sum(old)), draw(KEY_HEADS, sum(old))
    query, key, value = draw(HEADS, sum(new)), draw(KEY_HEADS, sum(new)), draw(KEY_HEADS, sum(new))
    PrefillStep(slots, old, range(4), range(1, 5), CPU).attend(layer(0), draw(HEADS, sum(old)), *given, how, None)
    step = ExtendStep(slots, new, old, 1, CPU)
    assert len(step.blocks) > 1 or limits == (256, 2**22, 2**12)
    result = step.attend(layer(0), query, key, value, how, sinks)[0]
    assert step.kwargs["position_ids"].tolist() == [[5, 6, 7, 1, 9, 10, *range(2, 12)]]
    rows = [tensor[0].transpose(0, 1).split(new) for tensor in (query, key, value)]
    earlier = [tensor[0].transpose(0, 1).split(old) for tensor in given]
    outputs = result.split(new)
    for row, count in enumerate(new):
        keys, values = (torch.cat([before[row], after[row]]) for before, after in zip(earlier, rows[1:], strict=True))
        for token in range(count):
            seen = old[row] + token + 1
            assert_attention(outputs[row][token], rows[0][row][token], keys[:seen], values[:seen], how, sinks)


def test_attention_of_prompts_does_not_cross_their_borders() -> None:
    random = torch.Generator().manual_seed(0)
    slots, lengths = cache(), [3, 4]
    slots.reserve(2, 4)
    query = torch.randn(1, HEADS, 7, DIM, generator=random)
    keys, values = (torch.randn(1, KEY_HEADS, 7, DIM, generator=random) for _ in range(2))
    result = PrefillStep(slots, lengths, [0, 1], [0, 1], CPU).attend(layer(0), query, keys, values, Scores(0.3), None)
    for token in range(7):
        start = 0 if token < 3 else 3
        k, v = (tensor[0, :, start : token + 1].transpose(0, 1) for tensor in (keys, values))
        assert_attention(result[0, token], query[0, :, token], k, v, Scores(0.3))


def test_a_prompt_is_copied_to_adjacent_slots_at_once() -> None:
    slots, lengths = cache(), [3, 4]
    slots.reserve(6, 4)
    query, keys = torch.zeros(1, HEADS, 7, DIM), torch.randn(1, KEY_HEADS, 7, DIM)
    step = PrefillStep(slots, lengths, [0, 0, 0, 1, 1], [1, 2, 3, 4, 0], CPU)
    step.attend(layer(0), query, keys, -keys, Scores(0.3), None)
    first, second = slice(0, 3), slice(3, 7)
    assert step.copies == [(slice(1, 4), first), (slice(4, 5), second), (slice(0, 1), second)]
    for slot, span in {0: second, 1: first, 2: first, 3: first, 4: second}.items():
        for stored, source in zip(slots.layers[0], (keys, -keys), strict=True):
            assert torch.equal(stored[slot, :, : span.stop - span.start], source[0, :, span])
    assert not slots.layers[0][0][5].any()


def filled(num_slots: int, length: int) -> KVCache:
    slots = cache(num_layers=2)
    slots.reserve(num_slots, length)
    for index in range(2):
        keys, values = slots.layer(layer(index), torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 6))
        keys.normal_()
        values.normal_()
    return slots


def test_growing_slots_keep_their_contents() -> None:
    slots = filled(2, 10)
    before = {index: (keys.clone(), values.clone()) for index, (keys, values) in slots.layers.items()}
    slots.reserve(5, LENGTH_MULTIPLE + 1)
    assert (slots.num_slots, slots.length) == (5, 2 * LENGTH_MULTIPLE)
    for index, tensors in slots.layers.items():
        for now, then in zip(tensors, before[index], strict=True):
            assert torch.equal(now[:2, :, :LENGTH_MULTIPLE], then)
            assert not now[2:].any()
            assert not now[:, :, LENGTH_MULTIPLE:].any()


def test_growing_keeps_live_slots_and_the_last_slot() -> None:
    """A request for 5 slots in a cache of 6: the last requested slot is slot 4."""
    slots = filled(6, 10)
    before = {index: (keys.clone(), values.clone()) for index, (keys, values) in slots.layers.items()}
    slots.reserve(5, LENGTH_MULTIPLE + 1, live=[10, 3], last=7)
    assert (slots.num_slots, slots.length) == (6, 2 * LENGTH_MULTIPLE)
    for index, tensors in slots.layers.items():
        for now, then in zip(tensors, before[index], strict=True):
            for slot, length in ((0, 10), (1, 3), (4, 7)):
                assert torch.equal(now[slot, :, :length], then[slot, :, :length])
                assert not now[slot, :, length:].any()
            assert not now[[2, 3, 5]].any()
            assert not now[:, :, LENGTH_MULTIPLE:].any()


def test_a_pool_gets_more_slots_while_some_are_live() -> None:
    slots = filled(3, 10)
    live = slots.layers[1][0][:1].clone()
    slots.reserve(9, 10, live=[LENGTH_MULTIPLE])
    assert slots.num_slots == 9
    assert torch.equal(slots.layers[1][0][:1], live)
    assert not slots.layers[1][0][1:].any()


def test_cache_slots_grow_by_half() -> None:
    slots = cache(max_model_len=1000)
    slots.reserve(2, 2 * LENGTH_MULTIPLE)
    assert slots.length == 3 * LENGTH_MULTIPLE
    slots.reserve(2, 3 * LENGTH_MULTIPLE + 1)
    assert slots.length == 5 * LENGTH_MULTIPLE


def test_slots_never_grow_beyond_max_model_len_rounded_up() -> None:
    slots = filled(2, 10)
    for length in range(10, 201):
        slots.reserve(2, length)
        assert length <= slots.length <= 4 * LENGTH_MULTIPLE
    assert slots.length == 4 * LENGTH_MULTIPLE


def test_a_smaller_request_changes_nothing() -> None:
    slots = filled(3, 80)
    keys = slots.layers[0][0]
    slots.reserve(2, 5)
    assert slots.layers[0][0] is keys


def test_keys_and_values_may_differ_in_size() -> None:
    keys, values = filled(3, 80).layers[1]
    assert keys.shape == (3, 2, 2 * LENGTH_MULTIPLE, 4)
    assert values.shape == (3, 2, 2 * LENGTH_MULTIPLE, 6)


def test_copy_takes_a_slot_to_many() -> None:
    slots = filled(4, 10)
    source = [tensor[3, :, :10].clone() for tensor in slots.layers[1]]
    slots.copy(torch.tensor([3, 3]), torch.tensor([0, 2]), torch.tensor([10, 10]))
    for tensor, expected in zip(slots.layers[1], source, strict=True):
        assert torch.equal(tensor[0, :, :10], expected)
        assert torch.equal(tensor[2, :, :10], expected)


def test_rows_exchange_their_slots() -> None:
    slots = filled(3, 10)
    before = [tensor.clone() for tensor in slots.layers[1]]
    slots.permute([0, 1, 2], [2, 0, 1], [10, 4, 7])
    for now, then in zip(slots.layers[1], before, strict=True):
        assert torch.equal(now[2, :, :10], then[0, :, :10])
        assert torch.equal(now[0, :, :4], then[1, :, :4])
        assert torch.equal(now[1, :, :7], then[2, :, :7])


def resident() -> int:
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="requires the memory counts of Linux")
def test_unused_positions_of_a_large_cache_need_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows use 32 of 512 positions, and later 256. Huge pages would contain the unused ones."""
    monkeypatch.setattr(slots_module, "MAX_HUGE_PAGE_BYTES", 2**25)
    slots, key = cache(max_model_len=512), torch.ones(1, 2, 1, 128)
    slots.reserve(80, 512)
    before = resident()
    blocks = slots.layer(layer(0), key, key)
    for block in blocks:
        block[:, :, :32] = key
    assert slots.num_bytes / 16 <= resident() - before < slots.num_bytes / 4
    slots.trim([32] * 80)
    for block in blocks:
        block[:, :, :256] = key
    assert resident() - before >= slots.num_bytes / 2
    slots.trim([256] * 80)
    slots.trim([100, *[0] * 78])
    assert resident() - before < slots.num_bytes / 4
    for block in blocks:
        assert block[0, :, :100].all()
        assert not block[0, :, 128:].any()
        assert not block[1:79].any()
        assert block[79, :, :256].all()


def test_a_cache_with_huge_pages_keeps_its_memory() -> None:
    slots, key = cache(max_model_len=512), torch.ones(1, 2, 1, 128)
    slots.reserve(40, 512)
    (keys, _) = slots.layer(layer(0), key, key)
    keys[:] = key
    slots.trim([512] * 40)
    slots.trim([0] * 40)
    assert keys.all()


@pytest.mark.parametrize("large", [True, False])
def test_large_blocks_are_zero_and_writable_for_any_pages(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not large:
        monkeypatch.setattr(pages, "HUGE_PAGE_FLAG", None)
    slots = cache()
    slots.reserve(HUGE_PAGE_BYTES // (2 * LENGTH_MULTIPLE * DIM * 4), 2 * LENGTH_MULTIPLE // 3)
    key = torch.ones(1, 2, 1, DIM)
    keys, values = slots.layer(layer(0), key, key.bfloat16())
    assert keys.nbytes >= HUGE_PAGE_BYTES
    assert (keys.dtype, values.dtype) == (torch.float32, torch.bfloat16)
    assert not keys.any()
    keys[-1, -1, -1] = key[0, 0, 0]
    slots.reserve(slots.num_slots, LENGTH_MULTIPLE + 1)
    grown = slots.layers[0][0]
    assert grown.shape[2] == 2 * LENGTH_MULTIPLE
    assert torch.equal(grown[-1, -1, LENGTH_MULTIPLE - 1], key[0, 0, 0])
    assert grown.sum() == DIM


def allocations(requests: list[tuple[int, int, int]], keep: bool) -> list[tuple[int, int, int, int]]:
    """Allocate for (rows, positions, rows that fit in memory); return (rows, slots, positions, reallocations)."""
    slots, results = cache(max_model_len=4000), []
    slots.position_bytes = {0: 10}
    for num_rows, length, num_fitting in requests:
        rounded = -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        max_bytes = (num_fitting + 1) * rounded * 10 + num_fitting * 7
        rows = slots.allocate(num_rows, length, max_bytes, 7, keep)
        assert rows < slots.num_slots
        assert slots.num_slots * slots.length * 10 + rows * 7 <= max_bytes
        results.append((rows, slots.num_slots, slots.length, slots.reallocations))
    return results


def test_a_cache_for_one_generation_is_as_large_as_possible() -> None:
    requests = [(200, 1000, 97), (200, 1000, 95), (200, 1000, 99)]
    assert allocations(requests, keep=False) == [(97, 98, 1024, 1), (95, 96, 1024, 2), (99, 100, 1024, 3)]


def test_a_cache_that_stays_survives_small_changes_of_memory() -> None:
    requests = [(200, 1000, fitting) for fitting in (97, 96, 99, 107, 95, 97, 100, 101)]
    assert allocations(requests, keep=True) == [
        *[(96, 97, 1024, 1)] * 4,  # 96 rows suffice for 7/8 of 107
        *[(88, 89, 1024, 2)] * 3,  # and 88 rows for 7/8 of 100
        (96, 97, 1024, 3),
    ]


def test_a_cache_that_stays_survives_small_changes_of_lengths() -> None:
    requests = [(8, length, 100) for length in (1030, 1100, 1150, 900, 1152, 1153)]
    assert [(length, count) for _, _, length, count in allocations(requests, keep=True)] == [
        *[(1152, 1)] * 5,
        (1280, 2),
    ]


def test_rows_do_not_wait_for_a_cache_that_stays_if_memory_suffices() -> None:
    rows = [rows for rows, *_ in allocations([(96, 64, 200), (100, 64, 200), (90, 64, 200)], keep=True)]
    assert rows == [96, 100, 90]


def test_clear_frees_all() -> None:
    slots = filled(4, 10)
    slots.clear()
    assert not slots.layers
    assert slots.num_slots == slots.length == 0


def test_an_ignored_sliding_window_is_rejected() -> None:
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    )
    slots = KVCache(config, 100)
    slots.check_window(layer(0), 16)
    slots.check_window(layer(1), None)
    with pytest.raises(RolloutError, match="layer 0 of gemma3_text has a sliding window of 16 tokens"):
        slots.check_window(layer(0), None)
    # A window that no sequence fills has no effect.
    KVCache(config, 16).check_window(layer(0), None)


def test_a_config_without_kinds_of_layers_has_windows_everywhere() -> None:
    assert KVCache(MistralConfig(num_hidden_layers=2, sliding_window=16), 100).windows == [16, 16]
    assert KVCache(MistralConfig(num_hidden_layers=2, sliding_window=None), 100).windows == [None, None]


def test_a_model_with_layers_without_a_cache_is_rejected() -> None:
    slots = filled(1, 10)
    slots.check_layers()
    del slots.layers[1]
    with pytest.raises(RolloutError, match="qwen2 has 2 layers, of which 1 use the KV cache"):
        slots.check_layers()
