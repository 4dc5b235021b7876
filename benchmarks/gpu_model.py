"""Model sizes, random models, rows and actor settings for `gpu.py`, `gpu_rows.py` and `gpu_24gb.py`.

    size = SIZES["1.5B"]
    actor = ActorUpdate(folder, **settings(size, "cuda", "bfloat16"))
    actor.update(rows_of(size, seed=1))

    QWEN3["4B"].write(folder, 2048, "bfloat16")        # a folder without weights
    with random_weights():
        engine.init_model()                            # of a model with random_init=true, filled on its device

Every row has its own prompt, because on a GPU rows are packed whole: counted and computed work are the same. Lengths
are uniformly distributed, so the mean row has half the length of the longest row, which a padded batch computes.
"""

from __future__ import annotations

import contextlib
import statistics
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import roofline
import torch
import torch.nn.functional as F
import transformers
import workload
from textbook import right
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config
from workload import Rows, Shape

SAMPLES = 2
"""Rows per prompt in the config."""

transformers.utils.logging.disable_progress_bar()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """A model shape and the amount of work in each part."""

    shape: Shape
    rows: int
    """Rows per optimizer step."""
    longest_prompt: int
    longest_response: int
    budget: int
    """Tokens per micro-batch."""
    head_tokens: int
    vocabularies: tuple[int, ...]
    batch: int
    """Rows generated at a time, each with a prompt of `prompt` tokens and `answer` new tokens."""
    prompt: int
    answer: int

    @property
    def longest(self) -> int:
        return max(self.longest_prompt + self.longest_response, self.prompt + self.answer)


SIZES = {
    "1.5B": Size(
        Shape(1536, 28, 12, 2, 8960, 151_936),
        rows=16, longest_prompt=1024, longest_response=7168, budget=16_384,
        head_tokens=8192, vocabularies=(32_000, 75_000, 150_000),
        batch=256, prompt=512, answer=256,
    ),
    "tiny": Size(
        Shape(64, 2, 4, 2, 128, 512),
        rows=8, longest_prompt=8, longest_response=24, budget=64,
        head_tokens=64, vocabularies=(512, 1024),
        batch=8, prompt=16, answer=8,
    ),
}  # fmt: skip
"""The first has the shape of Qwen2.5-1.5B."""


@dataclass(frozen=True)
class Qwen3:
    """Shape of a model like Qwen3 with tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int = 151_936

    @property
    def weights_of_layers(self) -> int:
        """Number of the weights of all layers' matrices."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * self.hidden * (attention + 3 * self.intermediate)

    @property
    def weights_of_head(self) -> int:
        return self.hidden * self.vocab_size

    def write(self, folder: Path, longest: int, dtype: str) -> None:
        """Write a model folder without weights, with an empty prompt file."""
        from camshaft.models.tiny import make_tiny_tokenizer

        make_tiny_tokenizer(folder)
        Qwen3Config(
            hidden_size=self.hidden, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate,
            vocab_size=self.vocab_size, tie_word_embeddings=True, max_position_embeddings=longest, dtype=dtype,
            architectures=["Qwen3ForCausalLM"], pad_token_id=0, eos_token_id=2, bos_token_id=None,
        ).save_pretrained(folder)  # fmt: skip
        (folder / "train.parquet").touch()


QWEN3 = {
    "0.6B": Qwen3(1024, 28, 16, 8, 128, 3072),
    "1.7B": Qwen3(2048, 28, 16, 8, 128, 6144),
    "4B": Qwen3(2560, 36, 32, 8, 128, 9728),
    "tiny": Qwen3(64, 2, 4, 2, 32, 128, 512),
}


@contextlib.contextmanager
def without_initialization() -> Iterator[None]:
    """Build models without values, for `fill`."""
    with contextlib.ExitStack() as patches:
        for owner, name in (
            (PreTrainedModel, "_init_weights"), (nn.Linear, "reset_parameters"), (nn.Embedding, "reset_parameters"),
        ):  # fmt: skip
            patches.enter_context(mock.patch.object(owner, name, _nothing))
        yield


def _nothing(*_: Any) -> None: ...


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """Fill the models of engines on their device, which is much faster than on a CPU."""
    from camshaft.engine.torch_engine import TorchEngine

    init_model = TorchEngine.init_model

    def filled(engine: Any) -> None:
        init_model(engine)
        fill(engine.module)

    with without_initialization(), mock.patch.object(TorchEngine, "init_model", filled):
        yield


def fill(model: nn.Module) -> None:
    """Fill the parameters of a model in place: matrices with random numbers that depend on their name.

    An engine and a plain model of `transformers` get the same weights on the same device.
    """
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        if weight.dim() > 1 and "lora_B" not in name:
            seed = zlib.crc32(name.replace("_orig_mod.", "").removeprefix("hf.").encode())
            weight.normal_(std=0.02, generator=torch.Generator(weight.device).manual_seed(seed))
        else:
            weight.fill_(0.0 if weight.dim() > 1 or name.endswith("bias") else 1.0)


def make_model(folder: Path, size: Size) -> None:
    """Write random float32 weights and the prompt file that a config requires."""
    from camshaft.models.tiny import make_tiny_model

    make_tiny_model(folder, **asdict(size.shape), max_position_embeddings=size.longest)
    (folder / "train.parquet").touch()


def rows_of(size: Size, seed: int) -> Rows:
    """Return the rows of one optimizer step."""
    random = torch.Generator().manual_seed(seed)

    def drawn(longest: int) -> list[Tensor]:
        lengths = torch.randint(1, longest + 1, (size.rows,), generator=random).tolist()
        vocabulary = size.shape.vocab_size
        return [torch.randint(workload.FIRST_WORD, vocabulary, (n,), generator=random) for n in lengths]

    return with_columns(drawn(size.longest_prompt), drawn(size.longest_response), size, random)


def with_columns(prompts: list[Tensor], responses: list[Tensor], size: Size, random: torch.Generator) -> Rows:
    """Return rows with random advantages, and log-probs near those of a model that knows nothing."""
    die = -torch.tensor(float(size.shape.vocab_size)).log()
    old = [die + 0.1 * torch.randn(len(response), generator=random) for response in responses]
    advantages = torch.randn(len(responses), generator=random)
    return Rows(prompts, responses, old, [a.expand(len(r)) for a, r in zip(advantages, responses, strict=True)])


def work_of(size: Size, rows: Rows, dtype: str) -> roofline.Work:
    """Return the minimum work of an update of these rows, without recomputation."""
    groups = [roofline.Group(len(p), [len(r)]) for p, r in zip(rows.prompts, rows.responses, strict=True)]
    return roofline.update(size.shape, groups, steps=1, number=DTYPES[dtype].itemsize)


def settings(size: Size, device: str, dtype: str) -> dict[str, Any]:
    """Return the settings of an actor on one rank of the sharded engine: float32 weights, computation in `dtype`."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        f"{actor}.strategy": "fsdp",
        f"{actor}.fsdp_config.mixed_precision.param_dtype": "null" if dtype == "float32" else dtype,
        f"{actor}.ppo_mini_batch_size": size.rows // SAMPLES,
        f"{actor}.ppo_max_token_len_per_gpu": max(size.budget, size.longest),
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{rollout}.n": SAMPLES,
        "data.train_batch_size": size.rows // SAMPLES,
        "data.max_prompt_length": size.longest_prompt,
        "data.max_response_length": size.longest_response,
        "trainer.device": device,
    }


class Padded:
    """Textbook loop: rows padded to the maximum length, one row per micro-batch, all logits, plain log-softmax.

    Autocast to `dtype`. The caller enables activation checkpointing of the model.
    """

    def __init__(self, model: Any, width: int, device: str, dtype: str):
        self.model, self.width, self.device, self.dtype = model, width, device, DTYPES[dtype]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=workload.LEARNING_RATE, weight_decay=0.01)

    def update(self, rows: Rows) -> dict[str, float]:
        tokens, losses = sum(map(len, rows.responses)), []
        self.optimizer.zero_grad()
        for number in range(len(rows)):
            loss = self._loss(rows.part([number])) / tokens
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), workload.GRAD_CLIP)
        self.optimizer.step()
        return {"loss": float(torch.stack(losses).sum()), "grad_norm": float(norm)}

    def _loss(self, rows: Rows) -> Tensor:
        sequences = [torch.cat(pair) for pair in zip(rows.prompts, rows.responses, strict=True)]
        ids = right(sequences, self.width).to(self.device)
        real = right([torch.ones_like(row) for row in sequences], self.width).to(self.device)
        with torch.autocast(self.device.partition(":")[0], self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(input_ids=ids, attention_mask=real, use_cache=False).logits
        chosen = logits[:, :-1].float().log_softmax(dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        return self.loss_of(chosen, rows)

    def loss_of(self, chosen: Tensor, rows: Rows) -> Tensor:
        """Return the sum of the losses of the response tokens."""
        old, advantages, mask = (self.placed(rows, column) for column in self._columns(rows))
        ratio = (chosen - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - workload.CLIP, 1 + workload.CLIP) * advantages)
        return -(gain * mask).sum()

    def placed(self, rows: Rows, column: list[Tensor]) -> Tensor:
        """Place per-response-token numbers at the positions that predict the tokens."""
        moved = [F.pad(row, (len(p) - 1, 0)) for p, row in zip(rows.prompts, column, strict=True)]
        return right(moved, self.width - 1).to(self.device)

    @staticmethod
    def _columns(rows: Rows) -> list[list[Tensor]]:
        return [rows.old_log_probs, rows.advantages, [torch.ones(len(response)) for response in rows.responses]]


def mean_tokens(rows: list[Rows]) -> float:
    return statistics.mean(sum(map(len, each.prompts)) + sum(map(len, each.responses)) for each in rows)
