"""Sessions: the conversations of a program with the policy, as rows of tokens.

    session = Session(0, question, policy)
    exchange = session.exchange(digest, False, is_connected, lambda: session.begin(history, form, options))
    exchange.choices()                      # waits for the answers, which `session.receive` appends to their rows
    episodes = session.close()

A request continues a row if its history begins with that of the row, up to and including the last answer: only what
follows is formatted, and appended. It starts another row if the row has an answer to this history already or generates
one, or if the history is that of an earlier answer: the row has the tokens of that history, which are not trained on
again. A history that does not begin with one of a row is formatted from the beginning, as a new row. Histories are
messages, texts, or token ids; they are compared for equality.

A request is a repetition of an equal one if the client says so or has gone before it got its answer. It gets or joins
the answer of that one, unless it is an error. Every other equal request is a new sample.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

import torch

from camshaft.agents.bridge import Bridge
from camshaft.agents.environment import Message
from camshaft.agents.episode import Episode
from camshaft.agents.forms import Form, Sampled
from camshaft.agents.play import Limits, Question
from camshaft.agents.wire import Choice, Options, Refused
from camshaft.errors import RolloutError
from camshaft.rollout import Answer, SamplingParams, Stream
from camshaft.rollout.sampling import mix_seeds, restart_seeds

CONTEXT_CODE = "context_length_exceeded"
WAIT_SECONDS = 0.5
"""Time between two checks of a waiting request whether its client is still there."""

WRITE_SECONDS = 1.0
"""Maximum time to wait for the end of a reply whose client has gone."""


class Idle(NamedTuple):
    """Time in which a session has waited for its program, without an open request, in seconds."""

    last: float
    """Since the last answer, or since the session was opened. 0 during a request."""
    total: float
    requests: int
    """Number of requests so far."""


@dataclass
class State:
    """A row behind one of its answers."""

    history: Any
    """Conversation up to and including the answer."""
    length: int
    """Number of tokens behind the prompt."""
    num_messages: int
    num_answers: int


@dataclass
class Row:
    """A row of a session. `states` has one entry for each answer, and that in which the row began, if there is one."""

    row_id: str
    seed: int
    form: Form
    episode: Episode
    states: list[State] = field(default_factory=list)
    is_busy: bool = False

    @property
    def num_answers(self) -> int:
        """Number of answers of the row, with those of the row from which it was forked."""
        return self.states[-1].num_answers if self.states else 0


@dataclass
class Sample:
    """An answer that is generated."""

    row: Row
    form: Form
    history: Any
    told: list[int]
    told_messages: list[Message]
    limit: int
    options: Options
    prompt_ids: list[int]
    choice: Choice | None = None
    error: Exception | None = None

    @property
    def identifier(self) -> str:
        """Name of the answer in replies."""
        return f"{self.row.row_id}.{len(self.prompt_ids)}"


class Exchange:
    """A request and its answers, which repetitions of the request get too."""

    def __init__(self, digest: bytes, samples: list[Sample], is_connected: Callable[[], bool]):
        self.digest, self.samples = digest, samples
        self.is_connected = is_connected
        """Return False if the client that waits for the answers has gone."""
        self.is_written = False
        """True if the answers have been sent completely."""
        self._num_writing = 0
        self._changed = threading.Condition()
        self.num_repetitions = 0
        self.has_ended = threading.Event()

    @property
    def is_lost(self) -> bool:
        """True if nobody has got the answers, and nobody waits for them.

        A client may have read the answers and gone while the thread that writes them does not know yet that it has.
        """
        if self.is_written or self.is_connected():
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._num_writing == 0, WRITE_SECONDS)
        return not self.is_written

    @property
    def has_failed(self) -> bool:
        """True if an answer is an error, so that a repetition is a new sample."""
        return any(sample.error is not None for sample in self.samples)

    def choices(self) -> list[Choice]:
        """Wait for the answers. Raise ConnectionError if the client has gone, and the error of an answer."""
        is_connected = self.is_connected
        while not self.has_ended.wait(WAIT_SECONDS):
            if not is_connected():
                raise ConnectionError("the client has gone")
        for sample in self.samples:
            if sample.error is not None:
                raise sample.error
        return [sample.choice for sample in self.samples if sample.choice is not None]

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Send the answers in this context."""
        with self._changed:
            self._num_writing += 1
        try:
            yield
            self.is_written = True
        finally:
            with self._changed:
                self._num_writing -= 1
                self._changed.notify_all()

    def check_ended(self) -> None:
        if all(sample.choice is not None or sample.error is not None for sample in self.samples):
            self.has_ended.set()


@dataclass(frozen=True)
class Policy:
    """Parts that all sessions of an endpoint share."""

    stream: Stream
    bridge: Bridge
    limits: Limits
    sampling: SamplingParams


class Session:
    """The conversations of one program. Methods are called from several threads."""

    def __init__(self, number: int, question: Question, policy: Policy):
        self.number, self.question, self.policy = number, question, policy
        self.rows: list[Row] = []
        self._exchanges: dict[bytes, list[Exchange]] = {}
        self._samples: dict[str, tuple[Sample, Exchange]] = {}
        """Answers that are generated, by the name of their row."""
        self._lock = threading.RLock()
        self._is_closed = False
        self._num_open, self._num_requests = 0, 0
        self._idle_since, self._idle_seconds = time.monotonic(), 0.0
        self._has_long_prompt = False

    # -- requests -----------------------------------------------------------------------------------

    def exchange(
        self, digest: bytes, is_retry: bool, is_connected: Callable[[], bool], begin: Callable[[], list[Sample]]
    ) -> Exchange:
        """Return the exchange that a request repeats, or a new one with the samples that `begin` returns.

        Raise ConnectionError if the client has gone, whose repetition may have arrived before.
        """
        with self._lock:
            self._check_open()
            if not is_connected():
                raise ConnectionError("the client has gone")
            equal = self._exchanges.setdefault(digest, [])
            repeated = [exchange for exchange in equal if not exchange.has_failed and (is_retry or exchange.is_lost)]
            if repeated:
                exchange = min(repeated, key=lambda exchange: (not exchange.is_lost, exchange.num_repetitions))
                exchange.num_repetitions += 1
                exchange.is_connected, exchange.is_written = is_connected, False
                return exchange
            exchange = Exchange(digest, begin(), is_connected)
            equal.append(exchange)
            for sample in exchange.samples:
                self._put(sample, exchange)
            return exchange

    def begin(self, history: Any, form: Form, options: Options) -> list[Sample]:
        """Return the samples of a request. Raise Refused if the conversation is too long."""
        return [self._begin(history, form, options) for _ in range(options.n)]

    def _begin(self, history: Any, form: Form, options: Options) -> Sample:
        found = self._find(history, form)
        if found is None:
            return self._sample(self._new_row(history, form), form, history, [], [], options)
        row, state = found
        known = len(state.history)
        told = form.after(history, known, self.policy.bridge.ends_answer(row.episode.tokens[state.length - 1]))
        messages = form.messages(history[known:])
        left = self.policy.limits.max_response - state.length - len(told)
        max_turns = self.policy.limits.max_turns
        is_last = max_turns is not None and state.num_answers >= max_turns
        reason = "turns" if is_last else "length" if left <= 0 else None
        continues = state is row.states[-1] and not row.is_busy
        if reason is not None:
            if continues and row.episode.stop_reason is None:
                row.episode.stop_reason = reason
            self._refuse_longer(reason)
        if not continues:
            row = self._fork(row, state)
        return self._sample(row, form, history, told, messages, options)

    def _refuse_longer(self, reason: str) -> None:
        limits = self.policy.limits
        if reason == "turns":
            raise Refused(f"the conversation has multi_turn.max_assistant_turns={limits.max_turns} answers; end it")
        raise Refused(
            f"the conversation is longer than data.max_response_length={limits.max_response} tokens; end it",
            code=CONTEXT_CODE,
        )

    def _find(self, history: Any, form: Form) -> tuple[Row, State] | None:
        """Return the row and the state with the longest history with which this one begins.

        Of several, one that the request can continue is preferred.
        """
        found: list[tuple[tuple[int, bool], Row, State]] = []
        for row in self.rows:
            for state in reversed(row.states) if row.form == form else ():
                if history[: len(state.history)] == state.history:
                    continues = state is row.states[-1] and not row.is_busy
                    found.append(((len(state.history), continues), row, state))
                    break
        return max(found, key=lambda entry: entry[0])[1:] if found else None

    def _new_row(self, history: Any, form: Form) -> Row:
        prompt = form.start(history)
        if not prompt:
            raise Refused("the prompt is empty")
        limit = self.policy.limits.max_prompt
        if len(prompt) > limit:
            self._has_long_prompt = True
            raise Refused(
                f"the prompt has {len(prompt)} tokens, but data.max_prompt_length={limit}; shorten it",
                code=CONTEXT_CODE,
            )
        return self._add_row(form, Episode([*form.messages(history)], prompt))

    def _fork(self, row: Row, state: State) -> Row:
        """Return a new row with the tokens of another one up to a state, which are not trained on again."""
        old, length = row.episode, state.length
        episode = Episode(old.messages[: state.num_messages], old.prompt, old.tokens[:length], [False] * length)
        episode.log_probs, episode.rewards = [0.0] * length, [0.0] * length
        episode.num_computed = len(old.prompt) + length - 1
        forked = self._add_row(row.form, episode)
        forked.states.append(state)
        return forked

    def _add_row(self, form: Form, episode: Episode) -> Row:
        number, seed = len(self.rows), self.question.sampling_seed
        if number:
            seed = int(restart_seeds(mix_seeds(torch.tensor([seed])), torch.tensor([number])))
        row = Row(f"{self.number}.{number}", seed, form, episode)
        self.rows.append(row)
        return row

    def _sample(
        self, row: Row, form: Form, history: Any, told: list[int], messages: list[Message], options: Options
    ) -> Sample:
        limits, episode = self.policy.limits, row.episode
        row.is_busy = True
        left = limits.max_response - len(episode.tokens) - len(told)
        limit = min(n for n in (left, limits.max_turn_length, options.max_tokens) if n is not None)
        return Sample(row, form, history, told, messages, limit, options, [*episode.prompt, *episode.tokens, *told])

    def _put(self, sample: Sample, exchange: Exchange) -> None:
        row, sampling = sample.row, replace(sample.options.sampling, max_tokens=sample.limit)
        try:
            self.policy.stream.put(row.row_id, sample.prompt_ids, sampling, row.seed)
        except RolloutError as error:
            row.is_busy = False
            sample.error = error
            exchange.check_ended()
        else:
            self._samples[row.row_id] = sample, exchange

    # -- answers ------------------------------------------------------------------------------------

    def receive(self, answer: Answer) -> None:
        """Append an answer to its row, or drop it if nobody waits for it. One that cannot be read fails alone."""
        with self._lock:
            sample, exchange = self._samples.pop(str(answer.row_id), (None, None))
            if sample is None or exchange is None:  # the session has ended
                return
            sample.row.is_busy = False
            try:
                message = self._read(sample, answer)
            except Exception as error:  # parsers and tokenizers raise several types
                sample.error = error if isinstance(error, RolloutError) else _unreadable(error)
            else:
                self._append(sample, message, answer)
            exchange.check_ended()

    def _read(self, sample: Sample, answer: Answer) -> Message:
        if not answer.tokens:
            raise RolloutError("the rollout returned an empty answer; increase rollout.max_model_len")
        stop = sample.options.sampling.stop if answer.reason == "stop" else ()
        return sample.form.read(Sampled(answer.tokens, sample.prompt_ids, stop, sample.row.num_answers))

    def _append(self, sample: Sample, message: Message, answer: Answer) -> None:
        row, episode, num_before = sample.row, sample.row.episode, sample.row.num_answers
        episode.num_recomputed += episode.num_computed - answer.num_cached
        if sample.told or sample.told_messages:
            episode.add_told(sample.told, sample.told_messages)
        episode.add_answer(answer.tokens, answer.log_probs, message["content"])
        episode.messages[-1] = message
        episode.num_computed = len(episode.prompt) + len(episode.tokens) - 1  # all but the last sampled token
        if sample.options.changed or episode.sampling:
            episode.sampling += [{}] * (episode.turns - 1 - len(episode.sampling)) + [sample.options.changed]
        if answer.reason == "length" and len(episode.tokens) >= self.policy.limits.max_response:
            episode.stop_reason = "length"
        history = sample.form.answered(sample.history, message, answer.tokens)
        row.states.append(State(history, len(episode.tokens), len(episode.messages), num_before + 1))
        sample.choice = self._choice(sample, message, answer)

    def _choice(self, sample: Sample, message: Message, answer: Answer) -> Choice:
        reason = "tool_calls" if message.get("tool_calls") and answer.reason == "stop" else answer.reason
        return Choice(message, reason, sample.prompt_ids, answer.tokens, answer.log_probs)

    def fail(self, error: Exception) -> None:
        """End all answers that are generated with an error."""
        with self._lock:
            for sample, exchange in self._samples.values():
                sample.error = error
                exchange.check_ended()
            self._samples = {}

    # -- end ----------------------------------------------------------------------------------------

    def close(self) -> list[Episode]:
        """End the session. Return the rows that have an answer, in the order of their first requests."""
        with self._lock:
            self._is_closed = True
            self.fail(Refused("the session has ended", HTTPStatus.UNAUTHORIZED))
            for row in self.rows:
                self.policy.stream.close(row.row_id)
            episodes = [row.episode for row in self.rows if row.episode.turns]
            if not episodes and self._has_long_prompt:
                episodes = [Episode(list(self.question.messages), stop_reason="prompt")]
            return episodes

    def _check_open(self) -> None:
        if self._is_closed:
            raise Refused("the session has ended", HTTPStatus.UNAUTHORIZED)

    # -- time ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def open_request(self) -> Iterator[None]:
        """Count the block as a request, in which the session does not wait for its program."""
        with self._lock:
            if not self._num_open:
                self._idle_seconds += time.monotonic() - self._idle_since
            self._num_open += 1
            self._num_requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open -= 1
                self._idle_since = time.monotonic()

    def idle(self) -> Idle:
        with self._lock:
            last = 0.0 if self._num_open else time.monotonic() - self._idle_since
            return Idle(last, self._idle_seconds + last, self._num_requests)


def _unreadable(error: Exception) -> RolloutError:
    failure = RolloutError(f"the answer cannot be read: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
