"""The harness of the Tinker contract: clients, models, expected results and comparisons.

    with TinkerHarness(target) as harness:
        model, oracle, rows = harness.model(rank=0), harness.oracle(), harness.rows(5, 3)
        harness.expect_update(model, oracle, rows)

Results differ from those of the oracle by rounding errors, which the harness measures: it computes log-probs with the
oracle in the dtype of the server, too. A result may differ by `ROUNDINGS` times as much. The learning rate is chosen so
that an update changes log-probs by about `EFFECT`; a wrong gradient then exceeds the tolerance by orders of magnitude.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self

import torch

from camshaft.contracts.rules import NotClaimed, Violation, expect
from camshaft.contracts.tinker.client import Client, ClientModel, Failed, Refused
from camshaft.contracts.tinker.oracle import Oracle, Row

ROUNDINGS = 8
MIN_TOLERANCE = 1e-5
EFFECT = 0.3
AFTER_UPDATES = 30.0
"""Tolerance after updates, as a multiple of that of log-probs."""
FINAL_STATUSES = (401, 403, 404, 405, 410, 413, 422)
"""Statuses that the SDK does not repeat."""
LENGTHS = (6, 3, 9, 1)
"""Lengths of the rows of most rules."""
FIRST_TOKEN, LAST_TOKEN = 5, 99
"""Token ids of rows, which are in any vocabulary. Smaller ones may be special."""


@dataclass
class Target:
    """A server, and what the suite has to know about it."""

    url: str
    key: str
    base: str
    """Name of the base model, as clients know it."""
    folder: str
    """Folder of the same model."""
    dtype: str = "float32"
    """Dtype in which the server computes."""
    gap_timeout: float = 300.0
    """Seconds after which the server gives up waiting for a missing command."""
    poll_limit: float = 40.0
    """Seconds after which an answer to a poll is too late; the SDK waits for 45 s."""
    other_key: str | None = None
    """Key of another user."""
    restart: Callable[[], None] | None = None
    """Kill the server, start it again at the same address, and wait until it answers."""

    @cached_property
    def oracle(self) -> Oracle:
        return Oracle.load(self.folder)

    @cached_property
    def tolerance(self) -> float:
        """Tolerance of log-probs."""
        rows = make_rows(*LENGTHS)
        rounded = Oracle(self.oracle.copy().model.to(getattr(torch, self.dtype)))
        exact, actual = self.oracle.values(rows), rounded.values(rows)
        return max(MIN_TOLERANCE, ROUNDINGS * largest_difference(actual, exact))

    @cached_property
    def learning_rate(self) -> float:
        """Learning rate at which one update with eps = 1 on the usual rows changes their log-probs by `EFFECT`."""
        rows, rate = make_rows(*LENGTHS), 1e-4
        before = self.oracle.values(rows)
        while True:
            oracle = self.oracle.copy()
            oracle.train(rows)
            oracle.update(learning_rate=rate, eps=1.0)
            if largest_difference(oracle.values(rows), before) > EFFECT or rate > 1e4:
                return rate
            rate *= 2


def make_rows(*lengths: int, seed: int = 0) -> list[Row]:
    """Return rows of random tokens, whose targets are the tokens that follow, with the given numbers of targets."""
    generator = random.Random(seed)
    rows = list[Row]()
    for length in lengths:
        tokens = [generator.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length + 1)]
        rows.append(Row(tokens[:-1], tokens[1:]))
    return rows


def largest_difference(rows: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> float:
    """Return the largest difference of values of rows. Raise `Violation` if their lengths are not equal."""
    lengths = [len(row) for row in rows], [len(row) for row in others]
    expect(lengths[0] == lengths[1], f"the answer has {lengths[0]} values per datum, expected {lengths[1]}")
    pairs = ((a, b) for row, other in zip(rows, others, strict=True) for a, b in zip(row, other, strict=True))
    differences = [abs(a - b) for a, b in pairs]
    return max((value if value == value else float("inf") for value in differences), default=0.0)


class TinkerHarness:
    """Clients of one rule, whose sessions end with it."""

    def __init__(self, target: Target):
        self.target = target
        self._clients: list[Client] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    # -- clients ----------------------------------------------------------------------------------

    def client(self, url: str | None = None) -> Client:
        """Return a client with a session of its own. With the URL of a proxy, it is patient."""
        client = Client(url or self.target.url, self.target.key, self.target.base, url is not None).open()
        self._clients.append(client)
        return client

    def finish(self) -> None:
        """End the sessions of all clients, which frees their models."""
        while self._clients:
            client = self._clients.pop()
            client.url, client.is_patient = self.target.url, False  # its proxy may be closed
            with contextlib.suppress(OSError, HTTPException):
                client.finish()

    def model(self, rank: int = 0, number: int = 0, **lora: Any) -> ClientModel:
        """Return a new model of a new client. Raise `NotClaimed` if the server does not train all weights."""
        with claimed("training of all weights (rank 0)") if rank == 0 else contextlib.nullcontext():
            return self.client().create_model(number, rank, **lora)

    # -- expected results -------------------------------------------------------------------------

    def oracle(self) -> Oracle:
        """Return the base model."""
        return self.target.oracle.copy()

    def rows(self, *lengths: int, seed: int = 0) -> list[Row]:
        """Return random rows; those of most rules by default."""
        return make_rows(*(lengths or LENGTHS), seed=seed)

    def rl_rows(self, *lengths: int, spread: float = 0.4, **columns: float) -> list[Row]:
        """Return rows with advantages of both signs, and log-probs that differ by `spread` from those of the model."""
        generator = random.Random(1)
        rows = list[Row]()
        for row in self.rows(*lengths):
            values = self.target.oracle.values([row])[0]
            old = [value + generator.uniform(-spread, spread) for value in values]
            advantages = [generator.uniform(-2, 2) for _ in values]
            constant = {name: [value] * len(values) for name, value in columns.items()}
            rows.append(row.having(logprobs=old, advantages=advantages, **constant))
        return rows

    def adam(self, **settings: float) -> dict[str, float]:
        """Return the settings of a step from which the gradient can be read: eps = 1, and no decay or clipping."""
        return {"learning_rate": self.target.learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1.0, **settings}

    # -- comparisons ------------------------------------------------------------------------------

    def expect_close(
        self, actual: Sequence[Sequence[float]], expected: Sequence[Sequence[float]], what: str, factor: float = 1.0
    ) -> None:
        """Raise `Violation` if log-probs differ by more than rounding errors."""
        difference, limit = largest_difference(actual, expected), self.target.tolerance * factor
        expect(difference <= limit, f"{what} differ by {difference:.2g} (tolerance {limit:.1g})")

    def expect_loss(self, actual: float, expected: float, what: str) -> None:
        limit = self.target.tolerance * max(1.0, abs(expected)) * 3
        expect(abs(actual - expected) <= limit, f"{what} is {actual:.7g}, expected {expected:.7g}")

    def expect_weights(self, model: ClientModel, oracle: Oracle, what: str = "the log-probs after the update") -> None:
        """Raise `Violation` unless a model has the weights of the oracle, which must not be those of the base model."""
        rows = self.rows(*LENGTHS, 12)
        expected = oracle.values(rows)
        change = largest_difference(expected, self.target.oracle.values(rows))
        limit = self.target.tolerance * AFTER_UPDATES
        assert change > 10 * limit, f"the update changes log-probs by {change:.2g} only; the rule would prove nothing"
        self.expect_close(model.forward(messages(rows)), expected, what, AFTER_UPDATES)

    def expect_same_models(self, model: ClientModel, other: ClientModel, what: str) -> None:
        """Raise `Violation` unless two models have the same weights."""
        rows = messages(self.rows(*LENGTHS, 12))
        self.expect_close(model.forward(rows), other.forward(rows), what)

    def expect_gradient(self, rows: Sequence[Row], loss: str = "cross_entropy", **options: float) -> None:
        """Raise `Violation` unless log-probs, value and gradient of a loss are those of the oracle.

        On a server that trains adapters only, the gradient is compared with that of the cross_entropy with the weights
        that the oracle computes.
        """
        oracle = self.oracle()
        expected = oracle.train(rows, loss, **options)
        try:
            model = self.model()
        except NotClaimed:
            if loss == "cross_entropy":
                raise
            self._expect_gradient_of_adapter(rows, loss, options)
            return
        with claimed(f"loss_fn={loss}"):
            log_probs, value = model.run(messages(rows), loss, **options)
        self.expect_close(log_probs, self.target.oracle.values(rows), "the log-probs of the targets")
        self.expect_loss(value, expected, f"loss:sum of {loss} with {options}")
        oracle.update(**self.adam())
        model.update(**self.adam())
        self.expect_weights(model, oracle, f"the log-probs after an update of {loss} with {options}")

    def _expect_gradient_of_adapter(self, rows: Sequence[Row], loss: str, options: dict[str, float]) -> None:
        oracle = self.oracle()
        results = list[list[list[float]]]()
        for name, data, given in (
            (loss, rows, options),
            ("cross_entropy", oracle.weights_of(rows, loss, **options), {}),
        ):
            model = self.model(rank=8)
            with claimed(f"loss_fn={name}"):
                _, value = model.run(messages(data), name, **given)
            if name == loss:
                self.expect_loss(value, oracle.train(rows, loss, **options), f"loss:sum of {loss} with {options}")
            model.update(**self.adam())
            results.append(model.forward(messages(self.rows())))
            self.finish()
        what = f"log-probs after updates of {loss} and of cross_entropy with its weights"
        self.expect_close(results[0], results[1], what, AFTER_UPDATES)


def messages(rows: Sequence[Row]) -> list[Any]:
    return [row.message() for row in rows]


@contextlib.contextmanager
def claimed(feature: str) -> Iterator[None]:
    """Raise `NotClaimed` if the server refuses what the block requests, as a mistake of the client."""
    try:
        yield
    except Refused as error:
        if error.status not in (*FINAL_STATUSES, 400, 501):
            raise
        raise NotClaimed(f"{feature}: {error}") from error
    except Failed as error:
        if error.category != "user":
            raise
        raise NotClaimed(f"{feature}: {error}") from error


def expect_failure(action: Callable[[], Any], problem: str, *phrases: str) -> str:
    """Raise `Violation` unless a command fails, or is refused for good, with a sentence that has one of the phrases."""
    try:
        action()
    except Failed as error:
        sentence = str(error)
    except Refused as error:
        expect(error.status in FINAL_STATUSES, f"the status {error.status} lets the SDK repeat the request: {error}")
        sentence = str(error)
    else:
        raise Violation(problem)
    expect(
        not phrases or any(phrase in sentence for phrase in phrases),
        f"the error does not mention {' or '.join(phrases)}: {sentence}",
    )
    return sentence
