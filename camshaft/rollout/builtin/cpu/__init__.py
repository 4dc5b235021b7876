"""Fast decode steps in float32 on a CPU.

- `traced_decoder`: `Decoder`, which runs a traced forward or the model's own forward
- `graph_fusions`: fuses operators of an operator graph
- `linears`: linear layers with packed copies of their weights
"""
