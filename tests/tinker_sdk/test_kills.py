"""Server and worker are killed while a script with the unmodified SDK trains; the script notices nothing.

make test-tinker
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.processes import children
from support.tinker_sdk import PYTHON, TRAINING

from camshaft.contracts.engine.oracle import load_oracle
from camshaft.contracts.tinker.client import Client
from camshaft.contracts.tinker.oracle import Oracle, Row
from camshaft.contracts.tinker.proxy import FaultProxy
from camshaft.http import Reply, Request
from camshaft.models.tiny import make_tiny_model
from camshaft.runs.export import ExportOptions, export_checkpoint
from camshaft.service.checkpoints import Checkpoints, SavedPath

pytestmark = [pytest.mark.tinker, pytest.mark.alone, pytest.mark.timeout(1500)]

RL_SCRIPT = """
import json
import sys
import tinker
from tinker import types

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
params = types.SamplingParams(max_tokens=8, stop=[])
prompts = [[5, 6, 7 + row] for row in range(4)]
for step in range(int(sys.argv[1])):
    sampler = trainer.save_weights_and_get_sampling_client().result()
    path = trainer.save_weights_for_sampler(f"step-{step}").result().path
    pending = [sampler.sample(types.ModelInput.from_ints(prompt), 4, params) for prompt in prompts]
    rows, data = [], []
    for prompt, future in zip(prompts, pending):
        samples = future.result().sequences
        rewards = [sum(token % 2 for token in sample.tokens) for sample in samples]
        for sample, reward in zip(samples, rewards):
            rows.append([prompt, list(sample.tokens), list(sample.logprobs)])
            ids, zeros = prompt + list(sample.tokens), [0.0] * (len(prompt) - 1)
            advantages = [float(reward - sum(rewards) / len(rewards))] * len(sample.tokens)
            inputs = {"target_tokens": ids[1:], "logprobs": zeros + list(sample.logprobs),
                      "advantages": zeros + advantages}
            data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    passes = trainer.forward_backward(data, loss_fn="importance_sampling")
    update = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
    passes.result(), update.result()
    print(step, json.dumps({"path": path, "rows": rows}), flush=True)
sys.stdin.readline()  # the session ends with the script
"""


class Server:
    """A server of the command line, which is started again with the same command."""

    def __init__(self, folder: Path, ranks: int):
        make_tiny_model(folder / "models" / "tiny", seed=1, tie_embeddings=False)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        options = ["model=models/tiny", f"port={port}", "device=cpu", "max_data=3", "save_every=5", "max_models=4"]
        self.folder = folder
        self.command = [sys.executable, "-m", "camshaft", "serve", *options, f"ranks={ranks}"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(2)]
        self.variables = dict(line.removeprefix("export ").rstrip().split("=", 1) for line in lines)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def kill_worker(self) -> None:
        """Kill a process of the role: the last child of the fork server."""
        os.kill([worker for child in children(self.process.pid) for worker in children(child)][-1], signal.SIGKILL)

    def run_script(self, num_steps: int, script: str = TRAINING, **variables: str) -> "subprocess.Popen[str]":
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", **self.variables, **variables}
        command, pipe = [str(PYTHON), "-u", "-c", script, str(num_steps)], subprocess.PIPE
        return subprocess.Popen(command, env=variables, cwd=self.folder, stdin=pipe, stdout=pipe, text=True)

    def weights(self, path: str) -> dict[str, list[bytes]]:
        """Return all tensors that are saved under a path, with the optimizer, as the bytes of their shards."""
        session, number = path.removeprefix("tinker://").split("/")[0].split(":train:")
        files = sorted((self.folder / "served" / session / number / "weights").glob("end.*/[mo]*/*.safetensors"))
        assert len(files) >= 2
        shards = [(f"{file.parent.name}/{name}", tensor) for file in files for name, tensor in load_file(file).items()]
        # Any rank may have saved a tensor that all of them have.
        return {key: sorted(part.numpy().tobytes() for name, part in shards if name == key) for key, _ in shards}


def lines_with_kills(
    server: Server, script: "subprocess.Popen[str]", num_steps: int, num_kills: int, seconds: float
) -> Iterator[str]:
    """Yield the lines of a script, and kill server or worker at most `seconds` after those of random steps."""
    chance = random.Random(7)
    moments = sorted(chance.sample(range(num_steps), num_kills))
    assert script.stdout is not None
    for number, line in enumerate(script.stdout):
        if line.split()[0] in map(str, moments):
            time.sleep(chance.random() * seconds)  # between any two phases of a step
            if number % 2:
                server.kill_worker()
            else:
                server.kill()
                server.start()
        yield line


@pytest.mark.parametrize(
    ("num_steps", "num_kills", "ranks"),
    [
        (8, 3, 1),
        pytest.param(8, 3, 2, marks=pytest.mark.slow),
        pytest.param(40, 20, 1, marks=pytest.mark.slow),
    ],
    ids=["three", "three_on_two_ranks", "twenty"],
)
def test_weights_of_a_script_are_the_same_with_kills(
    tmp_path: Path, num_steps: int, num_kills: int, ranks: int
) -> None:
    server = Server(tmp_path, ranks)
    script = server.run_script(num_steps)
    try:
        lines = list(lines_with_kills(server, script, num_steps, num_kills, seconds=0.2))
        assert script.wait(60) == 0
        assert len(lines) == num_steps + 2
        undisturbed, _ = server.run_script(num_steps).communicate(timeout=600)
        *results, path = undisturbed.splitlines(keepends=True)
        assert lines[:-1] == results
        assert server.weights(lines[-1].strip()) == server.weights(path.strip())
        log = (tmp_path / "served" / "log.txt").read_text()
        assert log.count("is restored, up to command") >= num_kills // 2
    finally:
        server.kill()
        script.kill()


class Recorder(FaultProxy):
    """A proxy without faults, which records the results that the client gets."""

    def __init__(self, url: str):
        super().__init__(url, lambda _: None)
        self.results: dict[str, bytes] = {}

    def answer(self, request: Request) -> Reply:
        reply = super().answer(request)
        if request.path.endswith("retrieve_future") and reply.status == 200:
            assert isinstance(reply.body, bytes)
            self.results[json.loads(request.body)["request_id"]] = reply.body
        return reply


@pytest.mark.parametrize(
    ("num_steps", "num_kills"), [(4, 2), pytest.param(40, 20, marks=pytest.mark.slow)], ids=["two", "twenty"]
)
def test_answers_of_an_rl_loop_stay_as_delivered_with_kills(tmp_path: Path, num_steps: int, num_kills: int) -> None:
    server = Server(tmp_path, ranks=1)
    url, key = server.variables["TINKER_BASE_URL"], server.variables["TINKER_API_KEY"]
    with Recorder(url) as recorder:
        script = server.run_script(num_steps, RL_SCRIPT, TINKER_BASE_URL=recorder.url)
        try:
            lines = lines_with_kills(server, script, num_steps, num_kills, seconds=0.6)
            steps = [json.loads(next(lines).partition(" ")[2]) for _ in range(num_steps)]
            server.kill()
            server.start()
            client = Client(url, key, "models/tiny")
            kept = {name: client.fetch({"request_id": name}) for name in recorder.results}
            assert kept == recorder.results
            assert len(kept) == 1 + 13 * num_steps  # the model; two versions, four samples, six chunks and an update
            script.communicate("", timeout=60)
            assert script.returncode == 0
        finally:
            server.kill()
            script.kill()
    assert (tmp_path / "served" / "log.txt").read_text().count("is restored, up to command") >= num_kills // 2
    differences = [difference_from_oracle(tmp_path, step["path"], step["rows"]) for step in steps]
    assert 0 < max(differences) < 1e-5


def difference_from_oracle(folder: Path, path: str, rows: list[tuple[list[int], list[int], list[float]]]) -> float:
    """Return the largest difference of log-probs from those of transformers with the weights of a path."""
    saved = Checkpoints(folder / "served").get(SavedPath.parse(path)).folder
    target = folder / "exports" / saved.name
    export_checkpoint(saved, target, ExportOptions(model=str(folder / "models" / "tiny")))
    oracle = Oracle(load_oracle(target, "causal_lm", {}))
    data = [Row([*prompt, *tokens][:-1], [*prompt, *tokens][1:]) for prompt, tokens, _ in rows]
    expected = oracle.values(data)
    assert len(rows) == 16
    return max(
        abs(value - other)
        for (_, tokens, log_probs), values in zip(rows, expected, strict=True)
        for value, other in zip(log_probs, values[-len(tokens) :], strict=True)
    )
