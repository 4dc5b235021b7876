"""The unchanged `openai` client at the endpoint: games, streams, several samples, and connections that are dropped.

make test-agents
"""

# pyright: reportMissingImports=false
import http.client
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.endpoints import LIMITS, PROMPT, SAMPLING, Client, HigherLower, Policy, user

from camshaft.agents.environment import Host, Start
from camshaft.agents.play import Question, play

pytestmark = pytest.mark.agents
CLIENTS = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy") / "model")


def openai_client(base_url: str, key: str) -> Any:
    import openai

    return openai.OpenAI(base_url=base_url, api_key=key, timeout=120)


def chat(client: Any, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(model="any", messages=messages, **options)


def test_the_game_equals_that_through_the_class(policy: Policy) -> None:
    questions = [Question(PROMPT, Start({"secret": n}), n) for n in range(1, 7)]
    expected = play(policy.rollout, Host({"": HigherLower}), questions, policy.bridge, LIMITS, SAMPLING)
    with policy.serve() as sessions:
        for question, episode in zip(questions, expected, strict=True):
            key = sessions.open(question.sampling_seed)
            client = openai_client(sessions.endpoint.url, key)
            game, reward, done = HigherLower(), 0.0, False
            messages: list[Any] = [*PROMPT]
            game.reset(question.start.row["secret"])
            while not done:
                messages.append(chat(client, messages).choices[0].message)
                said, reward, done = game.step(messages[-1].content)
                messages.append(user(said or ""))
            (row,) = sessions.endpoint.close(key)
            row.add_reward(reward)
            assert (row.prompt, row.tokens, row.mask) == (episode.prompt, episode.tokens, episode.mask)
            assert (row.rewards, row.stop_reason or "done") == (episode.rewards, episode.stop_reason)
            assert row.log_probs == pytest.approx(episode.log_probs, abs=1e-6)


def test_streams_samples_and_token_ids(policy: Policy) -> None:
    with policy.serve() as sessions:
        client = openai_client(sessions.endpoint.url, sessions.key)
        ids = chat(client, PROMPT, logprobs=True, top_logprobs=0, extra_body={"return_token_ids": True})
        chunks = list(chat(client, PROMPT, stream=True))
        several = chat(client, PROMPT, n=3)
        text = client.completions.create(model="any", prompt="Guess: ")
        assert [model.id for model in client.models.list()] == ["policy"]
        rows = sessions.close()
    texts = [policy.bridge.decode(row.tokens) for row in rows]
    assert ids.choices[0].token_ids == rows[0].tokens
    assert ids.prompt_token_ids == rows[0].prompt
    assert [entry.logprob for entry in ids.choices[0].logprobs.content] == rows[0].log_probs
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[1]
    assert [choice.message.content for choice in several.choices] == texts[2:5]
    assert text.choices[0].text == texts[5]
    assert len(set(texts)) == 6


def test_errors_are_those_of_the_client(policy: Policy) -> None:
    import openai

    with policy.serve() as sessions:
        client = openai_client(sessions.endpoint.url, sessions.key)
        with pytest.raises(openai.BadRequestError, match="the run samples with temperature=1"):
            chat(client, PROMPT, temperature=0.3)
        with pytest.raises(openai.BadRequestError, match="max_prompt_length") as caught:
            chat(client, [user("x" * 200)])
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(openai.AuthenticationError):
            chat(openai_client(sessions.endpoint.url, "sk-wrong"), PROMPT)


class Dropping:
    """A proxy that passes the first request of each key on, and closes the connection before the answer."""

    def __init__(self, sessions: Client):
        seen: set[str | None] = set()
        self.retries: list[str | None] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                key = self.headers["Authorization"]
                upstream: http.client.HTTPConnection = sessions.connect()
                upstream.request("POST", self.path, data, dict(self.headers.items()))
                if key not in seen:
                    seen.add(key)
                    upstream.close()
                    return
                proxy.retries.append(self.headers["x-stainless-retry-count"])
                reply = upstream.getresponse()
                body = reply.read()
                upstream.close()
                self.send_response(reply.status)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            request_queue_size = CLIENTS  # a refused connection would be another repetition

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def dropping(policy: Policy) -> Iterator[tuple[Client, Dropping]]:
    with policy.serve() as sessions:
        proxy = Dropping(sessions)
        thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield sessions, proxy
        proxy.server.shutdown()
        thread.join()
        proxy.server.server_close()


def test_no_answer_is_sampled_twice(policy: Policy, dropping: tuple[Client, Dropping]) -> None:
    sessions, proxy = dropping
    keys = [sessions.open(seed) for seed in range(CLIENTS)]

    def run(key: str) -> str:
        return chat(openai_client(proxy.url, key), PROMPT).choices[0].message.content

    with ThreadPoolExecutor(CLIENTS) as pool:
        texts = list(pool.map(run, keys))
    rows = [sessions.endpoint.close(key) for key in keys]
    assert proxy.retries == ["1"] * CLIENTS
    assert [[policy.bridge.decode(row.tokens) for row in session] for session in rows] == [[text] for text in texts]


def test_eight_equal_requests_are_eight_samples(policy: Policy) -> None:
    with policy.serve() as sessions:
        client = openai_client(sessions.endpoint.url, sessions.key)
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda _: chat(client, PROMPT).choices[0].message.content, range(8)))
        rows = sessions.close()
    assert len(set(texts)) == 8
    assert sorted(texts) == sorted(policy.bridge.decode(row.tokens) for row in rows)
