"""vLLM's own server as a generator, over HTTP: one that runs already, or one that is started here.

rollout.py    what the contract asks for
http.py       HTTP to one server: bounded waits, bounded repetition
control.py    what is asked of a server beside tokens: is it one that fits, which weights has it, here are others
launch.py     starting one
guard.py      neither it nor the trainer outlives the other
The other side is `vllm_rollout/served.py`, which runs inside the server.
"""

from camshaft.rollout.server.rollout import ServerRollout

__all__ = ["ServerRollout"]
