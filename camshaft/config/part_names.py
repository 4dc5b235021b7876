"""Names of parts that a config chooses: what is built in, and whether there is such a part. Used by the checks.

    yield from part_name("critic.strategy", config.critic.strategy, ENGINES, "engines")

The registries are above this package; a test holds these names to them.
"""

import difflib
from collections.abc import Iterable, Iterator

from camshaft.config.problems import Problem
from camshaft.config.readers import BUILT_IN
from camshaft.plugins import find, names

ENGINES = ("fsdp", "fsdp1", "fsdp2", "reference")
TRACKERS = ("console", "jsonl", "mlflow", "tensorboard", "trackio", "wandb")
ROLLOUTS, PLAIN_ROLLOUTS = BUILT_IN, ("hf", "torch")
ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo")
POLICY_LOSSES = ("vanilla", "gspo", "cispo")
REWARDS = ("arithmetic", "auto", "exact_match", "format", "gsm8k", "math", "reasoning_gym")


def part_name(
    key: str, name: str, built_in: Iterable[str], kind: str, own: str = "module:Class", rests_on: tuple[str, ...] = ()
) -> Iterator[Problem]:
    """A problem if nobody offers a part of this name."""
    known, group = dict.fromkeys(built_in, ""), f"camshaft.{kind}"
    if find(name, known, group) is not None:
        return
    choices = names(known, group)
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    listed = f"one of {', '.join(choices)}, or " if choices else ""
    yield Problem(key, name, f"must be {listed}package.{own}.{hint}", rests_on)
