"""What one rollout engine needs to know, free of roles."""

from typing import Any, Literal

from pydantic import Field

from camshaft.config.engine import Frozen, LoRAConfig


class RolloutEngineConfig(Frozen):
    """Model, memory and place of one generator."""

    model_path: str
    """Folder with config.json and tokenizer; weights come through `load_weights`."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    device: str = "cpu"
    max_model_len: int = Field(default=1024, ge=2)
    """Prompt plus response, at most."""
    max_num_seqs: int = Field(default=1024, ge=1)
    """Rows decoded together, at most."""
    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Prompt tokens computed together, at most (one longer prompt goes alone)."""
    free_cache_engine: bool = True
    """Free the memory of keys and values in `sleep()`."""
    enforce_eager: bool = True
    """Without CUDA graphs and compilation; for vllm, sglang, and torch on a GPU."""
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that are one generator; this and the next three are for vllm and sglang."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Share of the device's memory for weights, keys and values."""
    load_format: str = "dummy"
    """`dummy...`: start without reading weights; anything else reads those of the folder first."""
    enable_prefix_caching: bool = True
    """Compute equal beginnings of prompts once."""
    lora: LoRAConfig | None = None
    """An adapter that comes by itself, beside base weights that came before; None: weights come whole."""
    update_weights_bucket_megabytes: int = Field(default=512, ge=1)
    """Weights for another process go in buckets of this size."""
    seed: int = 0
    trust_remote_code: bool = False
    external_lib: str | None = None
    override_config: dict[str, Any] = Field(default_factory=dict)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """For generators that are libraries of their own (vllm, sglang); 'torch' and 'hf' take none."""
