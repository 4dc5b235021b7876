"""Implements the command `camshaft check-model`: prepares the model, compares it, and prints the findings.

status = run(options)          # 0 if the engine computes the model of transformers, else 1
"""

import argparse
import json
import math
import sys
import time
from typing import Any

from rich.console import Console

from camshaft import hub
from camshaft.config.command import parse_options
from camshaft.engine import engine_class
from camshaft.errors import ConfigError, EngineError
from camshaft.models.loader import import_external, model_folder
from camshaft.parity.model.checks import LABELS, Case, Result, check_model
from camshaft.parity.model.folders import prepare
from camshaft.rollout import rollout_class

STYLES = {"equal": "[green]equal    [/]", "different": "[red]DIFFERENT[/]", "skipped": "[yellow]skipped  [/]"}
OWN_CODE = (
    "oracle: the folder's own code, because transformers has no class for its model type. Errors of this code are not "
    "found; --oracle TYPE compares with a class of transformers"
)


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
    console, start = Console(highlight=False, stderr=options.json), time.perf_counter()

    def show(text: str, **style: Any) -> None:
        console.print(text, markup=False, soft_wrap=True, **style)

    shared = {key: getattr(options, key) for key in ("trust_remote_code", "seed")}
    with prepare(source, options.layers, options.random_weights, options.oracle, **shared) as prepared:
        case = Case(
            prepared,
            options.engine,
            options.rollout,
            options.dtype or ("float64" if "float64" in capabilities.training_dtypes else "float32"),
            options.device,
            tuple(LABELS) if options.head is None else (options.head,),
            parse_options(options.option) if options.option else {},
            external_lib=options.external_lib,
            **shared,
        )
        show(f"{source}: the engine {case.engine} in {case.dtype} against transformers in float64, row by row")
        for note in [*prepared.notes, *([OWN_CODE] if prepared.own_oracle else [])]:
            show(f"  {note}")
        results: list[Result] = []
        for result in check_model(case, lambda text: show(f"  {text}", style="dim")):
            figures = (
                "" if result.difference is None else f"  {result.difference:.1e} (tolerance {result.tolerance:.0e})"
            )
            console.print(f"{STYLES[result.status]} {result.check}{figures}", soft_wrap=True)
            if result.skipped:
                show(f"          {result.skipped}", style="dim")
            results.append(result)
    if options.json:
        content = {"model": str(source), "engine": case.engine, "dtype": case.dtype, "notes": prepared.notes}
        sys.stdout.write(json.dumps({**content, "results": [_as_json(result) for result in results]}, indent=2) + "\n")
    findings = [result.sentence for result in results if result.status == "different"]
    for finding in findings:
        show(f"\n{finding}")
    equal, seconds = sum(result.status == "equal" for result in results), time.perf_counter() - start
    count = f"{len(findings)} finding" + ("" if len(findings) == 1 else "s")
    console.print(f"\n{equal} of {len(results)} comparisons are equal, {count} ({seconds:.0f} s)")
    return 1 if findings else 0


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "check": result.check,
        "status": result.status,
        "difference": None if result.difference == math.inf else result.difference,
        "tolerance": result.tolerance,
        "cause": None if result.cause is None else result.cause.name,
        "sentence": result.sentence,
    }
