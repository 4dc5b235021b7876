"""Rules about samples, stops and versions of weights. `suite.py` lists them."""

from __future__ import annotations

import json
from typing import Any

from camshaft.contracts.rules import expect
from camshaft.contracts.tinker.client import Client, Sample, datum, read_samples
from camshaft.contracts.tinker.harness import TinkerHarness, expect_failure, largest_difference, messages
from camshaft.models.loader import load_tokenizer

OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 1.7, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.7},
)
STOPPED, LENGTH = 0, 1
NUM_SAMPLES = 4
CROWD = 6
"""Number of other requests beside one."""
CROWD_TOKENS = 64
"""Length of their samples."""
CROWD_SAMPLES = 64
"""Number of samples of the first of them, which are not done when the others and the one arrive."""


def _base(harness: TinkerHarness) -> tuple[Client, str]:
    """Return a client and its sampler of the base model."""
    client = harness.client()
    return client, client.sampler(0, base_model=client.base)


def log_probs_of_samples_are_exact(harness: TinkerHarness) -> None:
    """The log-probs of sampled tokens are those of the distribution that was sampled from, with temperature, top_k and
    top_p; there is one for each token."""
    client, sampler = _base(harness)
    prompt = harness.rows(6)[0].tokens
    for number, options in enumerate(OPTIONS, 1):
        samples = client.sample(sampler, number, prompt, NUM_SAMPLES, seed=number, stop=[], max_tokens=10, **options)
        expect(len(samples) == NUM_SAMPLES, f"{NUM_SAMPLES} samples were requested, and {len(samples)} came")
        settings = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, **options}
        expected = [harness.target.oracle.sampled_log_probs(prompt, sample.tokens, **settings) for sample in samples]
        harness.expect_close([sample.log_probs for sample in samples], expected, f"log-probs of samples with {options}")


def seeds_decide_samples(harness: TinkerHarness) -> None:
    """The tokens of a sample depend on its seed and its row, not on other requests at the same time. Rows of a request
    differ, and so do seeds."""
    client, sampler = _base(harness)
    rows = harness.rows(*[5] * (CROWD + 1))
    prompt = rows[0].tokens
    options = {"seed": 11, "stop": [], "max_tokens": CROWD_TOKENS}
    alone = client.sample(sampler, 1, prompt, NUM_SAMPLES, **options)
    crowd = [
        client.submit_sample(sampler, 2 + n, row.tokens, 3 if n else CROWD_SAMPLES, **{**options, "seed": n})
        for n, row in enumerate(rows[1:])
    ]
    promise = client.submit_sample(sampler, 50, prompt, NUM_SAMPLES, **options)
    crowded = read_samples(client.wait(promise))
    for promise in crowd:
        client.wait(promise)
    expect(_tokens(alone) == _tokens(crowded), "a sample has other tokens if other requests are there")
    harness.expect_close(_log_probs(alone), _log_probs(crowded), "log-probs of a sample alone and beside others")
    expect(len({tuple(sample.tokens) for sample in alone}) > 1, "all rows of a request have the same tokens")
    other = client.sample(sampler, 51, prompt, NUM_SAMPLES, **{**options, "seed": 1234})
    expect(_tokens(other) != _tokens(alone), "two seeds have the same samples")


def _tokens(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens for sample in samples]


def _log_probs(samples: list[Sample]) -> list[list[float]]:
    return [sample.log_probs for sample in samples]


def stops_end_a_sample(harness: TinkerHarness) -> None:
    """stop=None ends a sample at the end-of-sequence token, [] nowhere before max_tokens, and a list of token ids or of
    strings exactly there. The token that ends a sample is part of it, and the reason is right."""
    client, sampler = _base(harness)
    tokenizer: Any = load_tokenizer(harness.target.folder)
    prompt = harness.rows(6)[0].tokens
    options = {"seed": 5, "max_tokens": 48, "temperature": 1.0}
    free = client.sample(sampler, 1, prompt, 16, stop=[], **options)
    expect(
        all(len(sample.tokens) == 48 and sample.reason == LENGTH for sample in free),
        f"with stop=[], samples have {[len(sample.tokens) for sample in free]} tokens, expected 48 each",
    )
    common = free[0].tokens[7]
    text = tokenizer.decode(free[1].tokens[5:7])
    for number, (stop, ends) in enumerate(
        (
            (None, lambda tokens: tokens[-1] == tokenizer.eos_token_id),
            ([common], lambda tokens: tokens[-1] == common),
            ([text], lambda tokens: text in tokenizer.decode(tokens, skip_special_tokens=True)),
        ),
        2,
    ):
        samples = client.sample(sampler, number, prompt, 16, stop=stop, **options)
        for sample, full in zip(samples, free, strict=True):
            counts = [count for count in range(1, 49) if ends(full.tokens[:count])]
            expected = full.tokens[: counts[0]] if counts else full.tokens
            expect(sample.tokens == expected, f"with stop={stop}, a sample is {sample.tokens}, expected {expected}")
            reason = STOPPED if counts else LENGTH
            expect(sample.reason == reason, f"with stop={stop}, a sample has the reason {sample.reason}, not {reason}")


def samplers_keep_their_version(harness: TinkerHarness) -> None:
    """A sampler keeps its weights while the model is trained: the same request has the same samples later. Samplers of
    two versions that sample at the same time do not mix."""
    rows = messages(harness.rows())
    model = harness.model(rank=8)
    client, prompt = model.client, harness.rows(6)[0].tokens
    options = {"seed": 3, "stop": [], "max_tokens": 12}
    samplers, before = [], []
    for number in range(2):
        samplers.append(model.publish(number))
        before.append(client.sample(samplers[-1], 1, prompt, NUM_SAMPLES, **options))
        model.run(rows)
        model.update(learning_rate=3e-2)
    expect(_log_probs(before[0]) != _log_probs(before[1]), "a sampler after an update has the weights before it")
    promises = [
        (version, client.submit_sample(samplers[version], number, prompt, NUM_SAMPLES, **options))
        for number in range(2, 5)
        for version in (0, 1)
    ]
    for version, promise in promises:
        after = read_samples(client.wait(promise))
        expect(_tokens(after) == _tokens(before[version]), f"the sampler of version {version} has other samples later")
        harness.expect_close(_log_probs(after), _log_probs(before[version]), "log-probs of a sampler before and later")


def samples_are_of_the_trained_model(harness: TinkerHarness) -> None:
    """A sampler has the weights of the model when it was created: the log-probs of its samples are those that the
    model returns for the same tokens."""
    rows = messages(harness.rows())
    model = harness.model(rank=8)
    model.run(rows)
    model.update(learning_rate=3e-2)
    prompt = harness.rows(6)[0].tokens
    samples = model.client.sample(model.publish(0), 1, prompt, NUM_SAMPLES, seed=1, stop=[], max_tokens=10)
    actual = model.forward([datum([*prompt, *sample.tokens]) for sample in samples])
    expected = [row[len(prompt) - 1 :] for row in actual]
    harness.expect_close(_log_probs(samples), expected, "log-probs of samples and of a forward pass", 2.0)
    of_base = [harness.target.oracle.sampled_log_probs(prompt, s.tokens, 1.0, -1, 1.0) for s in samples]
    change = largest_difference(of_base, expected)
    expect(change > 100 * harness.target.tolerance, "the update of the model has no effect")


def base_models_are_not_trained(harness: TinkerHarness) -> None:
    """Samples of the base model are those of the base, whatever has been trained and sampled meanwhile."""
    client, sampler = _base(harness)
    model = client.create_model()
    model.run(messages(harness.rows()))
    model.update(learning_rate=3e-2)
    prompt = harness.rows(6)[0].tokens
    client.sample(model.publish(1), 1, prompt)
    samples = client.sample(sampler, 1, prompt, NUM_SAMPLES, seed=1, stop=[], max_tokens=10)
    expected = [harness.target.oracle.sampled_log_probs(prompt, sample.tokens, 1.0, -1, 1.0) for sample in samples]
    harness.expect_close(_log_probs(samples), expected, "log-probs of samples of the base model")


def invalid_prompts_are_errors(harness: TinkerHarness) -> None:
    """A prompt without tokens or with unknown ones, and options out of their range, are errors with a sentence."""
    client, sampler = _base(harness)
    prompt = harness.rows(6)[0].tokens
    for number, (tokens, options, phrase) in enumerate(
        (
            ([], {}, ""),
            ([*prompt, 2**30], {}, str(2**30)),
            (prompt, {"temperature": -1.0}, "temperature"),
            (prompt, {"top_p": 7.0}, "top_p"),
        ),
        1,
    ):
        expect_failure(
            lambda number=number, tokens=tokens, options=options: client.sample(sampler, number, tokens, **options),
            f"a prompt of {len(tokens)} tokens with {json.dumps(options)} is accepted",
            phrase,
        )
    client.sample(sampler, 10, prompt)


CHECKS = (
    log_probs_of_samples_are_exact,
    seeds_decide_samples,
    stops_end_a_sample,
    samplers_keep_their_version,
    samples_are_of_the_trained_model,
    base_models_are_not_trained,
    invalid_prompts_are_errors,
)
