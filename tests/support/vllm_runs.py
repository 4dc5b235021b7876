"""Small PPO runs with vLLM, and greedy responses of vLLM and transformers after each step.

steps = run_with_vllm(tmp_path, {"trainer.n_gpus_per_node": 2}, steps=3)
steps[-1].by_vllm == steps[-1].by_transformers      # token for token
steps[-1].metrics["critic/score/mean"]
"""

import re
import shutil
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from camshaft.dataproto import DataProto
from camshaft.models.loader import quiet_transformers
from camshaft.models.tiny import make_tiny_model
from camshaft.ragged import Ragged
from camshaft.trainer.build import PPOParts
from camshaft.trainer.ppo import PPOTrainer
from support.ppo_runs import SPREAD, ppo_args, ppo_config, weights_of

END = 2
"""The end-of-sequence token of tiny models."""

FOR_VLLM: dict[str, Any] = {
    "actor_rollout_ref.rollout.name": "vllm",
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.optim.lr": 3e-3,
    "data.max_response_length": 16,
}


@dataclass(frozen=True)
class StepResponses:
    """Greedy responses of vLLM and transformers with the weights after one step."""

    metrics: dict[str, float]
    by_vllm: list[list[int]]
    by_transformers: list[list[int]]


def with_wide_heads(folder: Path, seed: int = 0) -> None:
    """Write the folder of `ppo_args` with a wider actor: vLLM's CPU attention requires heads of at least 32."""
    ppo_args(folder)
    shutil.rmtree(folder / "actor")
    make_tiny_model(folder / "actor", hidden=128, seed=seed, initializer_range=SPREAD)


def run_with_vllm(folder: Path, overrides: Mapping[str, Any] | None = None, steps: int = 3) -> list[StepResponses]:
    """Train for `steps` steps, and return the responses after each."""
    with_wide_heads(folder)
    lengths = {"trainer.total_training_steps": steps, "trainer.total_epochs": steps}
    config = ppo_config(folder, {**FOR_VLLM, **lengths, **(overrides or {})})
    with PPOTrainer.open(config) as trainer:
        trainer.prepare()
        model = config.actor_rollout_ref.model
        scaling = model.lora_alpha / max(model.lora_rank, 1)
        listener = _Listener(trainer.parts, folder / "actor", config.data.max_response_length, scaling)
        trainer.fit(listener)  # pyright: ignore[reportArgumentType]
    return listener.steps


def wait_until_it_generates(url: str, key: str, seconds: float = 60) -> None:
    """Wait until the server reports running sequences, for at most some seconds."""
    gives_up = time.monotonic() + seconds
    while time.monotonic() < gives_up:
        request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            running_now = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        if running_now and float(running_now[1]) > 0:
            return
        time.sleep(0.05)


class _Listener:
    """A tracker that generates at the end of each step."""

    def __init__(self, parts: PPOParts, model: Path, length: int, scaling: float):
        self.parts, self.model, self.length, self.scaling = parts, model, length, scaling
        random = torch.Generator().manual_seed(0)
        self.prompts = [torch.randint(3, 90, (n,), generator=random) for n in (3, 5, 8, 5, 12, 7)]
        self.steps: list[StepResponses] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        out = self._generate(DataProto.from_dict({"prompts": Ragged.from_rows(self.prompts)}), step)
        by_vllm = [row.tolist() for row in out.ragged("responses").rows()]
        self.steps.append(StepResponses(dict(metrics), by_vllm, self._greedy(weights_of(self.parts.actor))))

    def _generate(self, batch: DataProto, version: int) -> DataProto:
        if self.parts.rollout is None:
            return self.parts.actor.generate_sequences(batch, validate=True, recompute_log_prob=False)
        with self.parts.rollout_phase():  # on devices of its own
            self.parts.sync_weights(version)
            return self.parts.rollout.generate_sequences(batch, validate=True)

    @torch.no_grad()
    def _greedy(self, weights: dict[str, Tensor]) -> list[list[int]]:
        with quiet_transformers():
            reference: Any = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32).eval()
        adapter = {name: weight for name, weight in weights.items() if ".lora_" in name}
        if adapter:  # a LoRA checkpoint has only the adapter
            assert adapter.keys() == weights.keys()
            for name in filter(lambda name: ".lora_A." in name, adapter):
                delta = adapter[name.replace(".lora_A.", ".lora_B.")] @ adapter[name]
                reference.get_submodule(name.partition(".lora_A.")[0]).weight += self.scaling * delta
        else:
            missing, unexpected = reference.load_state_dict(weights, strict=False)
            assert set(missing) <= {"lm_head.weight"}, missing
            assert not unexpected, unexpected
        reference.tie_weights()
        responses = []
        for prompt in self.prompts:
            mask = torch.ones_like(prompt)[None]
            how = {"do_sample": False, "max_new_tokens": self.length, "eos_token_id": END, "pad_token_id": 0}
            out = reference.generate(prompt[None], attention_mask=mask, **how)
            responses.append(out[0, len(prompt) :].tolist())
        return responses
