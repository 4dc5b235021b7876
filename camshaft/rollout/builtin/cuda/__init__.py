"""CUDA graphs and Triton kernels for decode steps."""
