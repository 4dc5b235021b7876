"""The SGLang rollout. No other package imports sglang, and these modules import it only when an engine is built.

rollout.py     `SGLangRollout`: starts a child process with the generator
child.py       the rollout in the child process
engine.py      one SGLang engine, through SGLang's public API
worker.py      code in the processes that SGLang starts: sampling and loading weights
installed.py   supported versions, and the error if SGLang is missing
"""

from camshaft.rollout.sglang.rollout import SGLangRollout

__all__ = ["SGLangRollout"]
