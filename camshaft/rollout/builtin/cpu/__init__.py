"""Decode steps on a CPU in float32.

- `traced_decoder`: `Decoder`, which runs a traced forward or the model's own
- `tracer`: records a forward as an operator graph
- `graph_fusions`: fuses operators of such a graph
- `linears`: packed copies of weights
"""
