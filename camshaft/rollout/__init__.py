"""Rollouts: generators that receive weights from an engine, behind one interface.

    from camshaft.rollout import SamplingParams, build_rollout
    rollout = build_rollout("torch", RolloutEngineConfig(model_path="models/tiny"))

base.py          `BaseRollout`, `SamplingParams`, `Generation` and `OpenRows`
stream.py        `Stream`: answers one by one, of rows that come and go
builtin/         `torch`: continuous batching on the training weights
hf.py            `hf`: generation with `transformers.generate`
vllm/            `vllm`: vLLM in the ranks of the trainer
server/          `server`: a vLLM server, accessed over HTTP
sglang/          `sglang`: SGLang in child processes
process/         `process`: any other rollout in a child process
weights/         validate a weight sync, pack weights into buckets, move them between processes
external.py      base class of rollouts that copy weights into a library: vLLM, vLLM's server, SGLang
shared_model.py  a transformers model that shares its weights with the training engine
sampling.py      sample tokens from logits with per-row seeds
scoring.py       log-probs of given tokens from logits
stop_strings.py  find the token that completes a stop string

The contract suite for all rollouts is in `camshaft/contracts/rollout`. Other packages import from this module, not from
the modules of a particular rollout.
"""

from camshaft.config import backends
from camshaft.config.backends import targets
from camshaft.config.rollout import RolloutCapabilities, RolloutEngineConfig, RolloutOptions
from camshaft.plugins import load
from camshaft.rollout.base import BaseRollout, Generation, OpenRows, SamplingParams, UnsupportedSampling
from camshaft.rollout.sampling import mix_seeds, uniform_numbers
from camshaft.rollout.scoring import PromptScores
from camshaft.rollout.stream import Answer, Stream, WaveRow, generate_wave, open_stream
from camshaft.rollout.weights.buckets import Assembler as Assembler
from camshaft.rollout.weights.buckets import Bucket as Bucket
from camshaft.rollout.weights.buckets import pack_buckets as pack_buckets
from camshaft.rollout.weights.checks import ExpectedWeights as ExpectedWeights
from camshaft.rollout.weights.transport import HostMemory as HostMemory
from camshaft.rollout.weights.transport import open_memory as open_memory

__all__ = [
    "ROLLOUTS",
    "Answer",
    "BaseRollout",
    "Generation",
    "OpenRows",
    "PromptScores",
    "RolloutCapabilities",
    "RolloutEngineConfig",
    "RolloutOptions",
    "SamplingParams",
    "Stream",
    "UnsupportedSampling",
    "WaveRow",
    "build_rollout",
    "generate_wave",
    "mix_seeds",
    "open_stream",
    "rollout_class",
    "uniform_numbers",
]

ROLLOUTS = targets(backends.ROLLOUTS)
"""Map of built-in names to their classes; `camshaft/config/backends.py` defines the entries."""


def rollout_class(name: str) -> type[BaseRollout]:
    """Return the class for `name`, which is a key of `ROLLOUTS`, an entry point, or `package.module:Class`."""
    return load(name, ROLLOUTS, "camshaft.rollouts", BaseRollout)


def build_rollout(name: str, config: RolloutEngineConfig) -> BaseRollout:
    """Build the rollout registered as `name`. Call `load_weights` before generating."""
    return rollout_class(name)(config)
