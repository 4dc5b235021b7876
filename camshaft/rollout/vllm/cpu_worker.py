"""vLLM worker class for CPU ranks that share one engine; vLLM imports this module by name.

    LLM(worker_cls="camshaft.rollout.vllm.cpu_worker.RankWorker", ...)

vLLM ranks that were started outside vLLM exchange tensors through shared memory with a fixed name. Two runs on one
machine would overwrite each other's data. A killed run leaves the memory behind, so the next run fails with "create shm
in SHMManager failed". If the ranks use different names, vLLM falls back to the process group.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]


class RankWorker(CPUWorker):
    """Give each rank a different shared-memory name, which makes vLLM use the process group."""

    def __init__(self, **arguments: Any):
        # vLLM uses the text after the last colon as the name. The ranks are already connected, so nothing else reads
        # the init method.
        super().__init__(**{**arguments, "distributed_init_method": f"env://:rank{arguments['rank']}"})
