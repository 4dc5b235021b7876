"""The vLLM rollout. No other package imports vllm, and these modules import it only when an engine is built.

rollout.py      `VLLMRollout`: vLLM inside the ranks of the trainer
base.py         base class of this rollout and of the rollout for vLLM's server
engine.py       one vLLM engine, through vLLM's public API
adapters.py     LoRA adapters that are synced separately from the base weights
workarounds.py  code that relies on vLLM internals; each function prevents an error that vLLM does not report
installed.py    supported versions, and the error if vLLM is missing
environment.py  start vLLM without lasting changes to the process
worker.py       worker extension of vLLM's server: receives weights and returns checksums
cpu_worker.py   worker class for CPU ranks that share one engine
"""

from camshaft.rollout.vllm.rollout import VLLMRollout

__all__ = ["VLLMRollout"]
