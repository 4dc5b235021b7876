"""A Tinker client of our own over plain HTTP and `camshaft.wire`, and a server in this process.

with running_server(folder, max_models=4) as server:
    model = server.client().create_model(rank=8)
    output = model.wait(model.train(1, [datum([5, 6, 7], weights=[0.0, 1.0])]))
    model.wait(model.step(2, learning_rate=0.1))

The client sends each request as it is told, in any order, and repeats nothing.
"""

import contextlib
import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from camshaft import storage
from camshaft.config.serve import ServeConfig, read_serve_config
from camshaft.http import LocalServer, ServerLimits
from camshaft.service.app import App
from camshaft.service.keys import Keys
from camshaft.service.process import RoleProcess
from camshaft.service.service import Service
from camshaft.wire import messages
from support.tiny import tiny_folder

SECONDS = 120.0
"""Time limit of a result."""


class Failed(Exception):
    """A command that has failed. The argument is the sentence of the server."""

    def __init__(self, message: str, category: str):
        super().__init__(message)
        self.category = category


def datum(tokens: Sequence[int], targets: Sequence[int] | None = None, **columns: Sequence[float]) -> Any:
    """Return a datum. The default targets are the tokens that follow; the last token is then a target only."""
    if targets is None:
        tokens, targets = tokens[:-1], tokens[1:]
    message = messages.CLASSES["Datum"]()
    message.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
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


@dataclass
class Client:
    """Connection of one program. A session is opened for it."""

    port: int
    key: str
    session: str = ""

    def request(
        self, path: str, body: bytes | None = None, kind: str = "application/json", method: str = "POST", **headers: str
    ) -> tuple[int, bytes]:
        """Send a request, and return status and body of the reply."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            every = {"X-API-Key": self.key, "Content-Type": kind, **headers}
            connection.request(method, f"/api/v1/{path}", body, every)
            reply = connection.getresponse()
            return reply.status, reply.read()

    def post(self, route: str, expected: int = 200, /, **body: Any) -> dict[str, Any]:
        status, content = self.request(route, json.dumps(body).encode())
        assert status == expected, content
        return json.loads(content)

    def open(self) -> "Client":
        self.session = self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]
        return self

    def create_model(self, number: int = 0, rank: int = 8, base: str = "tiny", **lora: Any) -> "ClientModel":
        settings = {"rank": rank, "seed": 1, "train_unembed": False, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": base, "lora_config": settings}
        promise = self.post("create_model", **body)
        model = ClientModel(self, promise["model_id"])
        assert self.wait(promise)["model_id"] == model.identifier == f"{self.session}:train:{number}"
        return model

    def wait(self, promise: dict[str, Any]) -> Any:
        """Return the result of a promise. Raise `Failed` with the sentence of an error."""
        status, content = 408, b""
        while status == 408:
            status, content = self.request(
                "retrieve_future", json.dumps({"request_id": promise["request_id"]}).encode()
            )
        assert status == 200, content
        if not content.startswith(b"{"):
            return content
        result = json.loads(content)
        if "error" in result:
            raise Failed(result["error"], result["category"])
        return result

    def sampler(self, number: int, **source: str) -> str:
        body = {"session_id": self.session, "sampling_session_seq_id": number, **source}
        return self.post("create_sampling_session", **body)["sampling_session_id"]

    def sample(self, sampler: str, number: int, tokens: Sequence[int], num_samples: int = 1, **params: Any) -> Any:
        """Return the sequences of a request for samples, as pairs of tokens and log-probs, and the stop reasons."""
        return read_samples(self.wait(self.submit_sample(sampler, number, tokens, num_samples, **params)))

    def submit_sample(
        self, sampler: str, number: int, tokens: Sequence[int], num_samples: int = 1, **params: Any
    ) -> Any:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}
        body = {"sampling_session_id": sampler, "seq_id": number, "num_samples": num_samples, "prompt": prompt}
        return self.post("asample", **body, sampling_params={"max_tokens": 8, **params})


def read_samples(content: bytes) -> list[tuple[list[int], list[float], int]]:
    response = messages.SampleResponse.FromString(content)
    return [
        (np.frombuffer(row.tokens, "<i4").tolist(), np.frombuffer(row.logprobs, "<f4").tolist(), row.stop_reason)
        for row in response.sequences
    ]


@dataclass
class ClientModel:
    """A model of a client. Each call sends one command with the number that it gets."""

    client: Client
    identifier: str

    def wait(self, promise: dict[str, Any]) -> Any:
        return self.client.wait(promise)

    def train(self, number: int, data: Sequence[Any], loss: str = "cross_entropy", **options: Any) -> dict[str, Any]:
        request = training_request(self.identifier, number, data, loss, **options)
        status, content = self.client.request("forward_backward", request.SerializeToString(), "application/x-protobuf")
        assert status == 200, content
        return json.loads(content)

    def step(self, number: int, expected: int = 200, **adam: float) -> dict[str, Any]:
        body = {"model_id": self.identifier, "seq_id": number, "adam_params": {"learning_rate": 1e-2, **adam}}
        return self.client.post("optim_step", expected, **body)

    def command(self, route: str, number: int, /, **body: Any) -> dict[str, Any]:
        return self.client.post(route, model_id=self.identifier, seq_id=number, **body)

    def log_probs(self, number: int, data: Sequence[Any]) -> list[list[float]]:
        """Return the log-probs of the targets, without gradient."""
        return read_output(self.wait(self.train(number, data, forward_only=True)))[0]


def read_output(content: bytes) -> tuple[list[list[float]], float]:
    """Return the log-probs of each datum, and the loss, of an answer to forward_backward."""
    output = messages.ForwardBackwardOutput.FromString(content)
    rows = output.loss_fn_outputs[0].fields["logprobs"]
    offsets = np.frombuffer(rows.offsets, "<i8")
    parts = [rows.data[start:end] for start, end in pairwise(offsets)]
    return [np.frombuffer(part, "<f4").tolist() for part in parts], output.metrics["loss:sum"]


@dataclass
class RunningServer:
    """A server in this process."""

    config: ServeConfig
    service: Service
    role: RoleProcess
    port: int
    key: str
    clients: list[Client] = field(default_factory=list)

    def client(self) -> Client:
        client = Client(self.port, self.key).open()
        self.clients.append(client)
        return client

    def finish(self) -> None:
        """End the sessions of all clients."""
        while self.clients:
            client = self.clients.pop()
            client.request(f"sessions/{client.session}/finish", b"{}")


@contextlib.contextmanager
def running_server(folder: Path, keys: Path | None = None, **options: Any) -> Iterator[RunningServer]:
    """Run a server on a free port, with a tiny model under the name `tiny`."""
    served = folder / "served"
    values = {
        "model": f"tiny={tiny_folder(tie_embeddings=False)}",
        "folder": served,
        "port": 0,
        "device": "cpu",
        **options,
    }
    config = read_serve_config([f"{name}={value}" for name, value in values.items()])
    storage.make_folder(served)
    own = Keys.load(served, keys)
    assert own.own_key is not None
    with RoleProcess(config) as role:
        service = Service(config, role)
        limits = ServerLimits(64, config.max_megabytes * 2**20)
        with LocalServer(App(service, own), limits, config.port) as server:
            service.start()
            server.start()
            try:
                yield RunningServer(config, service, role, server.server_port, own.own_key)
            finally:
                service.close()
