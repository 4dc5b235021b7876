"""The SGLang rollout, which runs in a child process.

    rollout = SGLangRollout(RolloutEngineConfig(model_path="models/tiny"))
    rollout.load_weights(engine.named_weights())
    rollout.generate_sequences(prompts, SamplingParams(max_tokens=64))

An SGLang engine takes control of its process: it replaces signal handlers, kills all children of the process on exit,
and kills the process itself if one of these children fails. `SGLangRollout` therefore runs the rollout of `child.py` in
a child process, as `rollout.name=process` does. All of these processes end when the trainer ends.
"""

from camshaft.config.backends import SGLANG
from camshaft.config.rollout import RolloutEngineConfig
from camshaft.device import world_size
from camshaft.errors import RolloutError
from camshaft.rollout.process.rollout import ProcessRollout
from camshaft.rollout.sglang.installed import check_installed

CHILD_ROLLOUT = "camshaft.rollout.sglang.child:SGLangChildRollout"


class SGLangRollout(ProcessRollout):
    """Generate with SGLang in a child process.

    `engine_kwargs` accepts the arguments of `sglang.Engine`, and `timeout` (time limit of one call, in seconds).
    """

    capabilities = SGLANG

    def __init__(self, config: RolloutEngineConfig):
        check_installed()
        world = world_size()
        if config.tensor_model_parallel_size > 1 and world > 1:
            raise RolloutError(
                f"tensor_model_parallel_size={config.tensor_model_parallel_size} is unsupported for sglang with "
                f"{world} ranks, because each rank starts its own engine; set "
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
            )
        engine_kwargs = {**config.engine_kwargs, "rollout": CHILD_ROLLOUT}
        super().__init__(config.model_copy(update={"engine_kwargs": engine_kwargs}))
