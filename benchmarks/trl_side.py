"""TRL as a side of the benchmarks: steps of GRPOTrainer, and of PPOTrainer with critic and reference.

    steps = GRPOSteps(folder, learning_rate=1e-7)      # TRL 1.16, .venv-trl
    steps = PPOSteps(folder, learning_rate=1e-7)       # TRL 1.12, the last version with PPOTrainer, .venv-trl-ppo
    steps.step()["lengths"]                            # response lengths, for the prompts of train.parquet in order

The trainer's `train()` runs in a thread and pauses before TRL processes its next prompts. A step is everything that TRL
does between two pauses: generation by `transformers.generate`, rewards, log-probs, advantages, two optimizer steps,
metrics, callbacks. Both trainers compute in float32 without gradient checkpointing, and neither log nor save. Settings
that affect only speed have the fastest of the values tried. With the continuous batching of `transformers`, which
GRPOTrainer offers, a step did not finish in two minutes on a CPU.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import itertools
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import torch
import workload
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)

ROWS = workload.PROMPTS * workload.SAMPLES
GRPO_MICRO_BATCH = 16
ROLLOUT_BATCH = 128
"""Rows that PPOTrainer generates and evaluates at a time."""


class Steps(TrainerCallback):
    """Training loop in a separate thread; each `step` runs it up to its next `rest`."""

    def __init__(self, folder: Path):
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.prompts: list[str] = pyarrow.parquet.read_table(folder / "train.parquet")["prompt"].to_pylist()
        self.lengths: list[int] = []
        self.requests: queue.Queue[None] = queue.Queue()
        self.pauses: queue.Queue[bool] = queue.Queue()

    def begin(self, train: Callable[[], Any]) -> None:
        """Start the loop and run it up to its first `rest`."""

        def run() -> None:
            try:
                train()
            except Exception:
                traceback.print_exc()
            self.pauses.put(False)

        threading.Thread(target=run, daemon=True).start()
        self._arrive()

    def step(self) -> dict[str, list[int]]:
        """Run the loop from one `rest` to the next and return the response lengths."""
        self.lengths = []
        self.requests.put(None)
        self._arrive()
        return {"lengths": self.lengths}

    def rest(self) -> None:
        """Pause the loop until the next `step`; called inside the loop."""
        self.pauses.put(True)
        self.requests.get()

    def _arrive(self) -> None:
        if not self.pauses.get():
            raise SystemExit("TRL's loop ended; its error is above")


def common(folder: Path, learning_rate: float) -> dict[str, Any]:
    """Return the arguments that both trainers share."""
    return {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "learning_rate": learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "max_grad_norm": workload.GRAD_CLIP,
        "temperature": 1.0,
        "report_to": [],
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def causal(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


class GRPOSteps(Steps):
    """Two iterations of `GRPOTrainer`, one optimizer step each; the first one generates. No reference (beta 0)."""

    def __init__(self, folder: Path, learning_rate: float):
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer

        super().__init__(folder)
        config = GRPOConfig(
            **common(folder, learning_rate), max_steps=10**6, per_device_train_batch_size=GRPO_MICRO_BATCH,
            gradient_accumulation_steps=workload.MINI_BATCH // GRPO_MICRO_BATCH, generation_batch_size=ROWS,
            num_generations=workload.SAMPLES, max_completion_length=workload.LONGEST_ANSWER, num_iterations=1,
            beta=0.0, epsilon=workload.CLIP, shuffle_dataset=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=causal(folder), processing_class=self.tokenizer, reward_funcs=self.reward, args=config,
            train_dataset=Dataset.from_dict({"prompt": self.prompts}), callbacks=[self],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        self.begin(trainer.train)

    def reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.lengths += map(len, completion_ids)
        return [workload.even_share(ids) for ids in completion_ids]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % (ROWS // workload.MINI_BATCH) == 0:
            self.rest()


class PPOSteps(Steps):
    """One iteration of `PPOTrainer` with two mini-batches: a forward and backward pass and an optimizer step each.

    Mini-batches are not split into micro-batches: PPOTrainer would take one optimizer step for both and be no faster.
    """

    def __init__(self, folder: Path, learning_rate: float):
        from datasets import Dataset
        from trl.experimental.ppo import PPOConfig, PPOTrainer

        super().__init__(folder)
        config = PPOConfig(
            **common(folder, learning_rate), total_episodes=10**9, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=1, num_mini_batches=ROWS // workload.MINI_BATCH, num_ppo_epochs=1,
            local_rollout_forward_batch_size=ROLLOUT_BATCH, response_length=workload.LONGEST_ANSWER, stop_token="eos",
            kl_coef=workload.KL, cliprange=workload.CLIP, cliprange_value=workload.CLIP_VALUE, gamma=1.0,
            lam=workload.LAMBDA, num_sample_generations=0,
        )  # fmt: skip
        self.even = EvenShare()
        trainer = PPOTrainer(
            args=config, processing_class=self.tokenizer, model=causal(folder), ref_model=causal(folder),
            reward_model=self.even,
            value_model=AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32),
            train_dataset=Dataset.from_dict({"prompt": self.prompts}),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.dataloader = self.batches()  # TRL's loader shuffles the prompts
        self.begin(trainer.train)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches with each prompt eight times."""
        for first in itertools.cycle(range(0, len(self.prompts), workload.PROMPTS)):
            self.rest()
            texts = [text for text in self.prompts[first : first + workload.PROMPTS] for _ in range(workload.SAMPLES)]
            batch = self.tokenizer(texts, padding=True, return_tensors="pt")
            self.even.starts = batch.input_ids.shape[1]
            yield batch

    def step(self) -> dict[str, list[int]]:
        self.even.lengths = []
        super().step()
        return {"lengths": self.even.lengths}


class EvenShare(nn.Module):
    """Reward in the form that PPOTrainer expects, a model with a backbone and a head. It has no weights."""

    base_model_prefix = "backbone"
    starts = 0
    """Column of the first response token."""

    def __init__(self):
        super().__init__()
        self.lengths: list[int] = []

    @property
    def backbone(self) -> EvenShare:
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **_: Any) -> SimpleNamespace:
        real = attention_mask[:, self.starts :]
        lengths = real.sum(dim=1)
        even = ((input_ids[:, self.starts :] % 2 == 0) & real).sum(dim=1)
        self.lengths += lengths.tolist()
        return SimpleNamespace(hidden_states=[(even / lengths)[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, share: Tensor) -> Tensor:
        return share
