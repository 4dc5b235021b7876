"""The sharded engines' own section of `EngineConfig.options`, and what of it does not go together.

options = FSDPOptions.of({"fsdp_size": 2, "mixed_precision": {"param_dtype": "bfloat16"}})
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from camshaft.config.engine import Frozen
from camshaft.errors import EngineError


class MixedPrecision(Frozen):
    """Numbers of the computation; the weights that the optimizer moves stay in `EngineConfig.dtype`."""

    param_dtype: Literal["float32", "bfloat16"] | None = None
    """Of weights and activations in forward and backward; None: that of the weights."""
    reduce_dtype: Literal["float32", "bfloat16"] | None = "float32"
    """Of gradients while they are summed over ranks; None: `param_dtype`."""


class WrapPolicy(Frozen):
    """Which modules are gathered and let go of as one unit; by default the decoder layers."""

    transformer_layer_cls_to_wrap: str | None = None
    """Class names with commas between."""
    min_num_params: int = Field(default=0, ge=0)
    """Modules with at least so many parameters instead; 0: by class."""


class FSDPOptions(Frozen):
    """Layout, memory and speed of one sharded engine."""

    wrap_policy: WrapPolicy = WrapPolicy()
    mixed_precision: MixedPrecision = MixedPrecision()
    fsdp_size: int = Field(default=-1, ge=-1)
    """Ranks that share one copy of the weights; -1, or more than there are: all. Fewer: HybridShard, a copy a group."""
    reshard_after_forward: bool = True
    """Let go of gathered weights after each unit's forward: memory for one more gathering on the way back."""
    forward_prefetch: bool = False
    """Gather the next unit while this one computes, also where the host would be too late to ask for it."""
    ulysses_sequence_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of one micro-batch."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each matrix product."""
    param_offload: bool = False
    """Parameters wait in host memory between `train_mode` / `eval_mode` contexts."""
    grad_offload: bool = False
    """So do gradients that wait for an optimizer step."""
    optimizer_offload: bool = False
    """So does the optimizer's state."""
    offload_policy: bool = False
    """Parameters, gradients and optimizer live in host memory; each unit is brought to the device for its use."""
    activation_offload: bool = False
    """Activations kept for the backward pass wait in host memory."""
    use_torch_compile: bool = False
    """Compile each unit with torch.compile."""
    async_save: bool = False
    """Write checkpoints in the background, from a copy in host memory."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> FSDPOptions:
        """Checked: keys are known, values fit, and no two of them exclude each other."""
        try:
            found = cls.model_validate(options)
        except ValidationError as error:
            raise EngineError("\n".join(_told(problem) for problem in error.errors())) from error
        if found.offload_policy and (found.param_offload or found.grad_offload or found.optimizer_offload):
            raise EngineError(
                "offload_policy keeps everything in host memory at all times; param_offload, grad_offload and "
                "optimizer_offload move it between phases. Choose one of the two"
            )
        if found.ulysses_sequence_parallel_size > 1 and found.tensor_parallel_size > 1:
            raise EngineError(
                f"ulysses_sequence_parallel_size={found.ulysses_sequence_parallel_size} and "
                f"tensor_parallel_size={found.tensor_parallel_size}: both share out the attention heads, and together "
                "they are not supported. Set one of them to 1"
            )
        if found.use_torch_compile and found.tensor_parallel_size > 1:
            raise EngineError(
                f"use_torch_compile with tensor_parallel_size={found.tensor_parallel_size}: torch does not compile "
                "the backward pass of matrices that are cut over ranks. Set one of them back"
            )
        return found

    def beyond_fsdp1(self, lora: bool) -> str | None:
        """What strategy=fsdp1, the older wrapper, would have to refuse of these; None if nothing."""
        asked = {
            "tensor_parallel_size": self.tensor_parallel_size > 1,
            "param_offload": self.param_offload,
            "grad_offload": self.grad_offload,
            "offload_policy": self.offload_policy,
            "use_torch_compile": self.use_torch_compile,
            "lora": lora,
        }
        wrong = [name for name, wanted in asked.items() if wanted]
        return f"strategy=fsdp1 has no {', '.join(wrong)}: type strategy=fsdp2 (fsdp is the same)" if wrong else None


def _told(problem: Any) -> str:
    """One line of pydantic's finding: key, value, and for an unknown key the nearest one."""
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"options.{key}={problem['input']!r}: {problem['msg']}"
    known = [*FSDPOptions.model_fields, *MixedPrecision.model_fields, *WrapPolicy.model_fields]
    close = difflib.get_close_matches(str(problem["loc"][-1]), known, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(FSDPOptions.model_fields)}"
    return f"options.{key}: the fsdp engine has no such option; {hint}"
