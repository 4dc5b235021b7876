"""`camshaft doctor`: check this machine, or what a run needs, before a run starts.

camshaft doctor
camshaft doctor --deep
camshaft doctor model=models/tiny data=train.jsonl reward=my_reward.py key=value ...
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from camshaft.errors import CamshaftError
from camshaft.planning.doctor.deep import deep_checks
from camshaft.planning.doctor.findings import Finding, collect, fail, report, report_json, worst
from camshaft.planning.doctor.machine import machine_checks

MACHINE_SECONDS = 5.0
"""Time limit of the checks of the machine. Usually they take a fraction of a second."""
RUN_SECONDS = 300.0
"""Time limit of the checks of a run, which load the tokenizer and the reward function."""
RUNS = "checkpoints"
"""Folder of runs by default."""


def main(argv: Sequence[str]) -> int:
    """Run the selected checks, print the findings and return exit status 1 if a check fails."""
    options, overrides = _parser().parse_known_args(argv)
    if overrides:
        findings = _check_run(overrides)
    else:
        findings = collect(machine_checks(Path(RUNS)), MACHINE_SECONDS, "see the log of the kernel: dmesg | tail")
    if options.deep:
        findings += collect(deep_checks(options.timeout), options.timeout + MACHINE_SECONDS)
    sys.stdout.write((report_json if options.json else report)(findings) + "\n")
    return int(worst(findings) == "FAIL")


def _check_run(overrides: Sequence[str]) -> list[Finding]:
    """Check the requirements of each run that the overrides describe."""
    from camshaft.config import PPOConfig, compose

    try:
        configs = compose(overrides, PPOConfig)
    except CamshaftError as error:
        return [fail("config", str(error), "camshaft config explain KEY")]
    from camshaft.planning.doctor.run import run_checks

    findings: list[Finding] = []
    arguments = overrides if len(configs) == 1 else None
    for config in configs:
        for name, check in run_checks(config, arguments).items():  # one after another, because libraries load once
            findings += collect({name: check}, RUN_SECONDS)
    return findings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="camshaft doctor",
        usage="camshaft doctor [--deep] [--timeout SECONDS] [--json] [key=value ...]",
        description="Check this machine in a second. With key=value, the arguments of camshaft ppo, check what this "
        "run needs: config, model files, tokenizer, data, reward function, libraries, ports, disk space and memory.",
        epilog="Exit status: 0 if no check fails, 1 otherwise.",
    )
    parser.add_argument(
        "--deep",
        action="store_true",
        help="also start processes: torch, ranks, shared memory, a reward process, Ray, devices, optional libraries",
    )
    parser.add_argument("--timeout", type=float, default=25.0, help="time limit of each deep check (default: 25 s)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser
