"""vLLM's worker for ranks on CPUs that are one generator; vLLM imports this file by its name, nobody else does.

    LLM(worker_cls="camshaft.rollout.vllm.cpu_worker.RankWorker", ...)

Ranks that somebody else started exchange numbers through shared memory of a fixed name. Two runs on one machine would
write into one another's, and a run that was killed leaves it there: the next one does not start ("create shm in
SHMManager failed"). Where the ranks do not agree on a name, vLLM uses the process group instead.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]


class RankWorker(CPUWorker):
    """Names after its rank what it would share."""

    def __init__(self, **arguments: Any):
        # What is behind the last colon becomes the name. The ranks have met already, so nothing else reads it.
        super().__init__(**{**arguments, "distributed_init_method": f"env://:rank{arguments['rank']}"})
