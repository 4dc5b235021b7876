"""SGLang as a generator: the only folder that imports sglang, and that late.

rollout.py     the generator of the trainer's process: it starts another process and talks to it
inside.py      what the contract asks for, in that process, in terms of SGLang
engine.py      one SGLang engine, through its public API
scheduler.py   what runs in the processes that SGLang starts: choosing tokens, taking weights
installed.py   which versions are known, and what to say without one
"""

from camshaft.rollout.sglang.rollout import SGLangRollout

__all__ = ["SGLangRollout"]
