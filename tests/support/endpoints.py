"""An endpoint over a tiny model that ends its answers itself, and a client of the wire without a library.

policy = Policy(folder)
with policy.serve() as client:
    reply = client.chat(PROMPT)
    (row,) = client.close()
policy.check_log_probs(row)
"""

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from camshaft.agents.bridge import Bridge
from camshaft.agents.endpoint import Endpoint
from camshaft.agents.environment import Message, Start
from camshaft.agents.episode import Episode
from camshaft.agents.play import Limits, Question
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.models.loader import quiet_transformers
from camshaft.rollout import BaseRollout, SamplingParams, build_rollout, open_stream
from support.chat_templates import CHAT_FAMILIES, talking_model, talking_tokenizer

ROUNDING = 1e-5
PROMPT: list[Message] = [{"role": "user", "content": "Play. Guess a number from 1 to 9."}]
LIMITS = Limits(max_prompt=100, max_response=200, max_turn_length=12)
SAMPLING = SamplingParams(200)


class Policy:
    """A rollout, its oracle, and what an endpoint needs."""

    def __init__(self, folder: Path):
        family = CHAT_FAMILIES["chatml"]
        path, self.tokenizer = talking_model(family, folder), talking_tokenizer(family)
        with quiet_transformers():
            self.oracle: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.rollout: BaseRollout = build_rollout("torch", RolloutEngineConfig(model_path=str(path), max_model_len=512))
        self.rollout.load_weights(self.oracle.named_parameters())
        self.bridge = Bridge(self.tokenizer)

    @contextlib.contextmanager
    def serve(self, limits: Limits = LIMITS, **options: Any) -> Iterator["Client"]:
        with (
            open_stream(self.rollout) as stream,
            Endpoint(stream, self.bridge, limits, SAMPLING, "policy", **options) as endpoint,
        ):
            yield Client(endpoint)

    @torch.no_grad()
    def check_log_probs(self, episode: Episode) -> None:
        """Compare the log-probs of sampled tokens with those of transformers, and expect 0 for the others."""
        ids = torch.tensor([episode.prompt + episode.tokens])
        log_probs = self.oracle(ids).logits[0, :-1].double().log_softmax(-1)
        expected = log_probs.gather(-1, ids[0, 1:, None])[len(episode.prompt) - 1 :, 0]
        mask, sampled = torch.tensor(episode.mask), torch.tensor(episode.log_probs, dtype=torch.float64)
        assert (expected - sampled)[mask].abs().max() < ROUNDING
        assert not sampled[~mask].any()


class Client:
    """A client of the wire without a library, with one session."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self.key = self.open()

    def open(self, seed: int = 1) -> str:
        return self.endpoint.open(Question(PROMPT, Start({}), seed))

    def ask(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> tuple[int, Any]:
        connection = self.connect()
        with contextlib.closing(connection):
            data = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
            connection.request("POST", path, data, {"Authorization": f"Bearer {self.key}", **headers})
            reply = connection.getresponse()
            content = reply.read()
            return reply.status, json.loads(content) if reply.getheader(
                "Content-Type"
            ) != "text/event-stream" else content

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", int(self.endpoint.url.split(":")[2].split("/")[0]), timeout=60)

    def chat(self, messages: list[Any], **options: Any) -> dict[str, Any]:
        status, reply = self.ask({"messages": messages, **options})
        assert status == 200, reply
        return reply

    def refusal(self, messages: list[Any], **options: Any) -> str:
        status, reply = self.ask({"messages": messages, **options})
        assert status == 400, reply
        assert reply["error"]["type"] == "invalid_request_error"
        return reply["error"]["message"]

    def close(self) -> list[Episode]:
        return self.endpoint.close(self.key)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


class HigherLower:
    """A game with three tries."""

    def reset(self, secret: int) -> None:
        self.secret, self.tries = secret, 0

    def step(self, answer: str) -> tuple[str | None, float, bool]:
        self.tries += 1
        if answer.strip() == str(self.secret):
            return None, 1.0, True
        return "higher" if answer.strip() < str(self.secret) else "lower", 0.0, self.tries == 3
