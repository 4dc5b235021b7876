"""What runs in the processes that SGLang starts; it imports this file by its name, nobody else in the trainer does.

    class Engine(sglang.Engine):
        run_scheduler_process_func = staticmethod(functools.partial(run, report))

    sampling_backend=SAMPLER               # chooses tokens as all generators of this package do
    custom_weight_loader=[BEGIN, LOAD, FINISH]      # weights, and what is told of them over `report`

These are ways that SGLang offers to others. Its own sampler draws a row from what its batch leaves of a common
random state, unless it runs in a mode that a CPU does not have, and tells log-probs before top_k and top_p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # pyright: ignore[reportMissingImports]
from sglang.srt.sampling.custom_logit_processor import (  # pyright: ignore[reportMissingImports]
    CustomLogitProcessor,
)
from torch import Tensor

from camshaft.digest import digest
from camshaft.rollout.sampling import draw, greedy, restrict, uniform

SAMPLER = "pytorch"
"""The name under which tokens are chosen: SGLang takes no other on a CPU, and asks first for what is registered."""
BEGIN, LOAD, FINISH = (f"{__name__}.{name}" for name in ("begin_update", "load_bucket", "finish_update"))

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Parameters that SGLang makes of several weights, one under the other."""


def run(report: Connection, *arguments: Any, **more: Any) -> None:
    """SGLang's scheduler, which holds the model."""
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]

    _state.report = report
    register_sampler()
    run_scheduler_process(*arguments, **more)


# -- tokens ---------------------------------------------------------------------------------------


def register_sampler() -> None:
    register_sampler_backend(SAMPLER, RowSampler)


class RowParams(CustomLogitProcessor):
    """Only requests that name such a class have `custom_params` in the sampler; this one is never called."""

    def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
        return logits


class RowSampler(Sampler):
    """Tokens from a row's own seed, and their log-probs in the distribution sampled from."""

    def __init__(self) -> None:
        super().__init__()
        _state.sampler_is_ours = True

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, top_logprobs_nums: Any,
        token_ids_logprobs: Any, positions: Tensor, **more: Any,
    ) -> Tensor:  # fmt: skip
        rows: list[dict[str, Any]] | None = sampling_info.custom_params
        logits: Tensor = logits_output.next_token_logits
        if rows is None:  # a request of SGLang's own, to see whether it lives
            return logits.argmax(-1)
        if rows[0]["greedy"]:
            tokens, log_probs = greedy(logits)
        else:
            how = {key: rows[0][key] for key in ("temperature", "top_k", "top_p")}  # a call has one for all its rows
            seeds = torch.tensor([row["seed"] for row in rows], device=logits.device)
            # These are the places of the tokens before; the built-in generator counts those of the tokens themselves.
            tokens, log_probs = draw(restrict(logits, **how), uniform(seeds, positions.long() + 1))
        logits_output.next_token_logprobs = log_probs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens.to(torch.int32)


# -- weights --------------------------------------------------------------------------------------


@dataclass
class _State:
    """Of this process; what came and went wrong in the last hand-over."""

    report: Connection | None = None
    sampler_is_ours: bool = False
    came: dict[str, tuple[int, torch.dtype, torch.Size]] = field(default_factory=dict)
    problem: str = ""


_state = _State()


def begin_update(model: Any, named: Sequence[tuple[str, Tensor]]) -> None:
    """Forget the weights, so that one that does not come is seen. Named is one number: of layers with a window."""
    _state.came, _state.problem = {}, ""
    windows = sum(layer.sliding_window_size > -1 for layer in model.modules() if isinstance(layer, RadixAttention))
    if windows < int(named[0][1]):
        _state.problem = (
            f"its {type(model).__name__} does not know that {int(named[0][1])} layers have a sliding window of "
            f"{model.config.sliding_window} tokens; generate with rollout.name=torch or vllm, or with "
            "max_model_len not above that"
        )
    for parameter in _floating(model).values():
        parameter.data.fill_(torch.nan)


def load_bucket(model: Any, named: Sequence[tuple[str, Tensor]]) -> None:
    """One bucket. SGLang ends the process where this raises, so what went wrong is told at the end."""
    _state.came |= {name: (digest(tensor), tensor.dtype, tensor.shape) for name, tensor in named}
    try:
        model.load_weights(named)
    except Exception as error:  # of any model class
        names = ", ".join(name for name, _ in named)
        _state.problem = _state.problem or f"{type(error).__name__}: {error} (among {names})"


def finish_update(model: Any, _named: Sequence[tuple[str, Tensor]]) -> None:
    """Tell what came and what is held."""
    # The largest element is not a number where one is not, and nothing as large as the parameter is made.
    left = [name for name, weight in _floating(model).items() if bool(weight.data.amax().isnan())]
    if left and not _state.problem:
        _state.problem = f"no weight came for {', '.join(left)}, or one that is not a number"
    if not _state.sampler_is_ours:
        _state.problem = "it would choose tokens in its own way, without the seeds of rows"
    assert _state.report is not None
    digests = {name: told for name, (told, *_) in _state.came.items()} | _held(model)
    _state.report.send((digests, _state.problem))


def _floating(model: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.is_floating_point() and weight.numel()}


def _held(model: Any) -> dict[str, int]:
    """Digests of the weights that the model holds as they came, or one under the other in one parameter."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        place, _, leaf = name.rpartition(".")
        parent, _, module = place.rpartition(".")
        parts = FUSED.get(module, (module,))
        names = [f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in parts]
        if not all(part in _state.came for part in names):
            continue
        shapes = [_state.came[part][2] for part in names]
        rows = sum(shape[0] for shape in shapes)
        # A vocabulary is filled up with rows that nobody has; ranks that are one generator hold parts.
        if rows > len(parameter) or (rows < len(parameter) and len(parts) > 1):
            continue
        if any(parameter.shape[1:] != shape[1:] for shape in shapes):
            continue
        pieces = parameter.data[:rows].split([shape[0] for shape in shapes])
        found |= {
            part: digest(piece)
            for part, piece in zip(names, pieces, strict=True)
            if piece.dtype == _state.came[part][1]
        }
    return found
