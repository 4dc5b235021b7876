"""The server rollout, which generates with vLLM's server over HTTP. It connects to a running server or starts one.

rollout.py      `ServerRollout`, which generates through the completions endpoint
client.py       check the server's settings, sync weights, sleep and wake up
http_client.py  HTTP client with timeouts and bounded retries
launch.py       start and stop a server

`rollout/vllm/worker.py` runs inside the server and receives the weights.
"""

from camshaft.rollout.server.rollout import ServerRollout

__all__ = ["ServerRollout"]
