"""Engine that trains model definitions of torchtitan (strategy `torchtitan`).

engine.py    `TorchtitanEngine`
mesh.py      ranks of pipeline, data, sequence and tensor parallelism, and the device meshes of torchtitan
families.py  converts a config of transformers to a config of torchtitan, and names weights as transformers does
layers.py    layers that replace those of torchtitan: packed attention, rotary embedding, output heads
model.py     `TitanModel`: calls a decoder of torchtitan on packed rows
pipeline.py  runs micro-batches through pipeline stages
weights.py   builds and parallelizes the model, and loads the weights of a model folder into it
"""

from camshaft.engine.torchtitan.engine import TorchtitanEngine

__all__ = ["TorchtitanEngine"]
