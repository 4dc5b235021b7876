"""Rules about the order of commands, repetitions, lost answers, gaps and failed commands. `suite.py` lists them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from camshaft.contracts.rules import expect
from camshaft.contracts.tinker.client import SECONDS, ClientModel, Failed, Refused, is_pending
from camshaft.contracts.tinker.harness import TinkerHarness, expect_failure, messages
from camshaft.contracts.tinker.proxy import Fault, FaultProxy, first, random_faults

NUM_UPDATES = 8
"""Number of updates of the loop with random faults."""
GAP_GRACE = 10.0
"""Seconds after its time limit in which a gap must end."""
INVALID_TOKEN = 2**30


def commands_run_in_the_order_of_their_numbers(harness: TinkerHarness) -> None:
    """Commands run in the order of their numbers, in whatever order they arrive; the SDK sends the first chunk of a
    batch last."""
    rows = harness.rows()
    batches = (rows[:1], rows[1:2], None, rows[2:], None)  # None is an optimizer step
    for arrival in ((2, 3, 1, 4, 5), (5, 4, 3, 2, 1)):
        model, oracle, promises = harness.model(), harness.oracle(), list[dict[str, Any]]()
        for number in arrival:
            batch = batches[number - 1]
            if batch is None:
                promises.append(model.step(number, **harness.adam()))
            else:
                promises.append(model.train(number, messages(batch)))
        for batch in batches:
            if batch is None:
                oracle.update(**harness.adam())
            else:
                oracle.train(batch)
        for promise in promises:
            model.wait(promise)
        model.num_commands = len(batches)
        harness.expect_weights(model, oracle, f"the log-probs after commands that arrived in the order {arrival}")
        harness.finish()


def repeated_commands_run_once(harness: TinkerHarness) -> None:
    """A command that is sent again with its number runs once, and has the same result, whether it is pending, done or
    its result has been fetched."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows()
    data = messages(rows)
    promises = [model.train(1, data), model.train(1, data)]
    results = {model.client.fetch(promise) for promise in promises}
    results.add(model.client.fetch(model.train(1, data)))
    expect(len(results) == 1, f"a command that was sent three times has {len(results)} different results")
    promises = [model.step(2, **harness.adam()) for _ in range(3)]
    results = {model.client.fetch(promise) for promise in promises}
    expect(len(results) == 1, f"a step that was sent three times has {len(results)} different results")
    model.num_commands = 2
    oracle.train(rows)
    oracle.update(**harness.adam())
    harness.expect_weights(model, oracle, "the log-probs after repeated commands")


def repeated_samples_are_one_request(harness: TinkerHarness) -> None:
    """A request for samples that is sent again with its number has the same result, also without a seed. Numbers of
    different samplers do not collide."""
    client = harness.client()
    samplers = [client.sampler(number, base_model=client.base) for number in (0, 1)]
    prompts = [row.tokens for row in harness.rows(6, 6)]
    bodies = [
        client.fetch(client.submit_sample(sampler, 1, prompt))
        for sampler, prompt in ((samplers[0], prompts[0]), (samplers[0], prompts[0]), (samplers[1], prompts[1]))
    ]
    expect(bodies[0] == bodies[1], "a request for samples that was sent twice has two results")
    expect(bodies[0] != bodies[2], "requests of two samplers with the same number have the same result")


def numbers_have_one_body(harness: TinkerHarness) -> None:
    """A number that is used again with another body is refused with a final status, and its first command stands."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows()
    promise = model.train(1, messages(rows[:2]))
    expect_failure(lambda: model.wait(model.train(1, messages(rows[2:]))), "a number was accepted with two bodies")
    model.wait(promise)
    model.num_commands = 1
    oracle.train(rows[:2])
    model.update(**harness.adam())
    oracle.update(**harness.adam())
    harness.expect_weights(model, oracle, "the log-probs after a number with two bodies")


def lost_answers_are_fetched_again(harness: TinkerHarness) -> None:
    """If the answer with a result is lost on the way, the next request for it gets the same bytes."""
    with FaultProxy(harness.target.url, first("retrieve_future", Fault.LOSE_ANSWER)) as proxy:
        client = harness.client(proxy.url)
        model = ClientModel(client, f"{client.session}:train:0")
        body = {"session_id": client.session, "model_seq_id": 0, "base_model": client.base}
        promise = client.post("create_model", **body, lora_config={"rank": 8, "seed": 1})
        created = [client.fetch(promise) for _ in range(3)]  # the answer to the first is lost once
        expect(len(set(created)) == 1, f"the creation of a model has {len(set(created))} different results")
        promise = model.train(1, messages(harness.rows()))
        results = {client.fetch(promise) for _ in range(3)}
        expect(len(results) == 1, f"a command has {len(results)} different results")
        expect(proxy.num_faults == 1, f"the proxy has lost {proxy.num_faults} answers, expected 1")


def faults_do_not_change_weights(harness: TinkerHarness) -> None:
    """A training loop whose requests and answers are lost, repeated, delayed and split at random has the weights of a
    loop without faults."""
    batches = [harness.rows(seed=number) for number in range(NUM_UPDATES)]
    models = list[ClientModel]()
    with FaultProxy(harness.target.url, random_faults(seed=0)) as proxy:
        for url in (None, proxy.url):
            model = harness.client(url).create_model(rank=8)
            models.append(model)
            for rows in batches:
                promises = [model.train(model.next(), messages([row])) for row in rows]
                promises.append(model.step(model.next(), learning_rate=1e-3))
                for promise in promises:
                    model.wait(promise)
        expect(proxy.num_faults > 0, "the proxy has disturbed no request")
        harness.expect_same_models(models[0], models[1], "the log-probs after a loop with faults and one without")


def gaps_end(harness: TinkerHarness) -> None:
    """Commands that wait for a number which never arrives fail within the time limit of the server, with a sentence
    that has the number. The model is usable afterwards."""
    model, rows = harness.model(rank=8), harness.rows()
    model.run(messages(rows))
    begin = time.monotonic()
    waiting = [model.train(3, messages(rows)), model.step(4, **harness.adam())]
    limit = harness.target.gap_timeout + GAP_GRACE
    for number, promise in enumerate(waiting, 3):
        while is_pending(*(answer := model.client.poll(promise))) and time.monotonic() - begin < limit:
            pass
        expect(not is_pending(*answer), f"command {number} still waits for command 2 after {limit:g} s")
        expect_failure(lambda promise=promise: model.wait(promise), f"command {number} ran without command 2", "2")
    model.num_commands = 4
    harness.expect_close(model.forward(messages(rows)), harness.oracle().values(rows), "the log-probs after a gap")


def failed_chunks_fail_the_step(harness: TinkerHarness) -> None:
    """If one chunk of a batch fails, the optimizer step that was sent after it fails too, with a sentence, and changes
    no weight, even though it was sent before the chunk failed."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows()
    _send_failing_batch(harness, model)
    harness.expect_close(model.forward(messages(rows)), oracle.values(rows), "the log-probs after a failed chunk")


def models_are_usable_after_failures(harness: TinkerHarness) -> None:
    """After a failed command and a failed step, the gradients are cleared, and the model trains on."""
    model, oracle, rows = harness.model(), harness.oracle(), harness.rows()
    _send_failing_batch(harness, model)
    for _ in range(2):
        model.run(messages(rows))
        oracle.train(rows)
        model.update(**harness.adam())
        oracle.update(**harness.adam())
        harness.expect_weights(model, oracle, "the log-probs after a failure and an update")


def _send_failing_batch(harness: TinkerHarness, model: ClientModel) -> None:
    """Send three chunks, of which the second is wrong, and a step, before any of them has a result.

    A server that refuses the wrong chunk at once waits for another command with its number.
    """
    rows, limit = harness.rows(), max(SECONDS, harness.target.gap_timeout + GAP_GRACE)
    invalid = harness.rows(3)[0]
    invalid.targets[1] = INVALID_TOKEN
    first_chunk = model.train(1, messages(rows[:1]))
    try:
        promise, refusal = model.train(2, messages([invalid])), None
    except Refused as error:
        promise, refusal = {}, error

    def wait_for_invalid() -> None:
        if refusal is not None:
            raise refusal
        model.wait(promise)

    last_chunk, step = model.train(3, messages(rows[1:])), model.step(4, **harness.adam())
    model.wait(first_chunk)
    expect_failure(wait_for_invalid, f"the target {INVALID_TOKEN} was accepted")
    with contextlib.suppress(Failed):  # a server may end the batch at its first failure
        model.wait(last_chunk, limit)
    sentence = expect_failure(lambda: model.wait(step, limit), "the step after a failed chunk has succeeded")
    expect(len(sentence) > 10, f"the failed step has no sentence: '{sentence}'")
    model.num_commands = 4


CHECKS = (
    commands_run_in_the_order_of_their_numbers,
    repeated_commands_run_once,
    repeated_samples_are_one_request,
    numbers_have_one_body,
    lost_answers_are_fetched_again,
    faults_do_not_change_weights,
    gaps_end,
    failed_chunks_fail_the_step,
    models_are_usable_after_failures,
)
