"""An OpenAI-compatible endpoint, for programs that own the conversation.

    with open_stream(rollout) as stream, Endpoint(stream, bridge, limits, sampling, model="policy") as endpoint:
        key = endpoint.open(question)
        program(base_url=endpoint.url, api_key=key)         # any program, with any client
        episodes = endpoint.close(key)                      # its conversations, as rows of exactly the sampled tokens

Each session has an API key. Requests of all sessions that wait are generated together; later ones wait for the next
call of the rollout. `sessions.py` has the rules by which requests become rows, and `wire.py` the forms of requests and
replies. Keys are never part of a URL or a log.
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

from camshaft.agents import wire
from camshaft.agents.bridge import Bridge
from camshaft.agents.episode import Episode
from camshaft.agents.forms import ChatForm, Form, IdsForm, TextForm
from camshaft.agents.play import Limits, Question
from camshaft.agents.sessions import Idle, Policy, Session
from camshaft.agents.wire import Choice, Refused
from camshaft.errors import BatchError, RolloutError
from camshaft.http import LocalServer, Reply, Request, ServerLimits, bearer_token, json_reply
from camshaft.rollout import SamplingParams, Stream, UnsupportedSampling

CONNECTIONS = 1024
"""Maximum number of connections of all programs."""
MAX_BODY = 64 * 2**20
"""Maximum size of a request, in bytes."""
TAKE_SECONDS = 0.1
"""Time between two checks whether the endpoint has been stopped."""

Conversation = tuple[Any, Form]
ReadRequest = Callable[[dict[str, Any]], Conversation]
WriteReply = Callable[[Sequence[Choice], dict[str, Any], str, str], dict[str, Any]]


class Endpoint:
    """A server on the loopback interface, and the sessions of programs."""

    def __init__(
        self,
        stream: Stream,
        bridge: Bridge,
        limits: Limits,
        sampling: SamplingParams,
        model: str,
        allow_sampling: bool = False,
    ):
        """Start an endpoint.

        Args:
            stream: Stream of the rollout, which only the endpoint uses.
            bridge: Chat template of the model, and the format of its tool calls.
            limits: Limits of each row.
            sampling: Sampling options of the run. `limits` replaces its `max_tokens`.
            model: Name of the model in replies. Requests may name another one.
            allow_sampling: Permit other sampling options in requests, which `Episode.sampling` records.
        """
        self.policy = Policy(stream, bridge, limits, sampling)
        self.model, self.allow_sampling = model, allow_sampling
        self._sessions: dict[bytes, Session] = {}
        """Open sessions, by the digest of their keys."""
        self._by_number: dict[str, Session] = {}
        self._num_opened = 0
        self.num_other_histories = 0
        """Number of prompts of closed sessions behind their first ones: the program has rewritten the history, or has
        begun another conversation."""
        self._lock = threading.Lock()
        self._error: RolloutError | None = None
        """Error with which the rollout has failed."""
        self._is_stopped = threading.Event()
        self._server = LocalServer(self, ServerLimits(CONNECTIONS, MAX_BODY))
        self._server.start()
        self._thread = threading.Thread(target=self._receive, name="endpoint", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        """`base_url` of a client."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- sessions -----------------------------------------------------------------------------------

    def open(self, question: Question) -> str:
        """Open a session for a program that answers a question, and return its API key."""
        key = f"sk-{secrets.token_urlsafe(24)}"
        with self._lock:
            session = Session(self._num_opened, question, self.policy)
            self._num_opened += 1
            self._sessions[_digest(key)] = self._by_number[str(session.number)] = session
        return key

    def close(self, key: str) -> list[Episode]:
        """End a session. Return its rows in the order of their first requests, without answers that have not ended.

        Their `stop_reason` is None unless a limit has ended them. Raise RolloutError if the rollout has failed.
        """
        with self._lock:
            session = self._sessions.pop(_digest(key))
            del self._by_number[str(session.number)]
        episodes = session.close()
        self.num_other_histories += max(0, len({tuple(episode.prompt) for episode in episodes}) - 1)
        self._check_error()
        return episodes

    def idle(self, key: str) -> Idle:
        """Return for how long a session has waited for its program."""
        return self._sessions[_digest(key)].idle()

    def stop(self) -> None:
        """End all sessions and the server."""
        self._is_stopped.set()
        self._thread.join()
        for session in [*self._sessions.values()]:
            session.close()
        self._server.server_close()

    def _receive(self) -> None:
        """Pass the answers of the stream to their sessions."""
        while not self._is_stopped.is_set():
            try:
                for answer in self.policy.stream.take(TAKE_SECONDS):
                    with self._lock:
                        session = self._by_number.get(str(answer.row_id).partition(".")[0])
                    if session is not None:
                        session.receive(answer)
            except Exception as error:  # which the requests and `close` report
                self._error = error if isinstance(error, RolloutError) else RolloutError(f"the rollout failed: {error}")
                for session in self._opened():
                    session.fail(self._error)
                return

    def _check_error(self) -> None:
        if self._error is not None:
            raise RolloutError(str(self._error)) from self._error

    def _opened(self) -> list[Session]:
        with self._lock:
            return list(self._sessions.values())

    # -- requests -----------------------------------------------------------------------------------

    def refuse(self, request: Request) -> Reply | None:
        """Refuse a request without the key of an open session."""
        if self._session(request) is None:
            return Refused(
                "the API key is not that of an open session", HTTPStatus.UNAUTHORIZED, "invalid_api_key"
            ).reply()
        return None

    def answer(self, request: Request) -> Reply:
        """Answer a request. This waits for the tokens."""
        session = self._session(request)
        routes: dict[tuple[str, str], Callable[[Session, Request], Reply]] = {
            ("GET", "/v1/models"): lambda session, request: json_reply(self._models()),
            ("POST", "/v1/chat/completions"): partial(self._complete, self._chat, wire.chat_reply),
            ("POST", "/v1/completions"): partial(self._complete, self._text, wire.completion_reply),
            ("POST", "/inference/v1/generate"): partial(self._complete, self._ids, wire.generate_reply),
        }
        try:
            if session is None:
                raise Refused("the session has ended", HTTPStatus.UNAUTHORIZED)
            if (request.method, request.path) not in routes:
                raise Refused(f"{request.method} {request.path} is not served", HTTPStatus.NOT_FOUND)
            return routes[request.method, request.path](session, request)
        except Refused as error:
            return error.reply()
        except (BatchError, UnsupportedSampling) as error:  # of the chat template, or an option of the request
            return Refused(str(error)).reply()
        except RolloutError as error:
            return Refused(str(error), HTTPStatus.INTERNAL_SERVER_ERROR).reply()

    def _session(self, request: Request) -> Session | None:
        key = bearer_token(request)
        with self._lock:
            return None if key is None else self._sessions.get(_digest(key))

    def _models(self) -> dict[str, Any]:
        limits = self.policy.limits
        length = limits.max_prompt + limits.max_response
        card = {"id": self.model, "object": "model", "created": 0, "owned_by": "camshaft", "max_model_len": length}
        return {"object": "list", "data": [card]}

    def _complete(self, read: ReadRequest, write: WriteReply, session: Session, request: Request) -> Reply:
        """Answer a request for tokens."""
        with session.open_request():
            return self._sample(read, write, session, request)

    def _sample(self, read: ReadRequest, write: WriteReply, session: Session, request: Request) -> Reply:
        body = wire.read_json(request.body)
        digest = hashlib.sha256(request.path.encode() + b"\0" + request.body).digest()
        is_retry = request.headers.get("x-stainless-retry-count", "0") not in ("", "0")

        def begin() -> Any:  # under the lock of the session, with which the error also ends its requests
            self._check_error()
            given = {**body, **wire.read_object(body, "sampling_params")}
            given.pop("sampling_params", None)
            options = wire.read_options(given, self.policy.sampling, self.allow_sampling)
            return session.begin(*read(body), options)

        exchange = session.exchange(digest, is_retry, request.is_connected, begin)
        choices = [self._named(choice, body) for choice in exchange.choices()]
        reply = write(choices, body, exchange.samples[0].identifier, self.model)
        if body.get("stream"):
            return Reply(HTTPStatus.OK, wire.event_stream(reply, body), "text/event-stream", writing=exchange.writing())
        return json_reply(reply, writing=exchange.writing())

    def _named(self, choice: Choice, body: dict[str, Any]) -> Choice:
        """Add the texts of the tokens, if the request reads them."""
        if not wire.wants_log_probs(body):
            return choice
        return replace(choice, tokens=[str(self.policy.bridge.tokenizer.decode([token])) for token in choice.ids])

    def _chat(self, body: dict[str, Any]) -> Conversation:
        tools = wire.read_tools(body)
        parser = self.policy.bridge.parser if tools and body.get("tool_choice") != "none" else None
        return wire.read_messages(body.get("messages")), ChatForm(self.policy.bridge, tools, parser)

    def _text(self, body: dict[str, Any]) -> Conversation:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            (prompt,) = prompt
        if isinstance(prompt, str):
            return prompt, TextForm(self.policy.bridge)
        return self._checked_ids(prompt, "prompt"), IdsForm(self.policy.bridge)

    def _ids(self, body: dict[str, Any]) -> Conversation:
        if body.get("stream"):
            raise Refused("stream is not supported for token ids: an answer is one reply; remove stream")
        return self._checked_ids(body.get("token_ids"), "token_ids"), IdsForm(self.policy.bridge)

    def _checked_ids(self, ids: Any, name: str) -> list[int]:
        size = len(self.policy.bridge.tokenizer)
        if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < size for token in ids):
            raise Refused(f"{name} must be one list of token ids below {size}, or one text for /v1/completions")
        return ids


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
