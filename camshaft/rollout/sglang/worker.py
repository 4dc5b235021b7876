"""Sampling and weight loading inside the processes that SGLang starts. SGLang imports this module by name.

    class Engine(sglang.Engine):
        run_scheduler_process_func = staticmethod(functools.partial(run, report, writing))

    sampling_backend=SAMPLER                        # samples like all other rollouts of this package
    custom_weight_loader=[BEGIN, LOAD, FINISH]      # loads weights and sends checksums over `report`

These are public extension points of SGLang. SGLang's own sampler is unsuitable: it samples all rows of a batch with one
random state, except in a mode that CPUs do not support, and it returns log-probs before top_k and top_p are applied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention  # pyright: ignore[reportMissingImports]
from sglang.srt.layers.sampler import Sampler, register_sampler_backend  # pyright: ignore[reportMissingImports]
from sglang.srt.sampling.custom_logit_processor import (  # pyright: ignore[reportMissingImports]
    CustomLogitProcessor,
)
from torch import Tensor

from camshaft.digest import digest
from camshaft.rollout.sampling import draw, restrict, sample_greedy, uniform_numbers

SAMPLER = "pytorch"
"""Name of the sampling backend. SGLang accepts only this name on a CPU and prefers a backend registered under it."""
BEGIN, LOAD, FINISH = (f"{__name__}.{name}" for name in ("begin_update", "load_bucket", "finish_update"))

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Map from each fused parameter of SGLang to the weights that it concatenates along the first dimension."""


def run(report: Connection, writing: Lock, *arguments: Any, **kwargs: Any) -> None:
    """Run SGLang's scheduler process, which holds the model. All processes write to `report` under the lock."""
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]

    _state.report, _state.writing = report, writing
    register_sampler()
    run_scheduler_process(*arguments, **kwargs)


def register_sampler() -> None:
    """Register `RowSampler` as SGLang's sampling backend in this process."""
    register_sampler_backend(SAMPLER, RowSampler)


class RowParams(CustomLogitProcessor):
    """Logits processor that makes SGLang pass `custom_params` to the sampler. SGLang never calls it."""

    def __call__(self, logits: Tensor, custom_param_list: Any = None) -> Tensor:
        return logits


class RowSampler(Sampler):
    """Sampler that samples each row with its own seed and returns log-probs of the sampled distribution."""

    def __init__(self) -> None:
        super().__init__()
        _state.sampler_installed = True

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, top_logprobs_nums: Any,
        token_ids_logprobs: Any, positions: Tensor, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        rows: list[dict[str, Any]] | None = sampling_info.custom_params
        logits: Tensor = logits_output.next_token_logits
        if rows is None:  # SGLang runs a health check
            return logits.argmax(-1)
        if rows[0]["greedy"]:
            tokens, log_probs = sample_greedy(logits)
        else:
            settings = {key: rows[0][key] for key in ("temperature", "top_k", "top_p")}  # equal for all rows of a call
            seeds = torch.tensor([row["seed"] for row in rows], device=logits.device)
            # `positions` belong to the input tokens, but uniform numbers depend on the position of the sampled token.
            tokens, log_probs = draw(restrict(logits, **settings), uniform_numbers(seeds, positions.long() + 1))
        logits_output.next_token_logprobs = log_probs
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens.to(torch.int32)


@dataclass
class _State:
    """State of this process: the received weights and the first problem of the current weight update."""

    report: Connection | None = None
    writing: Lock | None = None
    sampler_installed: bool = False
    received: dict[str, tuple[int, torch.dtype, torch.Size]] = field(default_factory=dict)
    problem: str = ""


_state = _State()


def begin_update(model: Any, named: Sequence[tuple[str, Tensor]]) -> None:
    """Fill all parameters with NaN, so that `finish_update` detects missing weights.

    `named` contains a single number: how many layers must have a sliding window.
    """
    _state.received, _state.problem = {}, ""
    windows = sum(layer.sliding_window_size > -1 for layer in model.modules() if isinstance(layer, RadixAttention))
    if windows < int(named[0][1]):
        _state.problem = (
            f"SGLang's {type(model).__name__} ignores that {int(named[0][1])} layers have a sliding window of "
            f"{model.config.sliding_window} tokens; set rollout.name=torch or rollout.name=vllm, or set max_model_len "
            f"to at most {model.config.sliding_window}"
        )
    for parameter in _floating_parameters(model).values():
        parameter.data.fill_(torch.nan)


def load_bucket(model: Any, named: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket. `finish_update` reports errors, because an exception would end SGLang's process."""
    _state.received |= {name: (digest(tensor), tensor.dtype, tensor.shape) for name, tensor in named}
    try:
        model.load_weights(named)
    except Exception as error:  # from any model class
        names = ", ".join(name for name, _ in named)
        _state.problem = _state.problem or f"{type(error).__name__}: {error} (while loading {names})"


def finish_update(model: Any, _named: Sequence[tuple[str, Tensor]]) -> None:
    """Send the checksums and the first problem to the engine."""
    # The maximum is NaN if any element is NaN. Computing it needs no temporary tensor of the parameter's size.
    missing_names = [name for name, weight in _floating_parameters(model).items() if bool(weight.data.amax().isnan())]
    if missing_names and not _state.problem:
        _state.problem = f"missing or NaN weights: {', '.join(missing_names)}"
    if not _state.sampler_installed:
        _state.problem = "SGLang did not install camshaft's sampler, so the seeds of rows would have no effect"
    assert _state.report is not None
    assert _state.writing is not None
    digests = {name: value for name, (value, *_) in _state.received.items()} | _stored_digests(model)
    with _state.writing:
        _state.report.send((digests, _state.problem))


def _floating_parameters(model: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.is_floating_point() and weight.numel()}


def _stored_digests(model: Any) -> dict[str, int]:
    """Return the checksums of the weights that the model stores unchanged or concatenates into a fused parameter."""
    digests: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        parent, _, module = path.rpartition(".")
        parts = FUSED.get(module, (module,))
        names = [f"{parent}.{part}.{leaf}" if parent else f"{part}.{leaf}" for part in parts]
        if not all(part in _state.received for part in names):
            continue
        shapes = [_state.received[part][2] for part in names]
        rows = sum(shape[0] for shape in shapes)
        # SGLang pads the vocabulary with extra rows. With tensor parallelism, each process holds a shard.
        if rows > len(parameter) or (rows < len(parameter) and len(parts) > 1):
            continue
        if any(parameter.shape[1:] != shape[1:] for shape in shapes):
            continue
        pieces = parameter.data[:rows].split([shape[0] for shape in shapes])
        digests |= {
            part: digest(piece)
            for part, piece in zip(names, pieces, strict=True)
            if piece.dtype == _state.received[part][1]
        }
    return digests
