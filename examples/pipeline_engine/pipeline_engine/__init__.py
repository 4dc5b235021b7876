"""A pipeline-parallel training engine for camshaft.

camshaft check-engine pipeline --ranks 2 --option pipeline_size=2

engine.py    `PipelineEngine`: options, ranks, gradients over ranks, weights
stage.py     `PipelineStage`: the layers of one rank, and the exchange of activations and gradients
"""

from pipeline_engine.engine import PipelineEngine, PipelineOptions

__all__ = ["PipelineEngine", "PipelineOptions"]
