"""Checks of runs in which the policy plays episodes with environments."""

from collections.abc import Iterator

from camshaft.config.errors import Problem
from camshaft.config.schema.ppo import PPOConfig
from camshaft.config.schema.roles import GeneratorConfig

ROLLOUT = "actor_rollout_ref.rollout"


def check_episodes(config: PPOConfig) -> Iterator[Problem]:
    """Check what does not work with episodes of several turns."""
    if not config.plays_episodes():
        return
    rollout = config.actor_rollout_ref.rollout
    yield from check_turns(ROLLOUT, rollout)
    if config.data.return_raw_input_ids:
        player = f"{ROLLOUT}.{rollout.multi_turn.player_key()}"
        message = (
            f"requires prompts without a chat template, but {player} formats them with one. Set "
            "data.return_raw_input_ids=false."
        )
        yield Problem("data.return_raw_input_ids", True, message, (player,))


def check_turns(section: str, rollout: GeneratorConfig) -> Iterator[Problem]:
    """Check the rollout that plays episodes, in training or in `camshaft generate`."""
    multi_turn = rollout.multi_turn
    if not multi_turn.plays():
        return
    player = f"{section}.{multi_turn.player_key()}"
    if rollout.tensor_model_parallel_size > 1:
        key = f"{section}.tensor_model_parallel_size"
        message = f"must be 1 with {player}, because each rank plays its own episodes. Set {key}=1."
        yield Problem(key, rollout.tensor_model_parallel_size, message, (player,))
    if rollout.ignore_eos:
        key = f"{section}.ignore_eos"
        message = f"would make each answer of {player} end at its length limit only. Set {key}=false."
        yield Problem(key, True, message, (player,))
