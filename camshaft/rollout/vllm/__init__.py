"""vLLM as a generator: the only folder that imports vllm, and that late.

rollout.py     what the contract asks for, in terms of vLLM
base.py        what this and vLLM's server have in common
engine.py      one vLLM engine, through its public API
adapters.py    an adapter by itself, beside base weights that stay
inside.py      what is not public, each against a mistake that would go unnoticed
installed.py   which versions are known, and what to say without one
process.py     leaving the process as it was
cpu_worker.py  ranks on CPUs that are one generator
served.py      inside a server of vLLM: weights come, digests go; `server_rollout` is the other side
"""

from camshaft.rollout.vllm.rollout import VLLMRollout

__all__ = ["VLLMRollout"]
