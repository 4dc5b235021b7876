"""`camshaft sft` and `camshaft rm`: supervised fine-tuning, and training of a reward model on preference pairs."""

from collections.abc import Callable, Sequence
from typing import Any

from camshaft.cli.prerequisites import prepare_runs
from camshaft.cli.sweep import numbered_runs
from camshaft.cli.usage import CONFIG_OPTIONS, print_help, short_name_table
from camshaft.config import RMConfig, SFTConfig, compose
from camshaft.stop import ENDED_BY_SIGNAL


def sft(argv: Sequence[str]) -> int:
    """Fine-tune a model with every config that `argv` describes, and return the largest exit status."""
    if print_help(argv, _usage("sft", "supervised fine-tuning", SFTConfig, "train.jsonl")):
        return 0
    configs = prepare_runs(compose(argv, SFTConfig))
    from camshaft.trainer.supervised import SFTTrainer

    return _train_all(configs, SFTTrainer)


def rm(argv: Sequence[str]) -> int:
    """Train a reward model with every config that `argv` describes, and return the largest exit status."""
    if print_help(argv, _usage("rm", "train a reward model on preference pairs", RMConfig, "pairs.jsonl")):
        return 0
    configs = prepare_runs(compose(argv, RMConfig))
    from camshaft.trainer.supervised import RMTrainer

    return _train_all(configs, RMTrainer)


def _train_all(configs: Sequence[SFTConfig] | Sequence[RMConfig], trainer_class: Callable[..., Any]) -> int:
    """Train with one config after the other, until a signal stops a run. Return the largest exit status."""
    from camshaft.planning.micro_batches import fit_micro_batches
    from camshaft.trainer.loop import run

    status = 0
    with numbered_runs(configs) as runs:
        for config in runs:
            status = max(status, run(fit_micro_batches(config), trainer_class))
            if status > ENDED_BY_SIGNAL:
                break
    return status


def _usage(name: str, description: str, schema: type[SFTConfig] | type[RMConfig], data: str) -> str:
    return f"""\
usage: camshaft {name} key=value ...        {description}

{short_name_table(schema)}

Short names and keys can be mixed. A run requires model and data.
All keys: camshaft config show --trainer {name}. One key: camshaft config explain --trainer {name} KEY

{CONFIG_OPTIONS}
example:
  camshaft {name} model=models/mine data={data} steps=100 lr=1e-5 out=runs/{name}
"""
