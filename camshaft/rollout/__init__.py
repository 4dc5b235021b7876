"""Rollout engines: one interface, one file per generator.

    from camshaft.rollout import SamplingParams, build_rollout

`torch` is the built-in generator (`torch_rollout.py`: continuous batching on the training weights), `hf` is
`transformers.generate`, the plain one. Both run a model whose weights are somebody else's (`borrowed.py`). Keys and
values of the built-in one are in `slots.py`, its steps in `flat.py` and, on a GPU, `recorded.py`, copies of weights in
`packed.py`.
`process` is any of them in a process of its own. vLLM (`vllm_rollout`), its server (`server_rollout`) and SGLang
(`sglang_rollout`) are libraries of their own and share `external.py`. What goes over is checked by `arrivals.py` and
`digest.py`, and between processes moved by `transport.py`. `sampling.py` chooses tokens. `contract.py` proves any
generator right, on the bench of `harness.py`. Roles import from here and never from a generator.
"""

from camshaft.config import backends
from camshaft.config.backends import targets
from camshaft.config.rollout import RolloutCapabilities, RolloutEngineConfig, RolloutOptions
from camshaft.plugins import load
from camshaft.rollout.base import BaseRollout, Generation, SamplingParams

__all__ = [
    "ROLLOUTS",
    "BaseRollout",
    "Generation",
    "RolloutCapabilities",
    "RolloutEngineConfig",
    "RolloutOptions",
    "SamplingParams",
    "build_rollout",
    "rollout_class",
]

ROLLOUTS = targets(backends.ROLLOUTS)
"""Built-in names and their classes; the registry is `camshaft/config/backends.py`."""


def rollout_class(name: str) -> type[BaseRollout]:
    """The class called `name`: a name above, an entry point, or `package.module:Class`."""
    return load(name, ROLLOUTS, "camshaft.rollouts", BaseRollout)


def build_rollout(name: str, config: RolloutEngineConfig) -> BaseRollout:
    """A generator of the class called `name`; it has no weights before `load_weights`."""
    return rollout_class(name)(config)
