"""Triton kernels for GPUs.

linear_logprob.py    kernels for the tiles of the fused output layer
"""
