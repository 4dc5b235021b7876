"""A client of the Tinker API over plain HTTP and `camshaft.wire`, which sends each request as it is told.

    client = Client("http://127.0.0.1:8080", "tml-...", "models/tiny").open()
    model = client.create_model(rank=0)
    promise = model.train(1, [datum([5, 6, 7], weights=[0.0, 1.0])])      # the command with number 1
    output = read_output(model.wait(promise))
    model.wait(model.step(2, learning_rate=0.1))

Commands can be sent in any order and any number of times. Nothing is repeated, unless the client is patient.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from camshaft.wire import messages, schemas

SECONDS = 120.0
"""Time limit of a request and of a result."""
PATIENCE = 60
"""Number of times that a patient client sends a request."""
PAUSE = 0.05
SDK_VERSION = "0.38.0"
JSON, PROTOBUF = "application/json", "application/x-protobuf"


class Failed(Exception):
    """A command that has failed. The message is the sentence of the server."""

    def __init__(self, message: str, category: str):
        super().__init__(message)
        self.category = category


class Refused(Exception):
    """A request with another status than the expected one."""

    def __init__(self, route: str, status: int, content: bytes):
        super().__init__(f"{route} was answered with the status {status}: {content[:300].decode(errors='replace')}")
        self.status = status


class Answer(NamedTuple):
    """Reply of a server."""

    status: int
    kind: str
    body: bytes


def send(
    url: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str], pause: float = 0.0
) -> Answer:
    """Send a request over a connection of its own. With `pause`, wait as many seconds in the middle of the body."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=SECONDS)
    with contextlib.closing(connection):
        if pause and body:
            connection.putrequest(method, parts.path + path)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body[: len(body) // 2])
            time.sleep(pause)
            connection.send(body[len(body) // 2 :])
        else:
            connection.request(method, parts.path + path, body, dict(headers))
        reply = connection.getresponse()
        return Answer(reply.status, reply.headers.get("Content-Type", ""), reply.read())


def is_pending(status: int, content: bytes) -> bool:
    """Return True for the answer to a poll of a promise that has no result yet."""
    return status == 408 or (content.startswith(b"{") and json.loads(content).get("type") == "try_again")


def datum(
    tokens: Sequence[int], targets: Sequence[int] | None = None, num_chunks: int = 1, **columns: Sequence[float]
) -> Any:
    """Return a datum. The default targets are the tokens that follow; the last token is then a target only."""
    if targets is None:
        tokens, targets = tokens[:-1], tokens[1:]
    message = messages.CLASSES["Datum"]()
    for part in np.array_split(np.array(tokens, "<i4"), num_chunks):
        message.model_input.add().encoded_text.tokens = part.tobytes()
    put(message, "target_tokens", np.array(targets, "<i8"))
    for name, values in columns.items():
        put(message, name, np.array(values, "<f4"))
    return message


def put(message: Any, name: str, values: np.ndarray) -> None:
    """Set an input of the loss of a datum."""
    tensor = message.loss_fn_inputs[name]
    tensor.dense = values.tobytes()
    tensor.shape.extend(values.shape)
    tensor.dtype = messages.NUMBERS["DTYPE_FLOAT32" if values.dtype.kind == "f" else "DTYPE_INT64"]


def training_request(
    model_id: str,
    number: int,
    data: Sequence[Any],
    loss: str = "cross_entropy",
    forward_only: bool = False,
    **options: float,
) -> Any:
    request = messages.ForwardBackwardRequest(
        model_id=model_id, seq_id=number, data=data, loss_fn=loss, forward_only=forward_only
    )
    for name, value in options.items():
        request.loss_fn_config_v2[name].number = value
    return request


def read_output(content: bytes) -> tuple[list[list[float]], float]:
    """Return the log-probs of each datum, and the loss, of an answer to forward_backward."""
    output = messages.ForwardBackwardOutput.FromString(content)
    rows = list[list[float]]()
    for record in output.loss_fn_outputs:
        values = record.fields["logprobs"]
        offsets = np.frombuffer(values.offsets, "<i8")
        rows += [np.frombuffer(values.data[start:end], "<f4").tolist() for start, end in pairwise(offsets)]
    return rows, output.metrics["loss:sum"]


class Sample(NamedTuple):
    """Tokens, log-probs and the stop reason (0: stopped, 1: max_tokens) of a sample."""

    tokens: list[int]
    log_probs: list[float]
    reason: int


def read_samples(content: bytes) -> list[Sample]:
    response = messages.SampleResponse.FromString(content)
    return [
        Sample(np.frombuffer(row.tokens, "<i4").tolist(), np.frombuffer(row.logprobs, "<f4").tolist(), row.stop_reason)
        for row in response.sequences
    ]


@dataclass
class Client:
    """One program that uses a server. `open` begins its session."""

    url: str
    key: str
    base: str
    """Base model of new models and samplers."""
    is_patient: bool = False
    """Send a request again if it or its answer is lost on the way."""
    session: str = ""

    def request(
        self, path: str, body: bytes | None = None, kind: str = JSON, method: str = "POST", **headers: str
    ) -> tuple[int, bytes]:
        """Send a request, and return status and body of the reply."""
        every = {"X-API-Key": self.key, "Content-Type": kind, **headers}
        for _ in range(PATIENCE if self.is_patient else 0):
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = send(self.url, method, f"/api/v1/{path}", body, every)
                return answer.status, answer.body
            time.sleep(PAUSE)
        answer = send(self.url, method, f"/api/v1/{path}", body, every)
        return answer.status, answer.body

    def call(self, method: str, route: str, expected: int = 200, /, **body: Any) -> dict[str, Any]:
        """Send a JSON request, and return the JSON reply. Raise `Refused` if its status is another one."""
        status, content = self.request(route, None if method == "GET" else json.dumps(body).encode(), method=method)
        if status != expected:
            raise Refused(route, status, content)
        return json.loads(content or b"{}")

    def post(self, route: str, expected: int = 200, /, **body: Any) -> dict[str, Any]:
        return self.call("POST", route, expected, **body)

    def open(self) -> Client:
        self.session = self.post("create_session", tags=[], sdk_version=SDK_VERSION)["session_id"]
        return self

    def finish(self) -> None:
        """End the session, which frees its models."""
        self.request(f"sessions/{self.session}/finish", b"{}")

    def create_model(self, number: int = 0, rank: int = 8, **lora: Any) -> ClientModel:
        body = {"session_id": self.session, "model_seq_id": number, "base_model": self.base}
        promise = self.post("create_model", **body, lora_config={"rank": rank, "seed": 1, **lora})
        return ClientModel(self, self.wait(promise)["model_id"])

    def load_model(self, number: int, path: str, with_optimizer: bool = True) -> ClientModel:
        """Create a model from saved weights."""
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": with_optimizer}
        return ClientModel(self, self.wait(self.post("load_weights", **body))["model_id"])

    def rank_of(self, model_id: str) -> int:
        """Return the rank of the adapter of a model."""
        return schemas.read(schemas.ModelInfo, self.post("get_info", model_id=model_id))[0].lora_rank

    def saved_rank(self, path: str) -> int:
        """Return the rank of the adapter of saved weights."""
        return schemas.read(schemas.SavedInfo, self.post("weights_info", tinker_path=path))[0].lora_rank

    def poll(self, promise: Mapping[str, Any]) -> tuple[int, bytes]:
        """Ask once for the result of a promise."""
        return self.request("retrieve_future", json.dumps({"request_id": promise["request_id"]}).encode())

    def fetch(self, promise: Mapping[str, Any], seconds: float = SECONDS) -> bytes:
        """Return the body of the result of a promise. Raise `TimeoutError` if it is pending after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status, content = self.poll(promise)
            if status not in (200, 408):
                raise Refused("retrieve_future", status, content)
            if not is_pending(status, content):
                return content
        raise TimeoutError(f"the promise {promise['request_id']} is pending after {seconds:g} s")

    def wait(self, promise: Mapping[str, Any], seconds: float = SECONDS) -> Any:
        """Return the result of a promise: a dictionary, or the bytes of a message. Raise `Failed` for an error."""
        content = self.fetch(promise, seconds)
        if not content.startswith(b"{"):
            return content
        result = json.loads(content)
        if "error" in result:
            raise Failed(result["error"], result["category"])
        return result

    def sampler(self, number: int, **source: str) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **source}
        return self.post("create_sampling_session", **body)["sampling_session_id"]

    def submit_sample(
        self, sampler: str, number: int, tokens: Sequence[int], num_samples: int = 1, **params: Any
    ) -> dict[str, Any]:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": num_samples, "prompt": prompt}
        return self.post("asample", **body, sampling_params={"max_tokens": 8, **params})

    def sample(
        self, sampler: str, number: int, tokens: Sequence[int], num_samples: int = 1, **params: Any
    ) -> list[Sample]:
        """Return the sequences of a request for samples."""
        return read_samples(self.wait(self.submit_sample(sampler, number, tokens, num_samples, **params)))


@dataclass
class ClientModel:
    """A model of a client. `train`, `step` and `command` send one command with the number that they get."""

    client: Client
    identifier: str
    num_commands: int = field(default=0)
    """Number of the last command of `run`, `forward`, `update` and `call`, which count their commands themselves."""

    def wait(self, promise: Mapping[str, Any], seconds: float = SECONDS) -> Any:
        return self.client.wait(promise, seconds)

    def train(self, number: int, data: Sequence[Any], loss: str = "cross_entropy", **options: Any) -> dict[str, Any]:
        return self.send(training_request(self.identifier, number, data, loss, **options))

    def send(self, request: Any) -> dict[str, Any]:
        """Send a `ForwardBackwardRequest`."""
        status, content = self.client.request("forward_backward", request.SerializeToString(), PROTOBUF)
        if status != 200:
            raise Refused("forward_backward", status, content)
        return json.loads(content)

    def step(self, number: int, expected: int = 200, /, **adam: float) -> dict[str, Any]:
        body = {"model_id": self.identifier, "seq_id": number, "adam_params": {"learning_rate": 1e-2, **adam}}
        return self.client.post("optim_step", expected, **body)

    def command(self, route: str, number: int, /, **body: Any) -> dict[str, Any]:
        return self.client.post(route, model_id=self.identifier, seq_id=number, **body)

    def log_probs(self, number: int, data: Sequence[Any]) -> list[list[float]]:
        """Return the log-probs of the targets, without gradient."""
        return read_output(self.wait(self.train(number, data, forward_only=True)))[0]

    def next(self) -> int:
        """Return the number of the next command."""
        self.num_commands += 1
        return self.num_commands

    def _wait_for_next(self, send: Callable[[int], dict[str, Any]]) -> Any:
        """Return the result of the next command. If it is refused, its number remains free."""
        promise = send(self.num_commands + 1)
        self.num_commands += 1
        return self.wait(promise)

    def run(self, data: Sequence[Any], loss: str = "cross_entropy", **options: Any) -> tuple[list[list[float]], float]:
        """Return the log-probs and the loss of the next command, which adds gradients."""
        return read_output(self._wait_for_next(lambda number: self.train(number, data, loss, **options)))

    def forward(self, data: Sequence[Any]) -> list[list[float]]:
        """Return the log-probs of the targets from the next command."""
        return self.run(data, forward_only=True)[0]

    def update(self, **adam: float) -> dict[str, Any]:
        """Return the metrics of the next command, an optimizer step."""
        return self._wait_for_next(lambda number: self.step(number, **adam))["metrics"]

    def call(self, route: str, /, **body: Any) -> dict[str, Any]:
        """Return the result of the next command."""
        return self._wait_for_next(lambda number: self.command(route, number, **body))

    def publish(self, number: int) -> str:
        """Return the sampler with a number in the session, which has the current weights."""
        return self.call("save_weights_for_sampler", sampling_session_seq_id=number)["sampling_session_id"]
