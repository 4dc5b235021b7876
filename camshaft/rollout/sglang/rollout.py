"""SGLang as a generator, in processes of its own.

    rollout = SGLangRollout(RolloutEngineConfig(model_path="models/tiny"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

SGLang's engine takes the process that it is started in for its own: it replaces signal handlers, kills all children of
that process when it ends, and the process itself when one of them fails. So it gets one, which is `process_rollout.py`
with a generator that is not for the trainer's process (`inside.py`). Nothing of it outlives the trainer.
"""

from __future__ import annotations

from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import world_size
from camshaft.errors import RolloutError
from camshaft.rollout.process.rollout import ProcessRollout
from camshaft.rollout.sglang.installed import check_installed

INSIDE = "camshaft.rollout.sglang.child:SGLangChildRollout"


class SGLangRollout(ProcessRollout):
    """See the map above. `engine_kwargs` are those of `sglang.Engine`, beside `timeout` (seconds for one answer)."""

    def __init__(self, config: RolloutEngineConfig):
        check_installed()
        world = world_size()
        if config.tensor_model_parallel_size > 1 and world > 1:
            raise RolloutError(
                f"with sglang each of the {world} ranks of this run has a generator of its own; set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size to 1, "
                f"it is {config.tensor_model_parallel_size}"
            )
        super().__init__(config.model_copy(update={"engine_kwargs": {**config.engine_kwargs, "rollout": INSIDE}}))
