"""Fast decode steps on a GPU.

- `graphs`: CUDA graphs of decode steps
- `fused_forward`: the model's forward on one token per row with fused operators
- `kernels`: Triton kernels for attention over the KV cache
- `fused_kernels`: Triton kernels for norms and gated activations
- `sampling`: Triton kernels that sample the next tokens
"""
