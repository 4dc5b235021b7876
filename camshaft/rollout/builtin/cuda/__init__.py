"""Fast decode steps on a GPU.

- `graphs`: CUDA graphs of decode steps
- `kernels`: Triton kernels for attention over the KV cache
"""
