"""Server and worker are killed while a script with the unmodified SDK trains; the script notices nothing.

make test-tinker
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.processes import children
from support.tinker_sdk import PYTHON

from camshaft.models.tiny import make_tiny_model

pytestmark = [pytest.mark.tinker, pytest.mark.alone, pytest.mark.timeout(1500)]

SCRIPT = """
import sys
import tinker
from tinker import types

data = [
    types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7, 8 + row]),
                loss_fn_inputs={"target_tokens": [6, 7, 8, 9 + row], "weights": [1.0, 0.5, -0.25, 2.0]})
    for row in range(7)  # three chunks, because the server accepts three datums
]
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
for step in range(int(sys.argv[1])):
    passes = trainer.forward_backward(data, loss_fn="cross_entropy")
    update = trainer.optim_step(types.AdamParams(learning_rate=1e-3 * (1 + step % 3)))
    print(step, passes.result().metrics["loss:sum"], update.result().metrics, flush=True)
print([list(row["logprobs"].data) for row in trainer.forward(data, loss_fn="cross_entropy").result().loss_fn_outputs])
print(trainer.save_state("end").result().path)
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

    def run_script(self, num_steps: int) -> "subprocess.Popen[str]":
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0", **self.variables}
        command = [str(PYTHON), "-u", "-c", SCRIPT, str(num_steps)]
        return subprocess.Popen(command, env=variables, cwd=self.folder, stdout=subprocess.PIPE, text=True)

    def weights(self, path: str) -> dict[str, list[bytes]]:
        """Return all tensors that are saved under a path, with the optimizer, as the bytes of their shards."""
        session, number = path.removeprefix("tinker://").split("/")[0].split(":train:")
        files = sorted((self.folder / "served" / session / number / "weights").glob("end.*/[mo]*/*.safetensors"))
        assert len(files) >= 2
        shards = [(f"{file.parent.name}/{name}", tensor) for file in files for name, tensor in load_file(file).items()]
        # Any rank may have saved a tensor that all of them have.
        return {key: sorted(part.numpy().tobytes() for name, part in shards if name == key) for key, _ in shards}


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
    server, chance = Server(tmp_path, ranks), random.Random(7)
    script = server.run_script(num_steps)
    try:
        assert script.stdout is not None
        moments = sorted(chance.sample(range(num_steps), num_kills))
        lines = []
        for line in script.stdout:
            lines.append(line)
            if line.split()[0] in map(str, moments):
                time.sleep(chance.random() * 0.2)  # between any two phases of a step
                if len(lines) % 2:
                    server.kill()
                    server.start()
                else:
                    server.kill_worker()
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
