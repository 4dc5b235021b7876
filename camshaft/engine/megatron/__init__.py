"""Engine that trains GPT models of megatron-core.

engine.py          `MegatronEngine`: ranks, gradients over ranks, weights, checkpoints (strategy `megatron`)
groups.py          process groups of a layout
architecture.py    converts the config of a transformers model, and checks that it is supported
layers.py          attention over packed rows, and RMSNorm
model.py           `MegatronModel`: GPT stages and the output head, called on packed rows
data_parallel.py   sums gradients over ranks and updates the weights; the distributed optimizer
pipeline.py        runs micro-batches through pipeline stages
weights.py         converts parameters to the weights of the transformers model, and back
state.py           weights and optimizer state as a checkpoint stores them
cpu.py             runs Megatron on a CPU, for tests
"""

from camshaft.engine.megatron.engine import MegatronEngine

__all__ = ["MegatronEngine"]
