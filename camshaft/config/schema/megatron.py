"""Options of the Megatron engine, under the names that Megatron-LM uses.

    options = MegatronOptions.from_dict({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2})
    options.ranks_per_row()                  # 4
    list(options.layout_conflicts(6))        # 6 ranks are not divisible by 4

This module imports neither torch nor Megatron.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from camshaft.config.engine import Conflict, EngineModel, EngineOptions, format_division
from camshaft.config.families.conflicts import size_conflicts
from camshaft.config.families.support import rope_limit
from camshaft.config.schema.fsdp import MixedPrecision

MOE_FAMILIES = ("qwen3_moe", "mixtral")
"""Supported model types with a mixture of experts."""


class MegatronOptions(EngineOptions):
    """Options of `MegatronEngine`."""

    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which each weight matrix is split."""
    sequence_parallel: bool = True
    """With tensor parallelism, also split the activations between the matrices over these ranks, by tokens."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Number of pipeline stages. Layers are distributed evenly over the stages that set no number of layers."""
    num_layers_in_first_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers of the first pipeline stage, which also embeds the tokens."""
    num_layers_in_last_pipeline_stage: int | None = Field(default=None, ge=1)
    """Number of layers of the last pipeline stage, which also computes the outputs."""
    virtual_pipeline_model_parallel_size: int | None = Field(default=None, ge=2)
    """Number of stages on each pipeline rank, for the interleaved schedule. null uses one stage and plain 1F1B."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks over which the tokens of a micro-batch, and during attention the heads, are split (Ulysses)."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Number of ranks of a pipeline stage over which the experts of a mixture-of-experts model are split."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Dtype in which the routers of a mixture of experts compute. null computes in the dtype of the layers."""
    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the load-balancing loss of each layer of a mixture of experts, summed over the layers. The config
    key `router_aux_loss_coef` is that of one loss over all layers."""
    moe_z_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the z-loss of each router of a mixture of experts, summed over the layers."""
    use_distributed_optimizer: bool = False
    """Split the optimizer state over the data-parallel ranks."""
    mixed_precision: MixedPrecision = MixedPrecision()
    """With `param_dtype=bfloat16` the model computes in bfloat16 and the optimizer updates float32 master weights.
    Gradients are then accumulated and reduced in float32."""
    param_offload: bool = False
    optimizer_offload: bool = False
    activation_offload: bool = False
    """Offload the activations that are saved for the backward pass to CPU memory."""
    async_save: bool = False
    """Write checkpoints in the background from a copy in CPU memory, while training continues."""

    def ranks_per_row(self) -> int:
        return self.tensor_model_parallel_size * self.context_parallel_size * self.pipeline_model_parallel_size

    def set_stages(self) -> dict[str, int]:
        """Return the options that set the number of layers of a pipeline stage."""
        sizes = {
            "num_layers_in_first_pipeline_stage": self.num_layers_in_first_pipeline_stage,
            "num_layers_in_last_pipeline_stage": self.num_layers_in_last_pipeline_stage,
        }
        return {name: size for name, size in sizes.items() if size is not None}

    def layout_conflicts(self, world_size: int) -> Iterator[Conflict]:
        ranks = self.ranks_per_row()
        if world_size % ranks:
            yield Conflict(
                "tensor_model_parallel_size",
                f"world_size={world_size} is not divisible by tensor_model_parallel_size="
                f"{self.tensor_model_parallel_size} x context_parallel_size={self.context_parallel_size} x "
                f"pipeline_model_parallel_size={self.pipeline_model_parallel_size} = {ranks}: "
                f"{format_division(world_size, ranks)}",
            )

        elif (world_size // self.pipeline_model_parallel_size) % self.expert_model_parallel_size:
            yield Conflict(
                "expert_model_parallel_size",
                f"the {world_size // self.pipeline_model_parallel_size} ranks of a pipeline stage are not divisible by "
                f"expert_model_parallel_size={self.expert_model_parallel_size}",
            )

    def family_conflicts(self, values: Mapping[str, Any], model: EngineModel) -> Iterator[Conflict]:
        for feature in _unsupported_features(values):
            message = f"strategy=megatron does not support {values['model_type']} models with {feature}"
            yield Conflict("", message, ("strategy=fsdp",))
        tensor, experts = self.tensor_model_parallel_size, _num_experts(values)
        sizes = ("num_attention_heads", "num_key_value_heads", *(() if experts else ("intermediate_size",)))
        yield from size_conflicts(values, sizes, "tensor_model_parallel_size", tensor)
        yield from self._expert_conflicts(experts)
        heads, context = values.get("num_attention_heads"), self.context_parallel_size
        if isinstance(heads, int) and heads % tensor == 0 and heads // tensor % context:
            message = f"{heads // tensor} attention heads per rank are not divisible by context_parallel_size={context}"
            yield Conflict("context_parallel_size", message)
        if isinstance(layers := values.get("num_hidden_layers"), int):
            yield from self._stage_conflicts(layers)

    def _expert_conflicts(self, experts: int) -> Iterator[Conflict]:
        size = self.expert_model_parallel_size
        losses = {"moe_aux_loss_coeff": self.moe_aux_loss_coeff, "moe_z_loss_coeff": self.moe_z_loss_coeff}
        for name, coefficient in losses.items():
            if coefficient and not experts:
                yield Conflict(name, f"{name}={coefficient} requires a mixture of experts", (f"{name}=0",))
        if experts and self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            yield Conflict(
                "sequence_parallel",
                "sequence_parallel=false is not supported for a tensor-parallel mixture-of-experts model",
                ("sequence_parallel=true",),
            )
        if size > 1 and (not experts or experts % size):
            message = f"{experts} experts cannot be split over expert_model_parallel_size={size} ranks"
            yield Conflict("expert_model_parallel_size", message, ("expert_model_parallel_size=1",))

    def _stage_conflicts(self, layers: int) -> Iterator[Conflict]:
        """Yield numbers of layers that do not fill the pipeline stages."""
        virtual, set_stages = self.virtual_pipeline_model_parallel_size or 1, self.set_stages()
        stages, rest = self.pipeline_model_parallel_size - len(set_stages), layers - sum(set_stages.values())
        for name, size in set_stages.items():
            if size % virtual:
                yield Conflict(name, f"{name}={size} is not divisible by {virtual} virtual pipeline stages")
        if not set_stages and layers % (stages * virtual):
            message = f"num_hidden_layers={layers} is not divisible by {stages * virtual} pipeline stages"
            yield Conflict("pipeline_model_parallel_size", message)
        elif set_stages and (rest != 0 if stages == 0 else rest < stages * virtual or rest % (stages * virtual)):
            sizes = " and ".join(f"{name}={size}" for name, size in set_stages.items())
            message = f"{sizes} leave {rest} of {layers} layers for {stages * virtual} other pipeline stages"
            yield Conflict(next(iter(set_stages)), message)

    def conflicts(self, model: EngineModel) -> Iterator[Conflict]:
        virtual = self.virtual_pipeline_model_parallel_size
        if virtual is not None and self.pipeline_model_parallel_size == 1:
            yield Conflict(
                "virtual_pipeline_model_parallel_size",
                f"virtual_pipeline_model_parallel_size={virtual} has no effect with pipeline_model_parallel_size=1",
                ("virtual_pipeline_model_parallel_size=null", "pipeline_model_parallel_size=2"),
            )
        for name, layers in self.set_stages().items():
            if self.pipeline_model_parallel_size == 1:
                message = f"{name}={layers} has no effect with pipeline_model_parallel_size=1"
                yield Conflict(name, message, (f"{name}=null", "pipeline_model_parallel_size=2"))
        param_dtype, reduce_dtype = self.mixed_precision.param_dtype, self.mixed_precision.reduce_dtype
        if (reduce_dtype or param_dtype) == "bfloat16":
            yield Conflict(
                "mixed_precision.reduce_dtype",
                f"reduce_dtype={reduce_dtype or 'null'} with param_dtype={param_dtype or 'null'} is not supported by "
                "strategy=megatron, because it accumulates the gradients of micro-batches in the type of the reduction",
                ("mixed_precision.reduce_dtype=float32",),
            )
        if self.param_offload and self.use_distributed_optimizer:
            yield Conflict(
                "param_offload",
                "param_offload is not supported with use_distributed_optimizer, whose buffers of the weights stay on "
                "the device",
                ("param_offload=false", "use_distributed_optimizer=false"),
            )
        if model.enable_gradient_checkpointing and model.gradient_checkpointing_mode == "selective":
            yield Conflict(
                "model.gradient_checkpointing_mode",
                "gradient_checkpointing_mode=selective is not supported by strategy=megatron, which recomputes whole "
                "layers",
                ("model.gradient_checkpointing_mode=full",),
            )


def _num_experts(values: Mapping[str, Any]) -> int:
    """Return the number of experts of each layer; 0 for a dense model."""
    number = values.get("num_local_experts") or values.get("num_experts") or 0
    return number if values.get("model_type") in MOE_FAMILIES else 0


def _unsupported_features(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield config entries that have no counterpart in the Megatron model."""
    if values.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={values['hidden_act']}"
    for key in ("attention_bias", "mlp_bias"):
        if values.get(key):
            yield f"{key}=True"
    if values.get("mlp_only_layers") or values.get("decoder_sparse_step", 1) != 1:
        yield "dense layers in a mixture-of-experts model"
    if values.get("router_jitter_noise"):
        yield f"router_jitter_noise={values['router_jitter_noise']}"
    if values.get("model_type") == "mixtral" and values.get("sliding_window") is not None:
        yield f"sliding_window={values['sliding_window']}"
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        yield "sliding-window attention"
    if (limit := rope_limit(values)) is not None:
        yield f"rope_type={limit.rope_type}, whose angles depend on the sequence length"
