"""The built-in generator: continuous batching with the transformers model itself.

- `rollout`: `TorchRollout`, the rollout called `torch`
- `scheduler`: continuous batching of one call
- `kv_cache`: keys and values of unfinished rows, and attention over them
- `cpu/`: traced forward and packed weights for decode steps on a CPU
- `cuda/`: CUDA graphs and Triton kernels for decode steps
"""
