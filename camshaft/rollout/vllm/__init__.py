"""The vLLM rollout. No other package imports `vllm`, and these modules import it only when an engine is built.

rollout.py      `VLLMRollout`, which runs vLLM inside the ranks of the trainer
base.py         base class of `VLLMRollout` and of the rollout that uses vLLM's server
engine.py       one vLLM engine, used through vLLM's public API
adapters.py     sync LoRA adapters separately from the base weights
workarounds.py  functions that use vLLM internals to prevent errors that vLLM does not report
installed.py    tested versions, and the error message if vLLM is missing
environment.py  start vLLM without lasting changes to the process
guard.py        middleware of vLLM's server that requires an API key on every route
worker.py       worker extension of vLLM's server, which receives weights and returns checksums
cpu_worker.py   worker class for CPU ranks that share one engine
"""

from camshaft.rollout.vllm.rollout import VLLMRollout

__all__ = ["VLLMRollout"]
