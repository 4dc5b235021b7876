"""Implements the command `camshaft parity`: checks arguments, compares an engine and a rollout, prints a report.

status = run(options)          # 0 if engine and rollout agree, else 1
"""

import argparse
from pathlib import Path

from rich.console import Console

from camshaft.config.command import parse_options
from camshaft.engine import engine_class
from camshaft.errors import ConfigError, EngineError, RolloutError
from camshaft.models.loader import load_tokenizer, model_folder
from camshaft.parity.diagnosis import Cause, Diagnosis, diagnose
from camshaft.parity.pair import ParityCase
from camshaft.parity.tokens import compare_tokenizers, file_prompts, random_prompts
from camshaft.rollout import SamplingParams, rollout_class

ROWS = {
    "log_prob_diff_max": "max |difference|",
    "log_prob_diff_mean": "mean |difference|",
    "log_prob_diff_above_0.1": "share above 0.1",
    "kl_k1": "KL (k1)",
    "kl_k3": "KL (k3)",
    "effective_sample_share": "effective sample share",
}
"""Metrics in the table of the report, with their labels."""


def run(options: argparse.Namespace) -> int:
    """Compare an engine and a rollout, and print a report with the likely causes of a difference."""
    _check_options(options)
    case = _make_case(options)
    model_tokenizer = load_tokenizer(options.model, options.trust_remote_code)
    tokenizer = (
        model_tokenizer if options.tokenizer is None else load_tokenizer(options.tokenizer, options.trust_remote_code)
    )
    if options.data is None:
        prompts = random_prompts(tokenizer, options.prompts, options.prompt_length, options.seed)
    else:
        prompts = file_prompts(options.data, tokenizer, options.prompts, options.prompt_length)
    console = Console(highlight=False)

    def log(text: str) -> None:
        console.print(f"  {text}", markup=False, style="dim", soft_wrap=True)

    sampling = case.sampling
    _print(
        console,
        f"{options.engine} and {options.rollout} on {options.model}: {len(prompts)} prompts, "
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"dtypes {case.compute_dtype()} and {case.rollout_dtype}, device {case.device}",
    )
    diagnosis = diagnose(case, prompts, tokenizer, options.limit, log)
    if tokenizer is not model_tokenizer:
        diagnosis.causes += _tokenizer_causes(compare_tokenizers(model_tokenizer, tokenizer), options)
    _print_report(console, diagnosis, options.limit)
    return 1 if diagnosis.causes or diagnosis.worst > options.limit else 0


def _check_options(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for invalid arguments, before a model is loaded."""
    if not options.limit > 0:
        raise ConfigError(f"--limit {options.limit:g} is not above 0; use for example 1e-3")
    if options.prompts < 1:
        raise ConfigError(f"--prompts {options.prompts} is too small; use at least 1")
    if options.prompt_length < 2:
        raise ConfigError(f"--prompt-length {options.prompt_length} is too small; use at least 2")
    engine_class(options.engine)
    rollout_class(options.rollout)
    if options.data is not None and not Path(options.data).is_file():
        raise ConfigError(f"--data {options.data} does not exist; set it to a data file, or omit the option")
    try:
        for option in ("model", "tokenizer"):
            if vars(options)[option] is not None:
                model_folder(vars(options)[option])
    except EngineError as error:
        raise ConfigError(f"--{option}: {error}") from error


def _make_case(options: argparse.Namespace) -> ParityCase:
    try:
        sampling = SamplingParams(options.response_length, options.temperature, options.top_k, options.top_p)
    except RolloutError as error:
        message = str(error).removeprefix("SamplingParams: ")
        raise ConfigError(f"invalid sampling option: {message}") from error
    return ParityCase(
        engine=options.engine,
        rollout=options.rollout,
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        rollout_dtype=options.rollout_dtype,
        sampling=sampling,
        max_prompt_length=options.prompt_length,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
        options=parse_options(options.option) if options.option else {},
        engine_kwargs=parse_options(options.engine_kwarg) if options.engine_kwarg else {},
    )


def _tokenizer_causes(differences: list[str], options: argparse.Namespace) -> list[Cause]:
    """Report differences between the tokenizer of the model and that of the prompts."""
    if not differences:
        return []
    evidence = f"{options.model} and {options.tokenizer} have different tokenizers: {'; '.join(differences)}."
    advice = "Prompts and stop tokens must be those of the model's training; use the tokenizer of the model's folder"
    return [Cause("template", evidence, advice)]


def _print_report(console: Console, diagnosis: Diagnosis, limit: float) -> None:
    """Print a table of metrics, notes about the update, and the causes."""
    if diagnosis.comparisons:
        comparisons = diagnosis.comparisons.values()
        rows = {"": list(diagnosis.comparisons)}
        rows |= {label: [f"{each.metrics[key]:.3g}" for each in comparisons] for key, label in ROWS.items()}
        if all(each.routing_mismatch is not None for each in comparisons):
            rows["routing mismatch"] = [f"{each.routing_mismatch:.3g}" for each in comparisons]
        rows["tokens"] = [str(len(each.responses.values)) for each in comparisons]
        for label, cells in rows.items():
            _print(console, f"{label:24}" + "".join(f"{cell:>18}" for cell in cells))
    if diagnosis.update_change is not None:
        _print(console, f"(the update changed the log-probs by {diagnosis.update_change:.2g} on average)")
    if diagnosis.update_skip_reason is not None:
        _print(console, f"(update skipped: {diagnosis.update_skip_reason})")
    if diagnosis.worst <= limit and not diagnosis.causes:
        _print(console, f"engine and rollout agree: no difference exceeds {limit:g}")
    for cause in diagnosis.causes:
        console.print(f"[red]LIKELY CAUSE: {cause.kind}[/]")
        _print(console, f"  {cause.evidence}")
        _print(console, f"  {cause.advice}.")
    if diagnosis.causes:
        _print(console, "docs/mismatch.md explains the metrics")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
