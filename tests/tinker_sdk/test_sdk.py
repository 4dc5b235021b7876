"""`camshaft serve` with the Tinker SDK, unchanged, in another process and another environment.

make test-tinker
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.tinker_sdk import ROOT, run_python

from camshaft.models.tiny import make_tiny_model

pytestmark = pytest.mark.tinker
EXAMPLES = ROOT / "examples" / "tinker"


@dataclass
class Server:
    """A server of the command line, in the folder in which it was started."""

    folder: Path
    variables: dict[str, str]
    process: subprocess.Popen[str]

    def run(self, program: str, *arguments: str) -> str:
        """Run a Python program with the SDK against this server."""
        return run_python(program, *arguments, environment=self.variables, folder=self.folder)

    def run_example(self, name: str, *arguments: str) -> str:
        return self.run((EXAMPLES / name).read_text(encoding="utf-8"), *arguments)


def start_server(folder: Path, *options: str) -> Server:
    """Start `camshaft serve`, and read the variables that it prints."""
    if not (folder / "models").exists():
        make_tiny_model(folder / "models" / "tiny", seed=1, tie_embeddings=False)
    command = [sys.executable, "-m", "camshaft", "serve", "model=models/tiny", "port=0", "device=cpu", *options]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    variables = dict(line.removeprefix("export ").rstrip().split("=", 1) for line in lines)
    assert list(variables) == ["TINKER_BASE_URL", "TINKER_API_KEY"]
    return Server(folder, variables, process)


def stop_server(server: Server) -> int:
    server.process.terminate()
    return server.process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(tmp_path_factory.mktemp("sdk"), "max_models=8", "max_data=3")
    yield server
    assert stop_server(server) == 0


def test_the_quickstart_trains_from_a_printed_url_and_key(server: Server) -> None:
    output = server.run_example("quickstart.py")
    losses = [float(text) for text in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < 0.6 * losses[0]
    assert re.search(r"saved as tinker://\w+:train:0/weights/quickstart", output)


def test_sampled_log_probs_of_the_rl_loop_are_those_of_the_engine(server: Server) -> None:
    output = server.run_example("rl_loop.py")
    rewards = [float(text) for text in re.findall(r"reward ([\d.]+)", output)]
    differences = [float(text) for text in re.findall(r"difference (\S+)", output)]
    assert len(rewards) == 8
    assert max(rewards[4:]) > rewards[0]
    assert max(differences) < 1e-5
    assert max(differences) > 0


def test_the_rl_loop_learns_from_samples_that_are_one_step_old(tmp_path: Path) -> None:
    server = start_server(tmp_path, "sampling_ranks=1")
    output = server.run_example("rl_loop.py", "--ahead")
    assert stop_server(server) == 0
    rewards = [float(text) for text in re.findall(r"reward ([\d.]+)", output)]
    differences = [float(text) for text in re.findall(r"difference (\S+)", output)]
    assert len(rewards) == 8
    assert max(rewards[4:]) > rewards[0]
    assert differences[0] < 1e-5  # sampled from the weights that are trained
    assert min(differences[1:]) > 1e-3


def test_a_continued_supervised_run_has_the_losses_of_an_undisturbed_one(server: Server) -> None:
    undisturbed = server.run_example("supervised.py")
    first = server.run_example("supervised.py", "--steps", "8")
    (path,) = re.findall(r"saved as (tinker://\w+:train:0/weights/step-8)", first)
    second = server.run_example("supervised.py", "--resume", path)
    losses = [re.findall(r"loss ([\d.]+)", output) for output in (undisturbed, first + second)]
    assert len(losses[0]) == 16
    assert losses[0] == losses[1]
    assert float(losses[0][-1]) < 0.8 * float(losses[0][0])


STATES = """
import tinker
from tinker import types

service = tinker.ServiceClient()
data = [
    types.Datum(model_input=types.ModelInput.from_ints([5, 6, 7, 8 + row]),
                loss_fn_inputs={"target_tokens": [6, 7, 8, 9], "weights": [1.0, 0.0, -1.0, 2.0]})
    for row in range(7)  # several chunks, because the server accepts three datums
]

def loss(client):
    return client.forward(data, loss_fn="cross_entropy").result().metrics["loss:sum"]

def train(client):
    passes = client.forward_backward(data, loss_fn="cross_entropy")
    update = client.optim_step(types.AdamParams(learning_rate=1e-2))
    passes.result(), update.result()

trainer = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
train(trainer)
path = trainer.save_state("one").result().path
saved = loss(trainer)
with_state = service.create_training_client_from_state_with_optimizer(path)
with_state = with_state.result() if hasattr(with_state, "result") else with_state
assert loss(with_state) == saved, "loaded"
train(trainer), train(with_state)
assert loss(with_state) == loss(trainer) != saved, "continued"
trainer.load_state(path).result()
assert loss(trainer) == saved, "gone back"

# The custom loss is a forward pass and a weighted cross_entropy. It equals the direct loss.
def custom(data, logprobs):
    total = sum(-(row * weights).sum() for row, weights in zip(logprobs, WEIGHTS))
    return total, {"custom": float(total)}

import torch
WEIGHTS = [torch.tensor([1.0, 0.0, -1.0, 2.0])] * len(data)
one = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
other = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
passes = one.forward_backward_custom(data, custom)
update = one.optim_step(types.AdamParams(learning_rate=1e-2))
passes.result(), update.result()
train(other)
assert abs(loss(one) - loss(other)) < 1e-4, "custom"

try:
    trainer.forward_backward(data, loss_fn="stable_reinforce").result()
except Exception as error:
    print(type(error).__name__, error)
try:
    service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()
except Exception as error:
    print(type(error).__name__, error)
print("done")
"""


def test_states_custom_losses_and_errors_work_with_the_sdk(server: Server) -> None:
    output = server.run(STATES)
    assert "its formula is not public; set loss_fn=importance_sampling" in output
    assert "the base model Qwen/Qwen3-8B is not served; this server has models/tiny" in output
    assert output.rstrip().endswith("done")


SCORES = """
import asyncio
import tinker, torch
from tinker import types

service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model="models/tiny", rank=4, seed=3).result()
tokens = [5, 6, 7, 8, 9, 10]
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 5})
passes = trainer.forward_backward([datum], loss_fn="cross_entropy")
update = trainer.optim_step(types.AdamParams(learning_rate=1e-2))
passes.result(), update.result()
sampler = trainer.save_weights_and_get_sampling_client()
prompt = types.ModelInput.from_ints(tokens)
expected = trainer.forward([datum], loss_fn="cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()

def close(actual, other):
    assert len(actual) == len(other) and max(abs(a - b) for a, b in zip(actual, other)) < 1e-5, (actual, other)

scores = sampler.compute_logprobs(prompt).result()
assert scores[0] is None
close(scores[1:], expected)
last = sampler.compute_logprobs(prompt, prompt_logprobs_last_n=2).result()
assert last[:4] == [None] * 4
close(last[4:], expected[3:])

ids = torch.full((5, 2), -1)
ids[:, 0] = torch.tensor(tokens[1:])
ids[4, 1] = 30
response = sampler.sample(
    prompt, 2, types.SamplingParams(max_tokens=4, stop=[], seed=1), include_prompt_logprobs=True,
    topk_prompt_logprobs=3, topk_sample_logprobs=2, target_prompt_logprobs=types.TensorData.from_torch(ids),
).result()
close(response.prompt_logprobs[1:], expected)
assert response.topk_prompt_logprobs[0] is None
assert [len(row) for row in response.topk_prompt_logprobs[1:]] == [3] * 5
targets = response.target_prompt_logprobs.to_torch()
close(targets[:, 0].tolist(), expected)
assert targets[:4, 1].tolist() == [0.0] * 4 and targets[4, 1] < 0
sparse = torch.full((5, 40), -1)
sparse[4, 3] = tokens[5]
response = sampler.sample(
    prompt, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True,
    target_prompt_logprobs=types.TensorData.from_torch_sparse(sparse, pad_value=-1),
).result()
table = response.target_prompt_logprobs
assert table.sparse_crow_indices == [0, 0, 0, 0, 0, 1], table
close([table.to_torch()[4, 3].item()], expected[4:])

settings = types.SamplingParams(max_tokens=4, stop=[], seed=1)
response = sampler.sample(prompt, 2, settings, topk_sample_logprobs=2).result()
for sequence in response.sequences:
    assert [len(row) for row in sequence.topk_logprobs] == [2] * 4
    whole = sampler.compute_logprobs(types.ModelInput.from_ints(tokens + sequence.tokens)).result()
    close(whole[6:], sequence.logprobs)

async def score_many():
    rows = [types.ModelInput.from_ints(tokens[: 2 + row % 5]) for row in range(64)]
    return await asyncio.gather(*[sampler.compute_logprobs(row).coroutine() for row in rows])

for row, values in enumerate(asyncio.run(score_many())):
    close(values[1:], expected[: 1 + row % 5])

try:
    sampler.sample(prompt, 1, types.SamplingParams(max_tokens=1), prompt_alt_tokens_k=2).result()
except Exception as error:
    print(type(error).__name__, error)
print("done")
"""


def test_log_probs_of_prompts_reach_the_sdk(server: Server) -> None:
    output = server.run(SCORES)
    assert "prompt_alt_tokens_k=2 is not supported by this server" in output
    assert output.rstrip().endswith("done")
