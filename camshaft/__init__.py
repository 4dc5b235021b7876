"""camshaft: reinforcement-learning post-training of language models on one training-engine interface.

Importing the package imports nothing else; import from its subpackages:

    from camshaft.engine import EngineConfig, build_engine
    from camshaft.rollout import SamplingParams, build_rollout
    from camshaft.dataproto import DataProto, Ragged
"""

__version__ = "0.1.0"
