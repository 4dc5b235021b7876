"""Which keys of a generator the generators that are built in read, where not all of them do.

    unread_by("torch")         # ("enable_prefix_caching", "load_format", ...)
    unread_by("my.mod:Mine")   # (): one of your own may read any

Used by `loader.py`, which tells who typed such a key, and by `camshaft generate`, which does not compare them.
"""

_LIBRARIES = ("process", "server", "sglang", "vllm")
"""vLLM and SGLang, or what hands keys on to them."""
READERS = {
    "tensor_model_parallel_size": _LIBRARIES,
    "gpu_memory_utilization": _LIBRARIES,
    "enforce_eager": ("process", "server", "sglang", "torch", "vllm"),
    "load_format": _LIBRARIES,
    "enable_prefix_caching": _LIBRARIES,
    "update_weights_bucket_megabytes": ("process", "server", "sglang"),
}
"""Key of the rollout -> who reads it."""
BUILT_IN = ("hf", "process", "server", "sglang", "torch", "vllm")
"""Names of the generators here. The registry is above this package; a test holds these to it."""


def unread_by(name: str) -> tuple[str, ...]:
    """The keys that change nothing for the generator of this name."""
    return tuple(key for key, readers in READERS.items() if name in BUILT_IN and name not in readers)
