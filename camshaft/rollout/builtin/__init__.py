"""The built-in generator, which runs the transformers model itself with continuous batching.

- `rollout`: `TorchRollout`, which is registered as `torch`
- `scheduler`: continuous batching of the rows of one call
- `routed_experts`: expert choices of a mixture of experts
- `kv_cache`: KV cache of unfinished rows
- `steps`, `extend`: model calls on the KV cache, and attention over it
- `length_classes`: rows with similar lengths, whose attention is computed together
- `kept_rows`: rows that are kept between calls
- `decode_trace`: traces a decode step and verifies a fast forward
- `tracer`: traces a forward into an operator graph
- `graph_nodes`: matches and replaces nodes of operator graphs
- `cpu/`: traced forward and packed weights for decode steps on a CPU
- `cuda/`: CUDA graphs and Triton kernels for decode steps on a GPU
"""
