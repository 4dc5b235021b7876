"""Rules of the rollout contract about the end of a response and about invalid prompts. `suite.py` lists them."""

from __future__ import annotations

import torch

from camshaft.contracts.rollout.harness import EOS, Case, RolloutHarness, expect_rollout_error
from camshaft.contracts.rules import expect
from camshaft.ragged import Ragged
from camshaft.rollout.base import Generation, SamplingParams


def rows_end(harness: RolloutHarness) -> None:
    """A row ends after its first stop token or at max_tokens. `finished` distinguishes these cases."""
    case, prompts = harness.case(), harness.prompts(*[4] * 12)
    stops = tuple(range(10, 40))
    for sampling in (
        SamplingParams(10, stop_token_ids=stops),
        SamplingParams(10, stop_token_ids=stops, ignore_eos=True),
        SamplingParams(10, ignore_eos=True),
        SamplingParams(1, stop_token_ids=stops),
    ):
        out = case.rollout.generate_sequences(prompts, sampling)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        expect(
            len(out.responses) == 12 and out.finished.shape == (12,), f"the result does not contain 12 responses: {out}"
        )
        for row, finished in zip(out.responses.rows(), out.finished.tolist(), strict=True):
            tokens = row.tolist()
            expect(not ends & set(tokens[:-1]), f"{sampling}: a row continued after a stop token: {tokens}")
            expect(finished == (tokens[-1] in ends), f"{sampling}: finished={finished} for the tokens {tokens}")
            expect(
                finished or len(tokens) == sampling.max_tokens,
                f"{sampling}: an unfinished row ended after {len(tokens)} tokens",
            )


def stop_strings_end_a_row(harness: RolloutHarness) -> None:
    """A row ends after the token that completes a stop string in the decoded response. This token is kept."""
    case, prompts = harness.case(), harness.prompts(*[4] * 8)
    unlimited = SamplingParams(14, temperature=0, ignore_eos=True)
    full_rows = [row.tolist() for row in case.rollout.generate_sequences(prompts, unlimited).responses.rows()]
    texts = [case.text(row) for row in full_rows]
    # Taken from the first three rows: a string of one token, one of several tokens, and one that begins in the prompt.
    candidates = (texts[0][3], texts[1][2:5], case.text(prompts.rows()[2][-1:].tolist()) + texts[2][0])
    stop_ids = (full_rows[3][5],)
    for strings in (candidates, candidates[1:], ("never said",)):
        for sampling in (
            SamplingParams(14, temperature=0, ignore_eos=True, stop=strings),
            SamplingParams(14, temperature=0, stop=strings, stop_token_ids=stop_ids),
        ):
            out = case.rollout.generate_sequences(prompts, sampling)
            _check_ends(out, full_rows, case, sampling)


def _check_ends(out: Generation, full_rows: list[list[int]], case: Case, sampling: SamplingParams) -> None:
    """Raise `Violation` unless each row of `out` is the prefix of `full_rows` that `sampling` ends first."""
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
    for row, (response, tokens) in enumerate(zip(out.responses.rows(), full_rows, strict=True)):
        ends = [
            count
            for count in range(1, len(tokens) + 1)
            if tokens[count - 1] in stops or any(string in case.text(tokens[:count]) for string in sampling.stop)
        ]
        expected = tokens[: ends[0]] if ends else tokens
        subject = f"row {row} with stop={sampling.stop}, stop_token_ids={sampling.stop_token_ids}"
        expect(
            response.tolist() == expected,
            f"{subject}: the response is {response.tolist()}, expected {expected}; without stops it is {tokens}",
        )
        expect(bool(out.finished[row]) == bool(ends), f"{subject}: finished={bool(out.finished[row])}")
    expect(torch.equal(out.responses.lengths, out.log_probs.lengths), "log-probs and tokens are not aligned")


def end_of_sequence_ends_a_row(harness: RolloutHarness) -> None:
    """The model's end-of-sequence token ends a row unless ignore_eos is set."""
    case = harness.empty_case(sizes={"tie_embeddings": False})
    head = case.oracle.get_output_embeddings().weight
    head.data[EOS] = head.data.abs().sum(dim=0)
    head.data[3:] = -head.data[EOS]
    # For any hidden state, the largest logit now belongs to EOS or to all tokens from 3 on.
    case.rollout.load_weights(case.weights())
    prompts = harness.prompts(*range(1, 11))
    out = case.rollout.generate_sequences(prompts, SamplingParams(6, temperature=0))
    expect(bool(out.finished.any()), "no row is finished, although some rows sample the end-of-sequence token")
    for prompt, response in zip(prompts.rows(), out.responses.rows(), strict=True):
        expected = case.generate(prompt, 6, [EOS])
        expect(response.tolist() == expected, f"the response is {response.tolist()}, transformers generates {expected}")
    out = case.rollout.generate_sequences(prompts, SamplingParams(6, temperature=0, ignore_eos=True))
    lengths = out.responses.lengths.tolist()
    expect(lengths == [6] * 10, f"with ignore_eos, response lengths are {lengths}, expected 6 each")
    expect(not bool(out.finished.any()), "rows that reached max_tokens are marked as finished")


def max_model_len_ends_a_row(harness: RolloutHarness) -> None:
    """In each row, prompt and response together have at most max_model_len tokens."""
    case = harness.case(max_model_len=20)
    prompts = harness.prompts(3, 19, 12, 1)
    out = case.rollout.generate_sequences(prompts, SamplingParams(10, ignore_eos=True))
    lengths = out.responses.lengths.tolist()
    expect(lengths == [10, 1, 8, 10], f"response lengths are {lengths}, expected [10, 1, 8, 10]")


def no_prompts(harness: RolloutHarness) -> None:
    """An empty batch of prompts gives an empty batch of responses."""
    out = harness.case().rollout.generate_sequences(harness.prompts(), SamplingParams(4))
    expect(len(out.responses) == len(out.log_probs) == len(out.finished) == 0, f"an empty batch gave {out}")


def invalid_prompts_are_rejected(harness: RolloutHarness) -> None:
    """An empty prompt, a prompt that fills max_model_len, or a token outside the vocabulary raises an error that
    contains the row and the value."""
    case = harness.case(max_model_len=20)

    def generate(prompts: Ragged) -> None:
        case.rollout.generate_sequences(prompts, SamplingParams(4))

    empty = Ragged.from_rows([torch.tensor([5]), torch.tensor([], dtype=torch.int64)])
    expect_rollout_error(lambda: generate(empty), "row 1", "an empty prompt was accepted")
    expect_rollout_error(
        lambda: generate(harness.prompts(3, 4, 20)), "row 2 has a prompt of 20 tokens", "a long prompt was accepted"
    )
    unknown = Ragged.from_rows([[5], [6, 7000]])
    expect_rollout_error(lambda: generate(unknown), "token id 7000", "an unknown token was accepted")
