"""camshaft: reinforcement-learning post-training of language models on one training-engine interface.

Importing the package imports no other module of it; import from its subpackages:

    from camshaft.engine import EngineConfig, build_engine
    from camshaft.rollout import SamplingParams, build_rollout
    from camshaft.dataproto import DataProto, Ragged
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m camshaft` puts the working directory first on the import path. There, a file such as yaml.py would be
    # imported instead of the installed package.
    sys.path.append(sys.path.pop(0))

__version__ = "0.1.0"
