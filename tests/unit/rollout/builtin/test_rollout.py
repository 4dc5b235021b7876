"""Properties of the built-in generator beyond the contract: seeds per row, shared weights, prefix sharing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny_folder
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.contracts.rollout.harness import Case, RolloutHarness
from camshaft.errors import RolloutError
from camshaft.ragged import Ragged
from camshaft.rollout import SamplingParams
from camshaft.rollout.builtin import kv_cache, length_classes, scheduler
from camshaft.rollout.builtin import rollout as rollout_module
from camshaft.rollout.builtin.kv_cache import LENGTH_MULTIPLE, KVCache
from camshaft.rollout.builtin.rollout import TorchRollout
from camshaft.rollout.builtin.scheduler import UNIFORM_STEPS
from camshaft.rollout.sampling import draw, uniform_numbers


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RolloutHarness:
    return RolloutHarness(TorchRollout, tmp_path_factory.mktemp("models"))


def checked_generation(case: Case, prompts: Ragged, sampling: SamplingParams, seeds: Tensor | None = None) -> Any:
    """Return a generation after checking its log-probs against the oracle."""
    out = case.rollout.generate_sequences(prompts, sampling, seeds)
    case.check_log_probs(prompts, out, sampling)
    return out


# -- seeds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({"max_num_seqs": 1}, marks=pytest.mark.slow),
        {"max_num_seqs": 3},
        pytest.param({"max_num_seqs": 4, "max_num_batched_tokens": 1}, marks=pytest.mark.slow),
        {"max_num_seqs": 7, "max_num_batched_tokens": 30},
    ],
)
def test_a_rows_tokens_depend_only_on_its_seed_and_prompt(harness: RolloutHarness, limits: dict[str, Any]) -> None:
    rows = [0, 1, 1, 2, 3, 3, 3, 3, 3, 4, 4, 5]
    prompts = harness.prompts(3, 11, 1, 5, 20, 5).select(rows)
    seeds = torch.arange(len(rows)) * 31 + 5
    sampling = SamplingParams(20, temperature=1.3, top_p=0.95, stop_token_ids=tuple(range(10, 16)))
    expected = harness.case().rollout.generate_sequences(prompts, sampling, seeds).responses.rows()
    actual = checked_generation(harness.case(**limits), prompts, sampling, seeds).responses.rows()
    assert [row.tolist() for row in actual] == [row.tolist() for row in expected]
    order = [7, 2, 11, 0]
    some = harness.case(**limits).rollout.generate_sequences(prompts.select(order), sampling, seeds[order])
    assert [row.tolist() for row in some.responses.rows()] == [expected[row].tolist() for row in order]


def test_each_token_is_drawn_by_the_uniform_of_its_position(harness: RolloutHarness) -> None:
    case = harness.case(max_num_seqs=3)
    prompts = harness.prompts(3, 7, 1, 5).select([0, 1, 1, 2, 3])
    sampling = SamplingParams(2 * UNIFORM_STEPS + 8, stop_token_ids=tuple(range(10, 13)))
    responses = case.rollout.generate_sequences(prompts, sampling, torch.arange(5)).responses
    assert len(set(responses.lengths.tolist())) > 2  # rows join and leave in between
    assert int(responses.lengths.max()) > UNIFORM_STEPS
    for seed, (prompt, response) in enumerate(zip(prompts.rows(), responses.rows(), strict=True)):
        row = torch.cat([prompt, response])
        logits = case.oracle(row[None]).logits[0, len(prompt) - 1 : -1]
        tokens, _ = draw(logits, uniform_numbers(torch.tensor(seed), torch.arange(len(prompt), len(row))))
        assert tokens.tolist() == response.tolist()


def test_responses_are_equal_only_for_equal_prompts_and_seeds(harness: RolloutHarness) -> None:
    prompts = harness.prompts(4).select([0, 0, 0])
    out = (
        harness.case().rollout.generate_sequences(prompts, SamplingParams(12), torch.tensor([8, 9, 8])).responses.rows()
    )
    assert out[0].tolist() == out[2].tolist() != out[1].tolist()


def test_a_response_can_be_continued(harness: RolloutHarness) -> None:
    # Uniforms are numbered by the position of a token in its row, including the prompt.
    case, prompts, seeds = harness.case(), harness.prompts(4, 9), torch.tensor([1, 2])
    full = case.rollout.generate_sequences(prompts, SamplingParams(10, ignore_eos=True), seeds).responses
    start = case.rollout.generate_sequences(prompts, SamplingParams(4, ignore_eos=True), seeds).responses
    rest = case.rollout.generate_sequences(Ragged.join(prompts, start), SamplingParams(6, ignore_eos=True), seeds)
    assert torch.equal(Ragged.join(start, rest.responses).values, full.values)


# -- weights --------------------------------------------------------------------------------------


def test_an_in_place_optimizer_step_needs_no_reload(harness: RolloutHarness) -> None:
    case, prompts, sampling = harness.case(), harness.prompts(4, 9), SamplingParams(10)
    before = checked_generation(case, prompts, sampling)
    optimizer = torch.optim.AdamW(case.oracle.parameters(), lr=0.05)
    case.oracle(input_ids=prompts.rows()[0][None], labels=prompts.rows()[0][None]).loss.backward()
    optimizer.step()
    after = checked_generation(case, prompts, sampling)
    assert not torch.equal(before.log_probs.values, after.log_probs.values)


def test_weights_of_another_dtype_are_copies(harness: RolloutHarness) -> None:
    case, prompts = harness.case(dtype="float64"), harness.prompts(4, 9)
    before = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
    for weight in case.oracle.parameters():
        weight.data.zero_()
    after = case.rollout.generate_sequences(prompts, SamplingParams(8, temperature=0))
    assert torch.equal(before.log_probs.values, after.log_probs.values)


def test_non_finite_weights_are_an_error_without_side_effects(harness: RolloutHarness) -> None:
    case, prompts = harness.case(), harness.prompts(4, 9)
    broken = [(name, weight.detach() * float("nan")) for name, weight in case.weights()]
    case.rollout.load_weights(broken)
    with pytest.raises(RolloutError, match="not finite for row 0"):
        case.rollout.generate_sequences(prompts, SamplingParams(3))
    case.rollout.load_weights(case.weights())
    checked_generation(case, prompts, SamplingParams(10))


# -- scheduler ------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [64, 8, 5, 2, 1])
def test_each_distinct_prompt_is_computed_once(harness: RolloutHarness, max_num_seqs: int) -> None:
    prompts = harness.prompts(7, 12, 5).select([0] * 6 + [1] * 6 + [2] * 6 + [0])
    case = harness.case(max_num_seqs=max_num_seqs)
    out = checked_generation(case, prompts, SamplingParams(6, stop_token_ids=tuple(range(10, 30))))
    assert out.metrics["prompt_tokens_computed"] == 7 + 12 + 5


def test_metrics_count_the_work_of_a_call(harness: RolloutHarness) -> None:
    # Six rows of five tokens: prefill gives the first, four decode steps the others.
    prompts = harness.prompts(4, 9).select([0, 0, 0, 1, 1, 1])
    for max_num_seqs, steps, use in ((6, 4, 1.0), (100, 4, 1.0), (4, 8, 24 / 32), (1, 24, 1.0)):
        case = harness.case(max_num_seqs=max_num_seqs)
        metrics = case.rollout.generate_sequences(prompts, SamplingParams(5, ignore_eos=True)).metrics
        assert metrics.pop("seconds") > 0
        assert metrics == {
            "prompt_tokens_computed": 13,
            "response_tokens": 30,
            "decode_steps": steps,
            "rows_decoded": 24,
            "slot_use": use,
        }


def test_a_slot_is_reused_when_its_row_ends(harness: RolloutHarness) -> None:
    # Rows end after one to sixteen tokens; waiting for the longest of each four would take far more steps.
    prompts = harness.prompts(*[3] * 32)
    sampling = SamplingParams(16, stop_token_ids=tuple(range(3, 23)))
    out = checked_generation(harness.case(max_num_seqs=4), prompts, sampling)
    lengths = out.responses.lengths
    assert lengths.max() >= 3 * lengths.double().mean()
    in_batches = sum(int(part.max()) - 1 for part in lengths.split(4))
    assert out.metrics["decode_steps"] < 0.8 * in_batches
    assert out.metrics["slot_use"] > 0.7


def test_long_responses_outgrow_their_slots(harness: RolloutHarness) -> None:
    case = harness.case(max_model_len=3 * LENGTH_MULTIPLE, max_num_seqs=2)
    checked_generation(case, harness.prompts(2, 50, 7), SamplingParams(2 * LENGTH_MULTIPLE, ignore_eos=True))
    assert case.rollout.cache.length >= 50 + 2 * LENGTH_MULTIPLE - 1  # pyright: ignore[reportAttributeAccessIssue]
    checked_generation(case, harness.prompts(2, 5, 7), SamplingParams(4))


def test_rows_of_different_lengths_move_between_classes(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 1 to 60 tokens, in slots whose order changes when rows end, start and grow.

    Positions behind the rows get large values where the memory of a large cache would be released.
    """
    moved: list[int] = []
    released: list[int] = []
    permute = KVCache.permute

    def counted(self: KVCache, sources: list[int], targets: list[int], lengths: list[int]) -> None:
        moved.extend(sources)
        permute(self, sources, targets, lengths)

    def overwrite(part: Tensor) -> None:
        released.append(len(part.fill_(1e3)))

    prompts = harness.prompts(3, 60, 1, 30, 20, 5, 41, 2, 12, 9, 33, 17)
    seeds, sampling = torch.arange(len(prompts)), SamplingParams(40, temperature=1.3, stop_token_ids=tuple(range(4)))
    expected = harness.case(max_num_seqs=6).rollout.generate_sequences(prompts, sampling, seeds).responses
    assert len(set(expected.lengths.tolist())) > 4
    monkeypatch.setattr(KVCache, "permute", counted)
    for module in (length_classes, scheduler):
        monkeypatch.setattr(module, "SHORTEST", 8)
    monkeypatch.setattr(length_classes, "MIN_SAVED", 1)
    monkeypatch.setattr(kv_cache, "MAX_HUGE_PAGE_BYTES", 0)
    monkeypatch.setattr(kv_cache, "LENGTH_MULTIPLE", 1)
    monkeypatch.setattr(kv_cache.pages, "release", overwrite)
    actual = checked_generation(harness.case(max_num_seqs=6), prompts, sampling, seeds).responses
    assert torch.equal(actual.values, expected.values)
    assert len(moved) > 10
    assert sum(released) > 100


def test_windows_hold_over_long_responses(harness: RolloutHarness) -> None:
    case = harness.case("mistral", {"sliding_window": 5}, max_num_seqs=2)
    checked_generation(case, harness.prompts(2, 30, 7, 1), SamplingParams(40, ignore_eos=True))


# -- a limited KV cache ---------------------------------------------------------------------------

SLOT_BYTES = 2 * LENGTH_MULTIPLE * 2 * 2 * 16 * 4
"""A slot of 2 * LENGTH_MULTIPLE positions in 2 layers, with keys and values of 16 numbers in float32."""


def limited(case: Case, monkeypatch: pytest.MonkeyPatch, max_bytes: int, row_bytes: int = 0) -> tuple[Any, list[int]]:
    """Limit the KV cache; return the rollout and a list to which each size of the cache is added."""
    rollout, sizes = case.rollout, []
    monkeypatch.setattr(rollout_module, "SAMPLING_BYTES", row_bytes)
    monkeypatch.setattr(rollout, "cache_budget", lambda: max_bytes)
    original = KVCache.layer

    def watched(cache: KVCache, *arguments: Any) -> Any:
        result = original(cache, *arguments)
        sizes.append(cache.num_bytes)
        return result

    monkeypatch.setattr(KVCache, "layer", watched)
    return rollout, sizes


def test_rows_wait_for_a_slot_if_memory_is_short(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = harness.prompts(3, 11, 1, 5).select([0, 1, 1, 1, 1, 2, 3, 0, 2, 3, 3])
    sampling, seeds = SamplingParams(60, stop_token_ids=(10, 11, 12)), torch.arange(11)
    expected = harness.case().rollout.generate_sequences(prompts, sampling, seeds)
    case = harness.case()
    rollout, sizes = limited(case, monkeypatch, 5 * SLOT_BYTES)
    out = checked_generation(case, prompts, sampling, seeds)
    assert out.responses.values.tolist() == expected.responses.values.tolist()
    assert rollout.cache.num_slots == 5
    assert max(sizes) == 5 * SLOT_BYTES
    assert out.metrics["decode_steps"] > expected.metrics["decode_steps"]


def test_longer_rows_of_a_later_call_get_fewer_slots(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    case = harness.case(max_model_len=4 * LENGTH_MULTIPLE)
    rollout, sizes = limited(case, monkeypatch, 6 * SLOT_BYTES)
    for max_tokens, num_slots in ((8, 12), (3 * LENGTH_MULTIPLE, 3), (8, 12)):
        case.rollout.generate_sequences(harness.prompts(*[4] * 12), SamplingParams(max_tokens, stop_token_ids=(5, 6)))
        assert rollout.cache.num_slots == num_slots
    assert max(sizes) <= 6 * SLOT_BYTES


def test_a_row_that_does_not_fit_is_rejected_with_its_size(
    harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = harness.case()
    limited(case, monkeypatch, 3 * SLOT_BYTES // 2)
    with pytest.raises(RolloutError, match=r"one row of 128 tokens requires 6\.1e-05 GiB .* but 4\.58e-05 GiB"):
        case.rollout.generate_sequences(harness.prompts(4), SamplingParams(80))
    checked_generation(case, harness.prompts(4), SamplingParams(4))


def test_a_limited_cache_does_not_grow_within_a_call(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    case = harness.case(max_model_len=4 * LENGTH_MULTIPLE)
    rollout, sizes = limited(case, monkeypatch, 2**30)
    sampling = SamplingParams(3 * LENGTH_MULTIPLE, ignore_eos=True)
    checked_generation(case, harness.prompts(4, 9), sampling)
    assert len(set(sizes[3:])) == 1  # after the probe of one token, and the first layer
    reallocations = rollout.cache.reallocations
    for prompts in (harness.prompts(4, 9), harness.prompts(5)):
        checked_generation(case, prompts, sampling)
    assert rollout.cache.reallocations == reallocations


def test_memory_of_sampling_takes_slots(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    case = harness.case()
    vocabulary = case.rollout.model.num_embeddings  # pyright: ignore[reportAttributeAccessIssue]
    rollout, _ = limited(case, monkeypatch, 6 * SLOT_BYTES, row_bytes=-(-SLOT_BYTES // vocabulary))
    checked_generation(case, harness.prompts(*[4] * 8), SamplingParams(80, ignore_eos=True))
    assert rollout.cache.num_slots == 3


@pytest.mark.parametrize("free", [True, False])
def test_sleep_frees_the_kv_cache_unless_configured(harness: RolloutHarness, free: bool) -> None:
    case = harness.case(free_cache_engine=free)
    rollout: Any = case.rollout
    rollout.generate_sequences(harness.prompts(4), SamplingParams(2))
    assert rollout.cache.layers
    rollout.sleep()
    assert bool(rollout.cache.layers) != free


def test_generated_rows_can_be_trained_on(harness: RolloutHarness) -> None:
    out = harness.case().rollout.generate_sequences(harness.prompts(4, 9), SamplingParams(6))
    weight = torch.ones(len(out.log_probs.values), requires_grad=True)
    (weight * out.log_probs.values).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, out.log_probs.values)
    assert not out.finished.is_inference()
    assert not out.responses.values.is_inference()


# -- stop strings ---------------------------------------------------------------------------------


def tokenizer_of_bytes(folder: Path) -> None:
    """Return a tokenizer with tokens of half a character, one and several characters."""
    vocabulary = ["<pad>", "<end>", "\u00c3", "\u00a9", "\u00a8", "a", "b", "ab", "aba", "b\u00c3", "\u00a9a"]
    merges = [("a", "b"), ("ab", "a"), ("b", "\u00c3"), ("\u00a9", "a")]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, merges))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)


@pytest.mark.parametrize("max_num_seqs", [10, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 64))])
def test_a_stop_string_ends_only_matching_rows(tmp_path: Path, max_num_seqs: int) -> None:
    harness = RolloutHarness(TorchRollout, tmp_path)
    harness.case("llama", {"vocab_size": 11, "tie_embeddings": False})
    (folder,) = (path.parent for path in tmp_path.rglob("config.json"))
    tokenizer_of_bytes(folder)
    case = harness.case("llama", {"vocab_size": 11, "tie_embeddings": False}, max_num_seqs=max_num_seqs)
    prompts = Ragged.from_rows([torch.tensor([5, 6, 2, 3])] * 30 + [torch.tensor([7])] * 10)
    seeds, limit = torch.arange(40), 30
    free = case.rollout.generate_sequences(prompts, SamplingParams(limit, ignore_eos=True), seeds)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for strings in (("\u00e9",), ("abab", "\u00e8b"), ("never said",)):
        sampling = SamplingParams(limit, ignore_eos=True, stop=strings)
        out = case.rollout.generate_sequences(prompts, sampling, seeds)
        num_ended, steps = 0, 0
        for row, tokens in enumerate(row.tolist() for row in free.responses.rows()):
            texts = (tokenizer.decode(tokens[: i + 1], skip_special_tokens=True) for i in range(limit))
            end = next((i + 1 for i, text in enumerate(texts) if any(string in text for string in strings)), None)
            assert out.responses.rows()[row].tolist() == tokens[:end]
            assert bool(out.finished[row]) == (end is not None)
            num_ended, steps = num_ended + (end is not None), steps + (end or limit) - 1
        assert (num_ended > 5) == (strings != ("never said",))
        assert out.metrics["rows_decoded"] == steps
        case.check_log_probs(prompts, out, sampling)


def test_a_stop_string_may_begin_in_earlier_tokens(tmp_path: Path) -> None:
    harness, sizes = RolloutHarness(TorchRollout, tmp_path), {"vocab_size": 11, "tie_embeddings": False}
    harness.case("llama", sizes)
    (folder,) = (path.parent for path in tmp_path.rglob("config.json"))
    tokenizer_of_bytes(folder)
    case = harness.case("llama", sizes, max_num_seqs=64)
    prompts, seeds, limit = Ragged.from_rows([[5, 6, 2, 3]] * 30, torch.int64), torch.arange(30), 12
    sampling = SamplingParams(limit, ignore_eos=True, stop=("abab", "\u00e8b", "\u00e9a"))
    full = case.rollout.generate_sequences(prompts, sampling, seeds)
    assert 10 < int(full.finished.sum()) < 30
    for cut in range(limit + 1):
        generated = full.responses.prefix(full.responses.lengths.clamp(max=cut))
        rest = case.rollout.generate_sequences(prompts, sampling, seeds, generated)
        assert torch.equal(Ragged.join(generated, rest.responses).values, full.responses.values)
        assert torch.equal(rest.finished, full.finished)


def test_without_stop_strings_no_text_is_made(harness: RolloutHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    case = harness.case()

    def decoded(*_: Any, **__: Any) -> str:
        raise AssertionError("tokens were decoded")

    monkeypatch.setattr(PreTrainedTokenizerBase, "decode", decoded)
    case.rollout.generate_sequences(harness.prompts(4), SamplingParams(4))
    with pytest.raises(AssertionError, match="decoded"):
        case.rollout.generate_sequences(harness.prompts(4), SamplingParams(4, stop=("x",)))


# -- unsupported arguments ------------------------------------------------------------------------

REFUSED: list[tuple[type[Exception], str, str, dict[str, Any]]] = [
    (RolloutError, "attention code that does not use .*; set rollout.name=hf", "falcon", {}),
    (RolloutError, "a recurrent state, .*; set rollout.name=hf", "jamba", {}),
    (RolloutError, "sparse attention .*; set rollout.name=hf", "hy_v4", {"num_local_experts": 4}),
    (
        RolloutError,
        "max_model_len=64 .* 'dynamic' rotary frequencies, .* set max_model_len=32 or less",
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "max_position_embeddings": 32},
    ),
]


@pytest.mark.parametrize(("error", "message", "family", "sizes"), REFUSED, ids=[case[2] for case in REFUSED])
def test_an_unsupported_model_is_rejected(
    error: type[Exception], message: str, family: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    from camshaft.models.tiny import make_tiny_model

    make_tiny_model(tmp_path, family, **sizes)
    with pytest.raises(error, match=message):
        TorchRollout(RolloutEngineConfig(model_path=str(tmp_path), max_model_len=64))


def test_rotary_frequencies_that_do_not_grow_yet_are_fine() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    folder = tiny_folder("llama", max_position_embeddings=64)
    TorchRollout(
        RolloutEngineConfig(model_path=str(folder), max_model_len=64, override_config={"rope_parameters": rope})
    )


def test_a_hidden_sliding_window_is_rejected(harness: RolloutHarness) -> None:
    case = harness.case("phimoe", {"sliding_window": 8, "num_local_experts": 4})
    with pytest.raises(RolloutError, match="layer 0 of phimoe has a sliding window of 8 tokens"):
        case.rollout.generate_sequences(harness.prompts(4), SamplingParams(2))


def test_a_layer_that_attends_twice_is_rejected(harness: RolloutHarness) -> None:
    case = harness.case("diffllama", {})
    with pytest.raises(RolloutError, match="layer 0 of diffllama attends twice in one model call"):
        case.rollout.generate_sequences(harness.prompts(4), SamplingParams(2))
