"""GRPO with `camshaft ppo`, and the same algorithm as a script with the Tinker SDK.

steps = train_with_ppo(folder, ADAM, num_steps=5)
lines, weights = train_with_sdk(folder, steps, ADAM)      # with the prompts and seeds of the steps
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from camshaft.service.checkpoints import Checkpoints, SavedPath
from camshaft.trainer.mini_batches import sampling_seeds
from support.even_digits import __file__ as REWARD
from support.ppo_runs import SMALL, Step, run_ppo, saved_weights
from support.tinker_clients import running_server
from support.tinker_sdk import run_python

GROUP, SEED = 4, 11
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
"""The defaults of the SDK."""

SCRIPT = """
import json, runpy, statistics, sys, time
import tinker
from tinker import types

model, group_size, max_tokens, adam, reward_file, steps = json.loads(sys.argv[1])
compute_score = runpy.run_path(reward_file)["compute_score"]
service = tinker.ServiceClient()
trainer = service.create_lora_training_client(base_model=model, rank=0).result()
tokenizer = trainer.get_tokenizer()
lines = []
for prompts in steps:
    start = time.perf_counter()
    sampler = trainer.save_weights_and_get_sampling_client().result()
    pending = [
        sampler.sample(types.ModelInput.from_ints(prompt["ids"]), group_size,
                       types.SamplingParams(max_tokens=max_tokens, seed=prompt["seed"]))
        for prompt in prompts
    ]
    groups = [[list(sample.tokens) for sample in future.result().sequences] for future in pending]
    num_tokens = sum(len(tokens) for group in groups for tokens in group)
    rows, advantages = [], []
    for prompt, group in zip(prompts, groups):
        texts = tokenizer.batch_decode(group, skip_special_tokens=True)
        scores = [compute_score("", text, prompt["truth"], None) for text in texts]
        mean, deviation = statistics.mean(scores), statistics.stdev(scores)
        for tokens, score in zip(group, scores):
            rows.append((prompt["ids"], tokens))
            advantages.append((score - mean) / (deviation + 1e-6) / num_tokens)  # the loss is a mean over tokens

    def datum(row, **columns):
        ids, zeros = row[0] + row[1], [0.0] * (len(row[0]) - 1)
        inputs = {name: zeros + values for name, values in columns.items()}
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]),
                           loss_fn_inputs={"target_tokens": ids[1:], **inputs})

    data = [datum(row, weights=[1.0] * len(row[1])) for row in rows]
    outputs = trainer.forward(data, loss_fn="cross_entropy").result().loss_fn_outputs
    data = [
        datum(row, logprobs=list(output["logprobs"].data)[len(row[0]) - 1:], advantages=[advantage] * len(row[1]))
        for row, output, advantage in zip(rows, outputs, advantages)
    ]
    passes = trainer.forward_backward(data, loss_fn="ppo")
    update = trainer.optim_step(types.AdamParams(**adam))
    loss, norm = passes.result().metrics["loss:sum"], update.result().metrics["grad_norm"]
    lines.append([groups, loss, norm, time.perf_counter() - start])
print(json.dumps([lines, trainer.save_state("end").result().path]))
"""


class Line(NamedTuple):
    """A step of the script."""

    groups: list[list[list[int]]]
    """Sampled tokens of each prompt."""
    loss: float
    norm: float
    seconds: float


def train_with_ppo(
    folder: Path, adam: Mapping[str, float], num_steps: int, overrides: Mapping[str, Any] | None = None
) -> list[Step]:
    """Return the steps of `camshaft ppo` with one update of all rows per step."""
    actor = "actor_rollout_ref.actor"
    options = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": GROUP,
        "trainer.seed": SEED,
        f"{actor}.ppo_mini_batch_size": SMALL["data.train_batch_size"],
        f"{actor}.loss_agg_mode": "token-mean",
        f"{actor}.entropy_coeff": 0.0,
        f"{actor}.grad_clip": 1e9,
        f"{actor}.optim.lr": adam["learning_rate"],
        f"{actor}.optim.betas": f"[{adam['beta1']},{adam['beta2']}]",
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.override_optimizer_config": f"{{eps: {adam['eps']}}}",
    }
    return run_ppo(folder, {**options, **(overrides or {})}, steps=num_steps)


def train_with_sdk(
    folder: Path,
    steps: list[Step],
    adam: Mapping[str, float],
    model: str = "",
    max_tokens: int = SMALL["data.max_response_length"],
) -> tuple[list[Line], dict[str, Tensor]]:
    """Return the steps of the script with the prompts and seeds of a run, and the weights at its end."""
    prompts = [
        [
            {"ids": ids.tolist(), "seed": int(seed), "truth": truth}
            for ids, seed, truth in zip(
                step.batch.ragged("prompts").rows()[::GROUP],
                sampling_seeds(SEED, number, len(step.batch))[::GROUP],
                step.batch["ground_truth"][::GROUP],
                strict=True,
            )
        ]
        for number, step in enumerate(steps, start=1)
    ]
    model = model or str(folder / "actor")
    with tempfile.TemporaryDirectory(dir=folder) as own, running_server(Path(own), model=model) as server:
        variables = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key}
        arguments = json.dumps([model, GROUP, max_tokens, adam, REWARD, prompts])
        lines, path = json.loads(run_python(SCRIPT, arguments, environment=variables, seconds=600))
        saved = Checkpoints(Path(server.config.folder)).get(SavedPath.parse(path)).folder
        return [Line(*line) for line in lines], saved_weights(saved)
