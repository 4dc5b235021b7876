"""An endpoint without a model, for tests of programs: its answers are functions of the seed and the history."""

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from camshaft.agents.episode import Episode
from camshaft.agents.play import Question
from camshaft.agents.sessions import Idle

CLIENT = '''
import json, os, urllib.request


def ask(messages, base_url=None, api_key=None):
    """Send a request for an answer to a conversation, and append the answer."""
    base_url, api_key = base_url or os.environ["OPENAI_BASE_URL"], api_key or os.environ["OPENAI_API_KEY"]
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    data = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)["choices"][0]["message"]
    messages.append({"role": "assistant", "content": answer["content"]})
    return answer["content"]
'''
"""A client in Python without packages, which programs of tests contain."""


@dataclass
class _Session:
    question: Question
    episode: Episode
    requests: int = 0
    open_requests: int = 0
    answered: float = field(default_factory=time.monotonic)
    total: float = 0.0


class FakeEndpoint:
    def __init__(self, max_turns: int = 100) -> None:
        self.max_turns = max_turns
        self.sessions: dict[str, _Session] = {}
        self.num_opened = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status, answer = outer.answer(self.headers["Authorization"].removeprefix("Bearer "), body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def open(self, question: Question) -> str:
        self.num_opened += 1
        key = f"key{self.num_opened}"
        self.sessions[key] = _Session(question, Episode(list(question.messages)))
        return key

    def close(self, key: str) -> list[Episode]:
        episode = self.sessions.pop(key).episode
        return [episode] if episode.turns else []

    def idle(self, key: str) -> Idle:
        session = self.sessions[key]
        last = time.monotonic() - session.answered
        return Idle(last, session.total + last, session.requests)

    def answer(self, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        session = self.sessions.get(key)
        if session is None:
            return 401, {"error": {"message": "no session has this key"}}
        session.total += time.monotonic() - session.answered
        episode, history = session.episode, json.dumps([body["messages"], session.question.sampling_seed])
        if episode.turns == self.max_turns:
            episode.stop_reason = "turns"
            return 400, {"error": {"message": "the episode has ended"}}
        text = hashlib.sha256(history.encode()).hexdigest()[:4]
        session.requests += 1
        episode.messages = list(body["messages"])
        episode.add_answer(list(text.encode()), [-1.0] * 4, text)
        session.answered = time.monotonic()
        return 200, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
