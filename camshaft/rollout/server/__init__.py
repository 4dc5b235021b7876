"""The server rollout: generates with vLLM's server over HTTP, either a running server or one that it starts.

rollout.py      `ServerRollout`, the rollout interface on top of completions
client.py       check the server, sync weights, sleep and wake up
http_client.py  HTTP with timeouts and bounded retries
launch.py       start a server and stop it

`rollout/vllm/worker.py` is the other end, inside the server.
"""

from camshaft.rollout.server.rollout import ServerRollout

__all__ = ["ServerRollout"]
