"""Implements the command `camshaft check-model`: prepares the model, compares it, and prints the findings.

status = run(options)          # 0 if the engine computes the model of transformers, else 1
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from camshaft import hub
from camshaft.config.command import parse_options
from camshaft.engine import engine_class
from camshaft.errors import ConfigError, EngineError
from camshaft.models.loader import import_external, model_folder
from camshaft.parity.model.checks import HEADS, Case, Result, check_model
from camshaft.parity.model.folders import Prepared, Request, prepare
from camshaft.rollout import rollout_class

STYLES = {"equal": "[green]equal    [/]", "different": "[red]DIFFERENT[/]", "skipped": "[yellow]skipped  [/]"}


def run(options: argparse.Namespace) -> int:
    """Compare a model with transformers, print a sentence for each finding, and return 1 if there is one."""
    if options.layers is not None and options.layers < 1:
        raise ConfigError(f"--layers {options.layers} is too small; use at least 1")
    capabilities = engine_class(options.engine).capabilities
    if options.rollout != "none":
        rollout_class(options.rollout)
    try:
        import_external(options.external_lib)
        source = model_folder(hub.source(options.model, may_download=True), weights=not options.random_weights)
    except EngineError as error:
        raise ConfigError(str(error)) from error
    request = Request(options.layers, options.random_weights, options.oracle, options.trust_remote_code, options.seed)
    dtype = options.dtype or ("float64" if "float64" in capabilities.training_dtypes else "float32")
    console, start = Console(highlight=False, stderr=options.json), time.perf_counter()
    with prepare(source, request) as prepared:
        case = Case(
            prepared,
            options.engine,
            options.rollout,
            dtype,
            options.device,
            HEADS if options.head is None else (options.head,),
            parse_options(options.option) if options.option else {},
            options.trust_remote_code,
            options.external_lib,
            options.seed,
        )
        for line in _introduction(source, case, prepared):
            console.print(line, markup=False, soft_wrap=True)
        results = [*_reported(case, console)]
    findings = [result.sentence for result in results if result.status == "different"]
    if options.json:
        _print_json(source, case, results)
    for finding in findings:
        console.print(f"\n{finding}", markup=False, soft_wrap=True)
    equal, seconds = sum(result.status == "equal" for result in results), time.perf_counter() - start
    count = f"{len(findings)} finding" + ("" if len(findings) == 1 else "s")
    console.print(f"\n{equal} of {len(results)} comparisons are equal, {count} ({seconds:.0f} s)")
    return 1 if findings else 0


def _introduction(source: Path, case: Case, prepared: Prepared) -> list[str]:
    """Return the lines that say what is compared with what."""
    lines = [f"{source}: the engine {case.engine} in {case.dtype} against transformers in float64, row by row"]
    lines += [f"  {note}" for note in prepared.notes]
    if prepared.own_oracle:
        lines.append(
            "  oracle: the folder's own code, because transformers has no class for its model type. Errors of this "
            "code are not found; --oracle TYPE compares with a class of transformers"
        )
    return lines


def _reported(case: Case, console: Console) -> list[Result]:
    """Run the comparisons, and print each result when it is available."""

    def log(text: str) -> None:
        console.print(f"  {text}", markup=False, style="dim", soft_wrap=True)

    results = []
    for result in check_model(case, log):
        figures = "" if result.difference is None else f"  {result.difference:.1e} (tolerance {result.tolerance:.0e})"
        console.print(f"{STYLES[result.status]} {result.check}{figures}", soft_wrap=True)
        if result.skipped:
            log(f"        {result.skipped}")
        results.append(result)
    return results


def _print_json(source: Path, case: Case, results: list[Result]) -> None:
    content: dict[str, Any] = {
        "model": str(source),
        "engine": case.engine,
        "dtype": case.dtype,
        "notes": case.prepared.notes,
        "results": [
            {
                "check": result.check,
                "status": result.status,
                "difference": None if result.difference == math.inf else result.difference,
                "tolerance": result.tolerance,
                "cause": None if result.cause is None else result.cause.name,
                "sentence": result.sentence,
            }
            for result in results
        ],
    }
    sys.stdout.write(json.dumps(content, indent=2) + "\n")
