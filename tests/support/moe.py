"""Tiny mixture-of-experts models, and their training with `transformers` and a torch optimizer as the oracle.

harness = MoEHarness(engine_class("fsdp"), folder, common_fields=fields, sizes=MODELS["mixtral"])
expected = train_oracle(harness.model_folder, harness.batch, optim, grad_clip=0.5, steps=3)
"""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from camshaft.contracts.engine.harness import TINY, EngineHarness, Tolerances
from camshaft.contracts.engine.oracle import oracle_step
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine import BaseEngine, engine_class
from camshaft.engine.context import StepContext
from camshaft.models.tiny import make_tiny_model, make_tiny_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "family": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "mixtral": {"family": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixed": {
        "family": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
        "layers": 3,
    },
}
"""Arguments of `make_tiny_model`. The first layer of `mixed` is dense, and its gate weights are not normalized."""


class MoEHarness(EngineHarness):
    """A harness whose model has the arguments `sizes` of `make_tiny_model`. Results agree with the oracle to 1e-5."""

    def __init__(
        self,
        strategy: type[BaseEngine],
        folder: str | Path,
        common_fields: Mapping[str, Any] | None = None,
        sizes: Mapping[str, Any] = MODELS["qwen3_moe"],
    ):
        super().__init__(strategy, folder, common_fields=common_fields)
        self.sizes = dict(sizes)

    @property
    def tolerances(self) -> Tolerances:
        return Tolerances(outputs=1e-5, gradients=1e-5)

    @cached_property
    def model_folder(self) -> Path:
        folder = self.folder / "model"

        def make_model() -> None:
            make_tiny_tokenizer(folder)
            make_tiny_model(folder, **{**TINY, **self.sizes})

        self.on_rank_zero(make_model)
        return folder


def load_oracle(folder: Path) -> Any:
    """Load a model with `transformers`, in float32, with eager attention and eager experts."""
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()


def train_oracle(
    folder: Path, batch: DataProto, steps: int, lr: float, eps: float, grad_clip: float
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return (losses, gradient norms before clipping, final weights) of AdamW steps on one row at a time."""
    model = load_oracle(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=eps, weight_decay=0.01)
    losses, norms = [], []
    for _ in range(steps):
        loss, norm, _ = oracle_step(model, batch, "causal_lm")
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        losses.append(loss)
        norms.append(norm)
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


# -- replay ---------------------------------------------------------------------------------------


def random_experts(batch: DataProto, sizes: dict[str, Any]) -> Ragged:
    """Return random distinct experts (layers, top-k) for all tokens but the last of each row."""
    random = torch.Generator().manual_seed(5)
    ids = batch.ragged("input_ids")
    count, top_k = sizes.get("num_experts") or sizes["num_local_experts"], sizes["num_experts_per_tok"]
    layers = sizes.get("layers", 2) - len(sizes.get("mlp_only_layers", ()))
    scores = torch.rand(len(ids.values), layers, count, generator=random)
    experts = scores.argsort(dim=-1)[..., :top_k].to(torch.uint8)
    experts[ids.offsets[1:] - 1] = 255
    return ids.like(experts)


def _perturb_routers(parameters: Any) -> None:
    """Change the router weights, in a way that depends only on their shapes."""
    random = torch.Generator().manual_seed(9)
    for name, parameter in sorted(parameters):
        if name.endswith("gate.weight"):
            parameter.data += torch.randn(parameter.shape, generator=random)


def _plain_experts(block: Any, hidden: Tensor, experts: Tensor) -> Tensor:
    """Compute a layer of experts token by token, from the definitions."""
    rows = []
    for token, chosen in zip(hidden, experts.tolist(), strict=True):
        probabilities = torch.softmax(block.gate.weight @ token, dim=0)
        weights = torch.stack([probabilities[expert] for expert in chosen])
        if getattr(block.gate, "norm_topk_prob", True):
            weights = weights / weights.sum()
        outputs = []
        for expert in chosen:
            gate, up = (block.experts.gate_up_proj[expert] @ token).chunk(2)
            outputs.append(block.experts.down_proj[expert] @ (nn.functional.silu(gate) * up))
        rows.append((weights[:, None] * torch.stack(outputs)).sum(0))
    return torch.stack(rows)


def replay_oracle(harness: MoEHarness, batch: DataProto) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the log-probs of each row, and the gradients of their mean over counted tokens."""
    model = load_oracle(harness.model_folder)
    _perturb_routers(model.named_parameters())
    blocks = [module for module in model.modules() if type(module).__name__.endswith("SparseMoeBlock")]
    current: list[Tensor] = []
    for index, block in enumerate(blocks):
        block.forward = lambda hidden, i=index, b=block: _plain_experts(b, hidden[0], current[0][:, i])[None]
    total, rows = torch.zeros(()), []
    for row in range(len(batch)):
        sample = batch.reorder([row])
        ids, mask = sample["input_ids"].values, sample["loss_mask"].values
        experts = sample["routed_experts"].values.long()
        experts[-1] = torch.arange(experts.shape[-1])  # its output predicts no token
        current[:] = [experts]
        log_p = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        values = torch.cat([torch.zeros(1), log_p.gather(1, ids[1:, None])[:, 0]]) * mask
        rows.append(values.detach())
        total = total + values.sum()
    (total / batch["loss_mask"].values.sum()).backward()
    return rows, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def _mean_log_prob(data: DataProto, outputs: Any, ctx: StepContext) -> tuple[Tensor, StepContext]:
    return (outputs["log_probs"].values * data["loss_mask"].values).sum() / ctx["num_tokens"], ctx


def replay_step(strategy: str, folder: str, sizes: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the predictions and the gradients of a step that replays `random_experts`."""
    harness = MoEHarness(engine_class(strategy), folder, fields, sizes)
    model = load_oracle(harness.model_folder)
    _perturb_routers(model.named_parameters())
    perturbed = harness.folder / "perturbed"
    harness.on_rank_zero(lambda: model.save_pretrained(perturbed))
    config = harness.config()
    engine = harness.engine_class(
        config.model_copy(update={"model": config.model.model_copy(update={"path": str(perturbed)})})
    )
    engine.init_model()
    engine.set_loss_fn(_mean_log_prob)
    batch = harness.shared_prompt_batch
    batch = batch.with_columns(routed_experts=random_experts(batch, sizes))
    ctx = StepContext(routing="replay")
    predictions = harness.infer(engine, ctx, batch)
    return {"predictions": predictions, "gradients": harness.step(engine, batch, ctx).gradients}
