"""Rules about log-probs of prompts, and of tokens that were not sampled. `suite.py` lists them."""

from __future__ import annotations

from typing import Any

import numpy as np

from camshaft.contracts.rules import expect
from camshaft.contracts.tinker.client import Client, read_samples
from camshaft.contracts.tinker.harness import TinkerHarness, claimed, largest_difference, messages
from camshaft.wire import messages as wire

TOP_K = 3
LENGTH = 8
"""Number of tokens of the prompt of most rules."""


def prompts_have_log_probs(harness: TinkerHarness) -> None:
    """prompt_logprobs returns the log-prob of each token of the prompt, and none for the first one, also in a request
    for several samples. With prompt_logprobs_last_n, the tokens before the last n have none."""
    prompt = harness.rows(LENGTH)[0].tokens
    expected = harness.target.oracle.sampled_log_probs(prompt[:1], prompt[1:], 1.0, -1, 1.0)
    for options in ({}, {"num_samples": 2, "sampling_params": {"max_tokens": 3, "temperature": 0.5}}):
        response = _score(harness, prompt, prompt_logprobs=True, **options)
        actual = np.frombuffer(response.prompt_logprobs, "<f4")
        expect(len(actual) == len(prompt), f"a prompt of {len(prompt)} tokens has {len(actual)} log-probs")
        expect(bool(np.isnan(actual[0])), f"the first token of the prompt has the log-prob {actual[0]}, expected none")
        harness.expect_close([actual[1:].tolist()], [expected], "log-probs of the prompt")
    response = _score(harness, prompt, prompt_logprobs=True, prompt_logprobs_last_n=3)
    last = np.frombuffer(response.prompt_logprobs, "<f4")
    harness.expect_close([last[-3:].tolist()], [expected[-3:]], "log-probs of the last 3 tokens of the prompt")
    expect(bool(np.isnan(last[:-3]).all()), "prompt_logprobs_last_n=3 returns earlier log-probs, too")


def prompts_have_the_most_likely_tokens(harness: TinkerHarness) -> None:
    """topk_prompt_logprobs returns the k most likely tokens at each position of the prompt but the first, with their
    log-probs."""
    prompt = harness.rows(LENGTH)[0].tokens
    table = _score(harness, prompt, topk_prompt_logprobs=TOP_K).topk_prompt_logprobs
    expect(table.length == len(prompt), f"the table has length={table.length}, expected {len(prompt)}")
    _check_table(harness, table, prompt, 1)


def candidates_of_prompts_have_log_probs(harness: TinkerHarness) -> None:
    """target_prompt_logprobs returns the log-probs of the given tokens at each position of the prompt but the first, in
    the layout of the request, dense or sparse. A cell with -1 is 0."""
    prompt = harness.rows(LENGTH)[0].tokens
    ids = [[(token + 7 * row) % 90 + 5, token if row % 2 else -1] for row, token in enumerate(prompt[1:])]
    exact = [
        harness.target.oracle.sampled_log_probs(prompt[: row + 1], [token], 1.0, -1, 1.0)[0] if token >= 0 else 0.0
        for row, tokens in enumerate(ids)
        for token in tokens
    ]
    dense = {"data": [token for row in ids for token in row], "dtype": "int64", "shape": [len(ids), 2]}
    tensor = _score(harness, prompt, target_prompt_logprobs=dense).target_prompt_logprobs
    expect(list(tensor.shape) == [len(ids), 2], f"the table of candidates has the shape {list(tensor.shape)}")
    harness.expect_close([np.frombuffer(tensor.dense, "<f4").tolist()], [exact], "log-probs of candidates")
    columns = [[column for column, token in enumerate(row) if token >= 0] for row in ids]
    sparse = {
        **dense,
        "data": [row[column] for row, listed in zip(ids, columns, strict=True) for column in listed],
        "sparse_crow_indices": np.cumsum([0, *map(len, columns)]).tolist(),
        "sparse_col_indices": [column for listed in columns for column in listed],
    }
    csr = _score(harness, prompt, target_prompt_logprobs=sparse).target_prompt_logprobs.sparse_csr
    listed = [value for value, token in zip(exact, dense["data"], strict=True) if token >= 0]
    harness.expect_close([np.frombuffer(csr.values, "<f4").tolist()], [listed], "log-probs of a sparse table")
    for name, indices in (("crow_indices", csr.crow_indices), ("col_indices", csr.col_indices)):
        actual, expected = np.frombuffer(indices, "<i8").tolist(), sparse[f"sparse_{name}"]
        expect(actual == expected, f"the sparse table has {name} {actual}, expected {expected}")


def samples_have_the_most_likely_tokens(harness: TinkerHarness) -> None:
    """topk_sample_logprobs returns the k most likely tokens at each position of a sample, with their log-probs. If the
    sampled token is among them, both of its log-probs are equal."""
    prompt = harness.rows(LENGTH)[0].tokens
    options = {"max_tokens": 5, "stop": [], "seed": 4, "temperature": 1.0}
    response = _score(harness, prompt, topk_sample_logprobs=TOP_K, num_samples=3, sampling_params=options)
    expect(len(response.sequences) == 3, f"3 samples were requested, and {len(response.sequences)} came")
    for sample, sequence in zip(read_samples(response.SerializeToString()), response.sequences, strict=True):
        table = sequence.topk_sampled_logprobs
        expect(table.length == len(sample.tokens), f"the table has length={table.length}, not {len(sample.tokens)}")
        tokens, values = _check_table(harness, table, [*prompt, *sample.tokens], len(prompt))
        for row, (token, log_prob) in enumerate(zip(sample.tokens, sample.log_probs, strict=True)):
            same = [value for other, value in zip(tokens[row], values[row], strict=True) if other == token]
            harness.expect_close([same], [[log_prob] * len(same)], "two log-probs of a sampled token", 2.0)


def log_probs_of_prompts_and_samples_agree(harness: TinkerHarness) -> None:
    """The log-probs of a sample are those of its tokens at the end of a prompt, for the same sampler, while the model
    is trained further."""
    rows, prompt = messages(harness.rows()), harness.rows(6)[0].tokens
    model = harness.model(rank=8)
    model.run(rows)
    model.update(learning_rate=3e-2)
    client, sampler = model.client, model.publish(0)
    samples = client.sample(sampler, 1, prompt, 3, seed=1, stop=[], max_tokens=10)
    model.run(rows)
    model.update(learning_rate=3e-2)
    client.sample(model.publish(1), 1, prompt)
    for number, sample in enumerate(samples, 2):
        tokens = [*prompt, *sample.tokens]
        response = _request(client, sampler, number, tokens, prompt_logprobs=True)
        actual = np.frombuffer(response.prompt_logprobs, "<f4")[len(prompt) :].tolist()
        harness.expect_close([actual], [sample.log_probs], "log-probs of a sample and of a prompt", 2.0)
        of_base = harness.target.oracle.sampled_log_probs(prompt, sample.tokens, 1.0, -1, 1.0)
        change = largest_difference([of_base], [actual])
        expect(change > 100 * harness.target.tolerance, "the log-probs of the prompt are those of the base model")


def _check_table(
    harness: TinkerHarness, table: Any, tokens: list[int], first: int
) -> tuple[list[list[int]], list[list[float]]]:
    """Compare the most likely tokens at positions of a row, from `first` on, with the oracle. Return the table.

    The first positions of a table of all tokens are not compared.
    """
    expect(table.k == TOP_K, f"the table has k={table.k}, expected {TOP_K}")
    ids = np.frombuffer(table.token_ids, "<i4").reshape(-1, TOP_K)
    values = np.frombuffer(table.logprobs, "<f4").reshape(-1, TOP_K)
    for position in range(first, len(tokens)):
        row, prefix = position - len(tokens), tokens[:position]
        expected = [
            harness.target.oracle.sampled_log_probs(prefix, [token], 1.0, -1, 1.0)[0] for token in ids[row].tolist()
        ]
        harness.expect_close([values[row].tolist()], [expected], f"top-k log-probs at position {position}")
        expect(len(set(ids[row].tolist())) == TOP_K, f"a token is twice among the top-k at position {position}")
        best = harness.target.oracle.best_log_prob(prefix)
        harness.expect_close([[max(expected)]], [[best]], f"the largest log-prob at position {position}")
    return ids.tolist(), values.tolist()


def _score(harness: TinkerHarness, prompt: list[int], **fields: Any) -> Any:
    """Return the response of the base model to a request for log-probs. Its first field names the feature."""
    client = harness.client()
    return _request(client, client.sampler(0, base_model=client.base), 1, prompt, **fields)


def _request(client: Client, sampler: str, number: int, tokens: list[int], **fields: Any) -> Any:
    body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": 1, "sampling_params": {"max_tokens": 1}}
    body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    with claimed(next(iter(fields))):
        content = client.wait(client.post("asample", **(body | fields)))
    return wire.SampleResponse.FromString(content)


CHECKS = (
    prompts_have_log_probs,
    prompts_have_the_most_likely_tokens,
    candidates_of_prompts_have_log_probs,
    samples_have_the_most_likely_tokens,
    log_probs_of_prompts_and_samples_agree,
)
