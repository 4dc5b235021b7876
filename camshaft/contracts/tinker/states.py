"""Rules about saved weights, several clients, and the restart of the server. `suite.py` lists them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from camshaft.contracts.rules import NotClaimed, Violation, expect
from camshaft.contracts.tinker.client import ClientModel, Failed, Refused
from camshaft.contracts.tinker.harness import TinkerHarness, claimed, expect_failure, messages
from camshaft.contracts.tinker.oracle import Oracle, Row

NUM_QUEUED = 20
"""Number of commands that one client has queued when another one sends one."""
MAX_BEFORE = 10
"""Number of commands of another client that may end before a command that waits: one that runs, its turn, and those
that ended while the command was on its way, which takes long on a busy machine."""
TTL_SECONDS = 2
TTL_GRACE = 20.0
"""Seconds after its ttl in which a checkpoint must be gone."""


def states_are_restored(harness: TinkerHarness) -> None:
    """Saving a state changes nothing. Loading it restores the weights, and with optimizer=true the moments: the next
    update is that of the undisturbed model. With optimizer=false the optimizer begins anew."""
    model, oracle = harness.model(), harness.oracle()
    rows, later = harness.rows(), harness.rows(seed=1)
    adam = harness.adam(beta1=0.8, eps=0.3)  # moments of earlier updates have a large part in the update
    _train_both(model, oracle, rows, adam)
    path = model.call("save_weights", path="state")["path"]
    restarted = oracle.copy()
    restarted.train(later)
    restarted.update(**adam)
    _train_both(model, oracle, later, adam)
    harness.expect_weights(model, oracle, "the log-probs after a state was saved")
    for with_optimizer, expected in ((True, oracle), (False, restarted)):
        model.call("load_weights", path=path, optimizer=with_optimizer)
        model.run(messages(later))
        model.update(**adam)
        harness.expect_weights(model, expected, f"the log-probs after loading with optimizer={with_optimizer}")


def _train_both(model: ClientModel, oracle: Oracle, rows: list[Row], adam: dict[str, float]) -> None:
    model.run(messages(rows))
    model.update(**adam)
    oracle.train(rows)
    oracle.update(**adam)


def saved_weights_do_not_change(harness: TinkerHarness) -> None:
    """Saved weights stay as they are while the model is trained. Saving under their name again is refused unless
    overwrite=true, which replaces all of them."""
    model, rows = harness.model(rank=8), messages(harness.rows())
    path, expected = _save_after_update(model, rows)
    model.run(rows)
    model.update(learning_rate=3e-2)
    expect_failure(lambda: model.call("save_weights", path="fixed"), "saved weights were overwritten without overwrite")
    model.call("load_weights", path=path, optimizer=True)
    harness.expect_close(model.forward(rows), expected, "the log-probs of saved weights after an update")
    model.run(rows)
    model.update(learning_rate=3e-2)
    changed = model.forward(rows)
    model.call("save_weights", path="fixed", overwrite=True)
    model.run(rows)
    model.update(learning_rate=3e-2)
    model.call("load_weights", path=path, optimizer=True)
    harness.expect_close(model.forward(rows), changed, "the log-probs of weights that were replaced")


def names_are_no_paths(harness: TinkerHarness) -> None:
    """The name of saved weights cannot leave their folder, and neither can a path that is loaded."""
    client = harness.client()
    model = client.create_model()
    for name in ("../out", "a/../../b", "/etc/passwd", ".."):
        expect_failure(lambda name=name: model.call("save_weights", path=name), f"weights are saved as {name}")
        path = f"tinker://{model.identifier}/weights/{name}"
        expect_failure(lambda path=path: client.load_model(1, path), f"weights are loaded from {path}")


def models_are_created_from_saved_weights(harness: TinkerHarness) -> None:
    """Loading in another session creates a model with the rank and the groups of layers of the saved one. Its
    commands are numbered from 1 again. Its updates do not change the saved weights or the model that they came from."""
    source, rows = harness.model(rank=4, train_mlp=False), messages(harness.rows())
    path, expected = _save_after_update(source, rows)
    rank = source.client.saved_rank(path)
    expect(rank == 4, f"weights_info has the rank {rank}, expected 4")
    client = harness.client()
    model = client.load_model(3, path)
    name = f"{client.session}:train:3"
    expect(model.identifier == name, f"the model has the id {model.identifier}, expected {name}")
    rank = client.rank_of(name)
    expect(rank == 4, f"the model has the rank {rank}, expected 4")
    harness.expect_close(model.forward(rows), expected, "the log-probs of a model that was created from saved weights")
    model.run(rows)
    model.update(learning_rate=3e-2)
    harness.expect_close(source.forward(rows), expected, "the log-probs of the source after an update of its copy")


def _save_after_update(model: ClientModel, rows: list[Any]) -> tuple[str, list[list[float]]]:
    """Update a model and save it. Return the path and the log-probs."""
    model.run(rows)
    model.update(learning_rate=3e-2)
    return model.call("save_weights", path="fixed")["path"], model.forward(rows)


def saved_samplers_are_reusable(harness: TinkerHarness) -> None:
    """Weights that are saved for samplers under a name are sampled in another session, with the same samples as the
    unnamed weights."""
    model, rows = harness.model(rank=8), messages(harness.rows())
    model.run(rows)
    model.update(learning_rate=3e-2)
    path = model.call("save_weights_for_sampler", path="named")["path"]
    prompt, options = harness.rows(6)[0].tokens, {"seed": 3, "stop": [], "max_tokens": 8}
    expected = model.client.sample(model.publish(0), 1, prompt, 2, **options)
    client = harness.client()
    actual = client.sample(client.sampler(0, model_path=path), 1, prompt, 2, **options)
    expect([s.tokens for s in actual] == [s.tokens for s in expected], "saved weights have other samples")
    harness.expect_close([s.log_probs for s in actual], [s.log_probs for s in expected], "log-probs of samples")


def checkpoints_are_listed_and_deleted(harness: TinkerHarness) -> None:
    """Training runs and their checkpoints are listed; a checkpoint that is deleted is neither listed nor loaded, and
    the others remain."""
    model = harness.model(rank=8)
    client, run = model.client, model.identifier
    paths = [model.call("save_weights", path=name)["path"] for name in ("keep", "drop")]
    route = f"training_runs/{run}/checkpoints"
    with claimed("lists of checkpoints"):
        listed = client.call("GET", route)["checkpoints"]
    expect({entry["tinker_path"] for entry in listed} == set(paths), f"the checkpoints of {run} are {listed}")
    found = client.call("GET", f"training_runs/{run}")
    expect(found.get("base_model") == client.base, f"the training run has the base model {found.get('base_model')}")
    with claimed("deletion of checkpoints"):
        status, content = client.request(f"{route}/weights/drop", method="DELETE")
        if status not in (200, 204):
            raise Refused(f"DELETE {route}", status, content)
    listed = client.call("GET", route)["checkpoints"]
    expect([entry["tinker_path"] for entry in listed] == paths[:1], f"after a deletion, the checkpoints are {listed}")
    expect_failure(lambda: client.load_model(1, paths[1]), "a checkpoint that was deleted was loaded")
    client.load_model(2, paths[0])


def checkpoints_expire(harness: TinkerHarness) -> None:
    """A checkpoint with ttl_seconds is removed afterwards, and not while an open sampler uses it."""
    model = harness.model(rank=8)
    client, prompt = model.client, harness.rows(6)[0].tokens
    path = model.call("save_weights", path="short", ttl_seconds=TTL_SECONDS)["path"]
    used = model.call("save_weights_for_sampler", path="used", ttl_seconds=TTL_SECONDS)["path"]
    sampler = client.sampler(0, model_path=used)
    before = client.sample(sampler, 1, prompt, seed=1, stop=[])
    deadline = time.monotonic() + TTL_SECONDS + TTL_GRACE
    with contextlib.suppress(Refused):
        while time.monotonic() < deadline:
            client.saved_rank(path)
            time.sleep(0.5)
    expect_failure(lambda: client.load_model(1, path), f"a checkpoint was loaded after ttl_seconds={TTL_SECONDS}")
    after = client.sample(sampler, 2, prompt, seed=1, stop=[])
    expect(before[0].tokens == after[0].tokens, "a sampler has other samples after the ttl of its weights")


def clients_are_isolated(harness: TinkerHarness) -> None:
    """Two clients that train a model each, in turn, get the results that each gets alone. A failure of one does not
    affect the other."""
    with claimed("two models in training"):
        models = [harness.client().create_model() for _ in range(2)]
    batches = [messages(harness.rows(seed=number)) for number in range(2)]
    for step in range(2):
        for model, rows in zip(models, batches, strict=True):
            model.train(model.next(), rows)
        if step:
            expect_failure(lambda: models[0].run(batches[0], "no_such_loss"), "an unknown loss is accepted")
            expect_failure(lambda: models[0].update(), "a step after a failure has succeeded")
        else:
            models[0].update(learning_rate=1e-2)
        models[1].update(learning_rate=1e-2)
    together = [model.forward(rows) for model, rows in zip(models, batches, strict=True)]
    harness.finish()
    for number, (rows, num_steps) in enumerate(zip(batches, (1, 2), strict=True)):
        alone = harness.client().create_model()
        for _ in range(num_steps):
            alone.run(rows)
            alone.update(learning_rate=1e-2)
        harness.expect_close(together[number], alone.forward(rows), f"the log-probs of client {number} and of it alone")
        harness.finish()


def clients_take_turns(harness: TinkerHarness) -> None:
    """A client waits for a few commands of another one at most, however many the other one has sent."""
    with claimed("two models in training"):
        busy, other = (harness.client().create_model() for _ in range(2))
    long = messages(harness.rows(*[40] * 32))
    promises = [busy.train(busy.next(), long) for _ in range(NUM_QUEUED)]
    busy.wait(promises[0])
    ends = list[float]()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(lambda: [ends.append(_end(busy, promise)) for promise in promises])
        begin = time.monotonic()
        other.run(messages(harness.rows()))
        end = time.monotonic()
        reader.result()
    num_before = sum(begin < moment < end for moment in ends)
    num_after = sum(moment >= end for moment in ends)
    expect(
        num_before <= MAX_BEFORE,
        f"{num_before} commands of another client ended before a command that was sent later, and {num_after} after it",
    )


def _end(model: ClientModel, promise: dict[str, Any]) -> float:
    """Wait for a result, and return the time."""
    model.wait(promise)
    return time.monotonic()


def restarts_lose_nothing(harness: TinkerHarness) -> None:
    """After the server was killed and started again, sessions, numbers, promises and results are those of before, a
    command that was repeated does not run twice, and the model trains on as if nothing had happened."""
    restart = _restart_of(harness)
    model, other, rows = harness.model(rank=8), harness.model(rank=8), messages(harness.rows())
    expected = other.client.fetch(other.train(other.next(), rows))
    other.update(learning_rate=1e-2)
    first = model.train(1, rows)
    expect(model.client.fetch(first) == expected, "two models with the same seed have different results")
    step = model.step(2, learning_rate=1e-2)
    restart()
    with after_restart():
        again = model.train(1, rows)
        expect(model.client.fetch(again) == expected, "a repeated command has another result after a restart")
        expect(model.client.fetch(first) == expected, "a promise has another result after a restart")
        model.wait(step)
        model.num_commands = 2
        harness.expect_close(model.forward(rows), other.forward(rows), "the log-probs after a restart")
        for each in (model, other):
            each.run(rows)
            each.update(learning_rate=1e-2)
        harness.expect_same_models(model, other, "the log-probs after a restart and an update")


def restarts_keep_samplers(harness: TinkerHarness) -> None:
    """After the server was killed and started again, samplers and saved weights have the weights of before."""
    restart = _restart_of(harness)
    model, rows = harness.model(rank=8), messages(harness.rows())
    path, expected = _save_after_update(model, rows)
    prompt, options = harness.rows(6)[0].tokens, {"seed": 3, "stop": [], "max_tokens": 8}
    sampler = model.publish(0)
    before = model.client.sample(sampler, 1, prompt, 2, **options)
    restart()
    loaded = harness.client().load_model(0, path)
    harness.expect_close(loaded.forward(rows), expected, "the log-probs of saved weights after a restart")
    with after_restart():
        after = model.client.sample(sampler, 2, prompt, 2, **options)
        expect([s.tokens for s in before] == [s.tokens for s in after], "a sampler has other samples after a restart")


def _restart_of(harness: TinkerHarness) -> Callable[[], None]:
    if harness.target.restart is None:
        raise NotClaimed("the suite was started without --restart COMMAND")
    return harness.target.restart


@contextlib.contextmanager
def after_restart() -> Iterator[None]:
    """Raise `Violation` if the server does not know what it had accepted before a restart."""
    try:
        yield
    except (Failed, Refused) as error:
        raise Violation(f"after a restart, the server does not know what it accepted before: {error}") from error


CHECKS = (
    states_are_restored,
    saved_weights_do_not_change,
    names_are_no_paths,
    models_are_created_from_saved_weights,
    saved_samplers_are_reusable,
    checkpoints_are_listed_and_deleted,
    checkpoints_expire,
    clients_are_isolated,
    clients_take_turns,
    restarts_lose_nothing,
    restarts_keep_samplers,
)
