"""The SGLang rollout. No other package imports `sglang`, and these modules import it only when an engine is built.

rollout.py     `SGLangRollout`, which starts a child process
child.py       `SGLangChildRollout`, which generates in the child process
engine.py      one SGLang engine, used through SGLang's public API
worker.py      sampling and weight loading in the processes that SGLang starts
installed.py   tested versions, and the error message if SGLang is missing
"""

from camshaft.rollout.sglang.rollout import SGLangRollout

__all__ = ["SGLangRollout"]
