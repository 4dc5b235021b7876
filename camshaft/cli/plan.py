"""`camshaft plan`: forecast the memory of a run before it starts.

    camshaft plan model=models/tiny data=train.jsonl key=value ...
    camshaft plan --memory 64GiB trainer.n_gpus_per_node=4 key=value ...
    camshaft plan --device h100 trainer.n_gpus_per_node=8 key=value ...
    camshaft plan --trainer sft model=models/tiny data=train.jsonl key=value ...
    camshaft plan --trainer serve --lora-rank 32 model=models/tiny key=value ...

The command accepts the same arguments as `camshaft ppo`, or those of the command that `--trainer` names.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from camshaft.config import PPOConfig, RMConfig, SFTConfig, compose
from camshaft.config.serve import read_serve_config
from camshaft.errors import ConfigError

DOES_NOT_FIT = 3
SERVE, LORA_RANK, SAMPLES = "serve", 32, 64
SCHEMAS = {"ppo": PPOConfig, "sft": SFTConfig, "rm": RMConfig}
UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def main(argv: Sequence[str]) -> int:
    """Print the plan of a run, and return exit status 3 if it does not fit."""
    options, overrides = _parser().parse_known_args(argv)
    memory = None if options.memory is None else parse_size(options.memory)
    if options.device is not None:
        from camshaft.planning.devices import parse_device

        key = "device" if options.trainer == SERVE else "trainer.device"
        memory, overrides = parse_device(options.device), [f"{key}=cuda", *overrides]
    if options.trainer == SERVE:
        return _plan_service(overrides, memory, options)
    if options.lora_rank is not None or options.samples is not None:
        raise ConfigError("--lora-rank and --samples describe the clients of a server; set --trainer serve")
    schema = SCHEMAS[options.trainer]
    configs = compose(overrides, schema)
    if not configs:  # the arguments only print the config
        return 0
    if len(configs) > 1:
        raise ConfigError(f"camshaft plan forecasts one run, and the arguments describe {len(configs)}; omit -m")
    if options.device is not None and configs[0].trainer.device != "cuda":
        raise ConfigError(
            f"--device {options.device} plans a run on GPUs, but trainer.device={configs[0].trainer.device}; remove "
            "one of them"
        )
    from camshaft.planning.micro_batches import limits_as_overrides, with_fitting_limits
    from camshaft.planning.plan import as_dict, find_change, make_plan, report, solve

    if options.solve:
        value = solve(overrides, options.solve, memory, schema)
        if options.json:
            text = json.dumps({"key": options.solve, "value": value})
        elif value is None:
            text = f"no value of {options.solve} fits"
        else:
            text = f"{options.solve}={value} is the largest value that fits, to within 2 %"
        sys.stdout.write(text + "\n")
        return DOES_NOT_FIT if value is None else 0
    config = with_fitting_limits(configs[0], memory)
    plan = make_plan(config, memory)
    if chosen := limits_as_overrides(config):
        plan.notes.append(f"a run chooses {' '.join(chosen)}")
        overrides = [*overrides, *chosen]
    if options.json:
        content = as_dict(plan)
        if not plan.fits and (proposal := find_change(overrides, memory, schema)) is not None:
            content["change"] = list(proposal[0])
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return 0 if plan.fits else DOES_NOT_FIT
    sys.stdout.write(report(plan) + "\n")
    if plan.fits:
        return 0
    change = find_change(overrides, memory, schema)
    if change is None:
        sys.stdout.write("no change of micro-batches, checkpointing, offloading or sequence parallelism makes it fit\n")
    else:
        changes, changed = change
        size = changed.tightest.peak / 2**30
        sys.stdout.write(f"it fits with {' '.join(changes)}: {size:.2f} GiB in {changed.tightest.phase}\n")
    return DOES_NOT_FIT


def _plan_service(arguments: Sequence[str], memory: int | None, options: argparse.Namespace) -> int:
    """Print the plan of `camshaft serve`, and return the exit status."""
    if options.solve:
        raise ConfigError("--solve does not plan camshaft serve; omit it, and try values of the key")
    from camshaft.planning.plan import as_dict, report
    from camshaft.planning.served import plan_service

    rank = LORA_RANK if options.lora_rank is None else options.lora_rank
    samples = SAMPLES if options.samples is None else options.samples
    if rank < 0 or samples < 1:
        raise ConfigError(f"--lora-rank {rank} --samples {samples}: they are at least 0 and 1")
    plan = plan_service(read_serve_config(arguments), memory, rank, samples)
    if options.json:
        sys.stdout.write(json.dumps(as_dict(plan), indent=2) + "\n")
    else:
        sys.stdout.write(report(plan) + "\n")
        if not plan.fits:
            keys = "max_samplers, max_versions or --samples" if plan.tightest.phase == "gen" else "max_tokens"
            sys.stdout.write(f"smaller values of max_models, {keys} need less memory\n")
    return 0 if plan.fits else DOES_NOT_FIT


def parse_size(text: str) -> int:
    """Return a size with a unit, such as 80GiB, in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"--memory {text} is not a size; write for example --memory 64GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft plan",
        usage="camshaft plan [--trainer NAME] [--device NAME | --memory SIZE] [options] key=value ...",
        description="Forecast the peak memory of each role and phase, and the size of checkpoints, with the arguments "
        "of camshaft ppo, sft, rm or serve. The engines' own code runs on one fake rank. No weights are read, and "
        "nothing is computed.",
        epilog="Exit status: 0 if the run fits, 3 if it does not, 2 if the config is invalid.",
    )
    parser.add_argument("--trainer", choices=(*SCHEMAS, SERVE), default="ppo", help="command of the run (default: ppo)")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--device", metavar="NAME", help="plan a run on GPUs of this kind, such as h100 or a100-40")
    memory.add_argument(
        "--memory",
        help="memory of each GPU with trainer.device=cuda, of the whole machine with trainer.device=cpu, such as 64GiB "
        "(default: that of this machine)",
    )
    parser.add_argument("--solve", metavar="KEY", help="print the largest integer value of a key that fits")
    parser.add_argument(
        "--lora-rank", type=int, metavar="N",
        help="with --trainer serve: rank of the adapters that clients train, 0 for all weights (default: 32)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, metavar="N",
        help="with --trainer serve: responses that each rank generates at once (default: 64)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan, or the value of --solve, as JSON")
    return parser
