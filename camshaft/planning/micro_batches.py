"""Tokens of the micro-batches of a run on GPUs, by the forecast of its memory.

    config = fit_micro_batches(config)                      # before a run, in a process with a time limit
    limits, reason = choose_limits(config, 24 * GIB)        # on GPUs that this machine need not have
    limits_as_overrides(config)                             # for `camshaft plan`, which forecasts the run

The numbers of tokens that `auto` stands for are upper limits. All of them are halved together, down to the longest
sequence, until the phases with micro-batches fit. A run that resumes keeps the numbers of its first start.
"""

import json
import logging
import pickle
from bisect import bisect_left
from typing import Any, TypeVar

from camshaft.config import PPOConfig
from camshaft.config.auto.fitting import token_limits, with_tokens
from camshaft.machine import CPU
from camshaft.planning.devices import GIB, device_memory
from camshaft.planning.plan import MICRO_BATCHES, Config, make_plan
from camshaft.planning.plan_process import PlanUnavailable, answer_in_process
from camshaft.planning.prompts import fit_to_data
from camshaft.subprocesses import import_path
from camshaft.trainer.resume import resumed_values

SECONDS = 180.0
"""Time limit of the forecasts of a run."""
TRAINED = ("actor_rollout_ref.actor", "critic", "data")
"""Sections with the limits of trained models."""
RESERVE = 2 * GIB
"""Memory of a GPU that is left at least to what a forecast does not count, such as the CUDA context (docs/plan.md)."""
SCRIPT = """
import json, pickle, sys
config, entries = pickle.load(sys.stdin.buffer)
sys.path.extend(entry for entry in entries if entry not in sys.path)
from camshaft.errors import CamshaftError, report_error
from camshaft.planning.devices import device_memory
from camshaft.planning.micro_batches import choose_limits
try:
    print(json.dumps(choose_limits(config, device_memory(config.trainer.device))))
except CamshaftError as error:
    sys.exit(report_error(error))
"""

AnyConfig = TypeVar("AnyConfig", bound=Config)

logger = logging.getLogger(__name__)

_forecasts: dict[str, tuple[dict[str, int], str]] = {}
"""Chosen numbers of tokens, with their reason, by the values that the forecast depends on."""


def fit_micro_batches(config: AnyConfig) -> AnyConfig:
    """Return the config with micro-batches that fit in the GPUs of this machine, as far as they are chosen by tokens.

    Runs of a process that differ in their learning rate, seed or name only share a forecast. Without a forecast, the
    config is unchanged, and a warning reports the reason.
    """
    if not _has_choice(config):
        return config
    if kept := _kept_limits(config):
        return with_tokens(config, kept, "as at the first start")
    key = _forecast_key(config)
    if key in _forecasts:
        return with_tokens(config, *_forecasts[key])
    logger.warning("forecasting the memory of the run to choose its micro-batches (at most %.0f s)", SECONDS)
    try:
        out, error = answer_in_process(SCRIPT, pickle.dumps((config, import_path())), SECONDS)
        if not out.endswith("]\n"):
            raise PlanUnavailable(error)
    except PlanUnavailable as reason:
        logger.warning("micro-batches have their default limits, because the run has no forecast: %s", reason)
        return config
    limits, reason = _forecasts[key] = json.loads(out)
    return with_tokens(config, limits, reason)


def _forecast_key(config: Config) -> str:
    """Return the values that a forecast depends on."""
    without: dict[str, Any] = {
        "trainer": True,
        "optim": {"lr"},
        "actor_rollout_ref": {"actor": {"optim": {"lr"}}},
        "critic": {"optim": {"lr"}},
    }
    ranks = config.topology() if isinstance(config, PPOConfig) else config.trainer.world_size
    return f"{type(config).__name__} {config.trainer.device} {ranks} {config.model_dump_json(exclude=without)}"


def choose_limits(config: Config, memory: int) -> tuple[dict[str, int], str]:
    """Return the largest numbers of tokens with which micro-batches fit in the memory of a GPU, and the reason.

    Raise ConfigError if `camshaft plan` does not support the run.
    """
    config = fit_to_data(config)

    def fits(limits: dict[str, int]) -> bool:
        rows = make_plan(with_tokens(config, limits, ""), memory).rows
        return max((row.peak for row in rows if row.phase in MICRO_BATCHES), default=0) <= usable(memory)

    levels, size = _levels(config), f"{memory / GIB:.0f} GiB"
    if fits(levels[0]):
        return levels[0], f"which fit in {size}"
    level = bisect_left(levels, True, lo=1, key=fits)
    if level < len(levels):
        return levels[level], f"as many as fit in {size}"
    return levels[-1], f"the fewest, but the run does not fit in {size} by the forecast of camshaft plan"


def with_fitting_limits(config: AnyConfig, memory: int | None) -> AnyConfig:
    """Return the config with limits that fit in GPUs of this memory, by default those of this machine."""
    if not _has_choice(config):
        return config
    limits, reason = choose_limits(config, device_memory(config.trainer.device) if memory is None else memory)
    return with_tokens(config, limits, reason)


def limits_as_overrides(config: Config) -> list[str]:
    """Return the chosen numbers of tokens of the trained models on GPUs as overrides. Other passes follow them."""
    limits = {} if config.trainer.device == CPU else token_limits(config, 0)
    chosen = [choice for choice in config.choices() if choice.key in limits]
    return [f"{choice.key}={choice.value}" for choice in chosen if choice.key.rpartition(".")[0] in TRAINED]


def usable(memory: int) -> int:
    """Return the part of the memory of a GPU that a forecast may fill."""
    return min(memory * 9 // 10, memory - RESERVE)


def _has_choice(config: Config) -> bool:
    return config.trainer.device != CPU and len(_levels(config)) > 1


def _levels(config: Config) -> list[dict[str, int]]:
    """Return the numbers of tokens from the largest to the smallest."""
    levels = [token_limits(config, 0)]
    while (smaller := token_limits(config, len(levels))) != levels[-1]:
        levels.append(smaller)
    return levels


def _kept_limits(config: Config) -> dict[str, int]:
    """Return the numbers of the run that is resumed, unless a sequence has become longer than they allow."""
    recorded, smallest = resumed_values(config), _levels(config)[-1]
    limits = {key: recorded[key] for key in smallest if isinstance(recorded.get(key), int)}
    is_complete = limits.keys() == smallest.keys() and all(limits[key] >= smallest[key] for key in smallest)
    return limits if is_complete else {}
