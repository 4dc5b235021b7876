"""The host never waits for an accelerator inside a micro-batch, so it can queue the next one early.

Tensors without values replace an accelerator (`support/host_waits.py`) and take the code path of CUDA tensors: the
variable-length flash kernel, half-precision products with float32 results, copies of pinned memory.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.host_waits import DEVICE, HostWaits, accelerated, inside
from support.ppo_runs import ppo_config

from camshaft.config import Topology
from camshaft.dataproto import DataProto, Ragged
from camshaft.engine.micro_batches import MicroBatches
from camshaft.engine.torch_engine import TorchEngine
from camshaft.roles import ActorWorker, CriticWorker

ROWS = 8
PROMPTS, RESPONSES = [3, 5, 2, 4, 4, 1, 6, 2], [4, 6, 1, 3, 3, 7, 2, 5]

ACTOR = "actor_rollout_ref.actor"
CORRECTION = "algorithm.rollout_correction"
LOSSES: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "entropy": {f"{ACTOR}.entropy_coeff": 0.01},
    "kl": {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    "gspo": {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
    **{name: {f"{ACTOR}.policy_loss.loss_mode": name} for name in ("geo_mean", "cispo", "sapo", "dppo_tv", "dppo_kl")},
    "gpg": {f"{ACTOR}.policy_loss.loss_mode": "gpg", f"{ACTOR}.loss_agg_mode": "token-sum"},
    "dro": {f"{ACTOR}.policy_loss.loss_mode": "dro", f"{ACTOR}.policy_loss.dro_beta": 0.1},
    "clip_cov": {f"{ACTOR}.policy_loss.loss_mode": "clip_cov"},
    "kl_cov": {f"{ACTOR}.policy_loss.loss_mode": "kl_cov"},
    "high entropy": {f"{ACTOR}.policy_loss.top_entropy_quantile": 0.2},
    "bypass": {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.rollout_rs": "[token_k1,seq_mean_k3,seq_max_k2]",
        f"{CORRECTION}.rollout_rs_threshold": "[2.0,0.1,0.1]",
    },
    "bypass reinforce": {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.loss_type": "reinforce",
        f"{CORRECTION}.rollout_is": "sequence",
        f"{CORRECTION}.rollout_is_threshold": "0.5-2.0",
    },
    "bypass normalized": {
        f"{CORRECTION}.bypass_mode": True,
        f"{CORRECTION}.loss_type": "reinforce",
        f"{CORRECTION}.rollout_is": "token",
        f"{CORRECTION}.rollout_is_batch_normalize": True,
    },
    "checkpointing": {"actor_rollout_ref.model.enable_gradient_checkpointing": True},
    "temperature": {"actor_rollout_ref.rollout.temperature": 0.7},
    "tokens": {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 24},
    "weights": {"algorithm.rollout_correction.rollout_is": "token"},
}


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with accelerated(monkeypatch) as device:
        yield device


def batch_of() -> DataProto:
    def numbers(lengths: list[int]) -> Ragged:
        return Ragged.from_rows([torch.arange(3, 3 + n) for n in lengths])

    responses = numbers(RESPONSES)
    named = ["old_log_probs", "advantages", "ref_log_prob", "rollout_is_weights", "values", "returns"]
    columns = {name: responses.map(torch.Tensor.float) for name in named}
    mask = responses.map(lambda ids: torch.ones_like(ids, dtype=torch.bool))
    columns |= dict.fromkeys(("response_mask", "selected_tokens", "high_entropy"), mask)
    means = {"rollout_is_mean": torch.ones(ROWS)}
    return DataProto.from_dict({"prompts": numbers(PROMPTS), "responses": responses, **columns, **means})


def watch_micro_batches(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], HostWaits]:
    """Record the waits inside micro-batches; return (the number of each finished micro-batch, all waits)."""
    numbers, finish = list[int](), MicroBatches.finish

    def watched(micro_batches: MicroBatches, index: int, outputs: Any) -> Any:
        numbers.append(index)
        return finish(micro_batches, index, outputs)

    monkeypatch.setattr(MicroBatches, "finish", watched)
    return numbers, inside(monkeypatch, TorchEngine, "run_micro_batches")[1]


def actor_of(home: Path, more: dict[str, Any], micro_batch: int = 2, half: bool = True) -> ActorWorker:
    settings: dict[str, Any] = {
        f"{ACTOR}.ppo_mini_batch_size": ROWS,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": micro_batch,
        "data.train_batch_size": ROWS,
    }
    if half:
        settings[f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"] = "bfloat16"
    actor = ActorWorker(ppo_config(home, settings | more), Topology(), total_steps=5)
    actor.init_model()
    return actor


FAST = {"vanilla-bfloat16", "vanilla-float32", "kl-bfloat16", "checkpointing-bfloat16", "tokens-bfloat16"}
"""Cases of `make test`; the others differ from them in a few operators."""


def actor_cases() -> Iterator[Any]:
    """Return all losses in both dtypes; in float32, other kernels run but the same losses."""
    for loss in LOSSES:
        for half in (True, False):
            name = f"{loss}-{'bfloat16' if half else 'float32'}"
            yield pytest.param(loss, half, id=name, marks=[pytest.mark.slow] * (name not in FAST))


@pytest.mark.parametrize(("loss", "half"), list(actor_cases()))
def test_no_micro_batch_of_an_actor_waits(
    home: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, loss: str, half: bool
) -> None:
    actor = actor_of(home, LOSSES[loss], half=half)
    numbers, waits = watch_micro_batches(monkeypatch)
    with HostWaits():  # answers waits outside of micro-batches
        actor.update_actor(batch_of())
    assert not waits.operations, waits.operations
    assert len(numbers) >= 3
    kernels = {"aten::_flash_attention_forward.default", "aten::_flash_attention_backward.default", "aten::mm.dtype"}
    assert kernels <= waits.operators if half else not kernels & waits.operators


def test_no_micro_batch_of_a_critic_waits(home: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": ROWS, "data.train_batch_size": ROWS}
    critic = CriticWorker(ppo_config(home, settings), Topology(), total_steps=5)
    critic.init_model()
    numbers, waits = watch_micro_batches(monkeypatch)
    with HostWaits():
        critic.update_critic(batch_of())
    assert not waits.operations, waits.operations
    assert len(numbers) == ROWS // 2


def test_no_micro_batch_without_gradients_waits(home: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = actor_of(home, {"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2})
    numbers, waits = watch_micro_batches(monkeypatch)
    with HostWaits():
        actor.compute_log_prob(batch_of())
    assert not waits.operations, waits.operations
    assert len(numbers) == ROWS // 2


def test_synchronizations_do_not_depend_on_micro_batches(home: Path, accelerator: str) -> None:
    counted: dict[int, Counter[str]] = {}
    for size in (ROWS, 2, 1):
        actor = actor_of(home, {}, micro_batch=size)
        with HostWaits() as waits:
            actor.update_actor(batch_of())
        counted[size] = Counter(waits.operations)
    assert counted[ROWS] == counted[2] == counted[1]
    # The counts that losses are divided by, the norm, and the loss with its metrics.
    files = sorted(wait.partition(" at ")[2].partition(":")[0] for wait in counted[1].elements())
    assert files == ["engine/base.py", "engine/optim.py", "engine/torch_engine.py"], counted[1]


# -- tests of the detector ------------------------------------------------------------------------


def mask_of(x: torch.Tensor) -> torch.Tensor:
    return x > 0


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "truth": lambda x: bool(x.sum() > 0),
    "list": lambda x: x.tolist(),
    "to the host": lambda x: x.cpu(),
    "into the host": lambda x: torch.empty(4).copy_(x),
    "not asked to wait, into pageable memory that is read": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "one argument of where": lambda x: torch.where(mask_of(x)),
    "a mask as an index": lambda x: x[mask_of(x)],
    "a mask that is assigned to": lambda x: x.index_put_((mask_of(x),), x[:1]),
    "masked_select": lambda x: x.masked_select(mask_of(x)),
    "unique": lambda x: x.unique(),
    "repeats of unknown sum": lambda x: x.repeat_interleave(x.long()),
    "sums of lengths that are checked": lambda x: torch.segment_reduce(x, "sum", lengths=x.long()),
    "an index of the host": lambda x: x[torch.tensor([0, 1])],
    "equality": lambda x: torch.equal(x, x),
    "numbers of Python": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new numbers of Python": lambda x: x.new_tensor([1.0, 2.0]),
    "pageable memory": lambda x: torch.ones(4).to(x.device),
    "pageable memory, asked not to wait": lambda x: torch.ones(4).to(x.device, non_blocking=True),
    "pinned memory, waiting": lambda x: torch.ones(4).pin_memory().to(x.device),
    "pageable memory copied into": lambda x: x.copy_(torch.ones(4), non_blocking=True),
}
QUIET: dict[str, Callable[[torch.Tensor], Any]] = {
    "pinned memory": lambda x: torch.ones(4).pin_memory().to(x.device, non_blocking=True),
    "a part of pinned memory": lambda x: torch.ones(4).pin_memory()[1:].to(x.device, non_blocking=True),
    "an index of the device": lambda x: x[x.long()],
    "repeats of known sum": lambda x: x.repeat_interleave(x.long(), output_size=4),
    "a number": lambda x: torch.where(mask_of(x), x, 0) + 1,
    "the host's own numbers": lambda x: float(torch.ones(4).sum()) + len(torch.ones(4).nonzero()),
    "an empty tensor": lambda x: torch.ones(0).to(x.device),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_detected(accelerator: str, name: str) -> None:
    x = torch.empty(4, device=accelerator)
    # There are no values to continue with.
    with HostWaits() as waits, contextlib.suppress(NotImplementedError, RuntimeError):
        WAITS[name](x)
    assert waits.operations, name


@pytest.mark.parametrize("name", QUIET)
def test_calls_without_synchronization_pass(accelerator: str, name: str) -> None:
    x = torch.empty(4, device=accelerator)
    with HostWaits() as waits:
        QUIET[name](x)
    assert not waits.operations, waits.operations


PLANTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda loss: loss.detach().item(),
    "copy": lambda loss: loss.detach().to("cpu"),
    "pageable": lambda loss: torch.ones(3).to(loss.device),
    "backward": lambda loss: loss.register_hook(lambda gradient: gradient * float(gradient)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("item", "backward"))) for n in PLANTED]
)
def test_injected_loss_waits_are_detected(
    home: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    actor = actor_of(home, {})
    original = actor.policy_loss

    def planted(*args: Any, **options: Any) -> Any:
        loss, metrics = original(*args, **options)
        PLANTED[name](loss)
        return loss, metrics

    monkeypatch.setattr(actor, "policy_loss", planted)
    numbers, waits = watch_micro_batches(monkeypatch)
    with HostWaits():
        actor.update_actor(batch_of())
    assert len(waits.operations) == len(numbers) == ROWS // 2, waits.operations


def test_injected_model_waits_are_detected(home: Path, accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = actor_of(home, {})
    norm = actor.engine.module.hf.base_model.norm  # pyright: ignore[reportAttributeAccessIssue]
    norm.register_forward_hook(lambda _module, _inputs, output: float(output[0, 0, 0].detach()) * output)
    numbers, waits = watch_micro_batches(monkeypatch)
    with HostWaits():
        actor.update_actor(batch_of())
    assert len(waits.operations) == len(numbers) == ROWS // 2


def test_tensors_pass_for_those_of_an_accelerator_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    with accelerated(monkeypatch) as device:
        assert torch.empty(1, device=device).is_cuda
    assert not torch.empty(1, device=DEVICE).is_cuda
