"""Decode steps on a GPU.

- `graphs`: CUDA graphs of decode steps
- `kernels`: attention over the KV cache in Triton
"""
