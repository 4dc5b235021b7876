"""What `camshaft parity` does with its arguments, and what it prints.

status = run(options)          # 0: they agree, 1: they do not
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from camshaft.config.command import as_tree
from camshaft.engine import engine_class
from camshaft.errors import ConfigError, EngineError, RolloutError
from camshaft.models.loader import load_tokenizer, model_folder
from camshaft.parity.diagnosis import Diagnosis, Finding, diagnose
from camshaft.parity.pair import ParityCase
from camshaft.parity.tokens import differences, file_prompts, random_prompts
from camshaft.rollout import SamplingParams, rollout_class

ROWS = {
    "log_prob_diff_max": "max |difference|",
    "log_prob_diff_mean": "mean |difference|",
    "log_prob_diff_above_0.1": "share above 0.1",
    "kl_k1": "KL (k1)",
    "kl_k3": "KL (k3)",
    "effective_sample_share": "effective sample share",
}


def run(options: argparse.Namespace) -> int:
    """Measure the pair, print the report and what is likely to explain it."""
    _check(options)
    case = _case(options)
    own = load_tokenizer(options.model, options.trust_remote_code)
    tokenizer = own if options.tokenizer is None else load_tokenizer(options.tokenizer, options.trust_remote_code)
    if options.data is None:
        prompts = random_prompts(tokenizer, options.prompts, options.prompt_length, options.seed)
    else:
        prompts = file_prompts(options.data, tokenizer, options.prompts, options.prompt_length)
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(f"  {text}", markup=False, style="dim", soft_wrap=True)

    _print(console, f"{options.engine} and {options.rollout} on {options.model}: {len(prompts)} prompts, {_told(case)}")
    diagnosis = diagnose(case, prompts, tokenizer, options.limit, say)
    if tokenizer is not own:
        diagnosis.findings += _two_tokenizers(differences(own, tokenizer), options)
    _report(console, diagnosis, options.limit)
    return 1 if diagnosis.findings or diagnosis.worst > options.limit else 0


def _check(options: argparse.Namespace) -> None:
    """A wrong argument is told before a model is loaded."""
    if not options.limit > 0:
        raise ConfigError(f"--limit {options.limit:g}: the largest difference allowed is above 0, for instance 1e-3")
    if options.prompts < 1 or options.prompt_length < 2:
        raise ConfigError("--prompts must be 1 or more, --prompt-length 2 or more")
    for find, name in ((engine_class, options.engine), (rollout_class, options.rollout)):
        find(name)
    if options.data is not None and not Path(options.data).is_file():
        raise ConfigError(f"--data {options.data}: there is no such file. Name a parquet file, or leave it out")
    try:
        for option in ("model", "tokenizer"):
            if vars(options)[option] is not None:
                model_folder(vars(options)[option])
    except EngineError as error:
        raise ConfigError(f"--{option}: {error}") from error


def _sampling(options: argparse.Namespace) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=options.response_length,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
    except RolloutError as error:
        said = str(error).removeprefix("SamplingParams: ")
        raise ConfigError(f"--response-length, --temperature, --top-k, --top-p: {said}") from error


def _case(options: argparse.Namespace) -> ParityCase:
    return ParityCase(
        engine=options.engine,
        rollout=options.rollout,
        model=options.model,
        device=options.device,
        dtype=options.dtype,
        rollout_dtype=options.rollout_dtype,
        sampling=_sampling(options),
        longest_prompt=options.prompt_length,
        seed=options.seed,
        trust_remote_code=options.trust_remote_code,
        options=as_tree(options.option) if options.option else {},
        engine_kwargs=as_tree(options.engine_kwarg) if options.engine_kwarg else {},
    )


def _told(case: ParityCase) -> str:
    sampling = case.sampling
    return (
        f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}, "
        f"{case.computes_in()} and {case.rollout_dtype} on {case.device}"
    )


def _two_tokenizers(found: list[str], options: argparse.Namespace) -> list[Finding]:
    """The prompts' tokenizer against that of the model's folder."""
    if not found:
        return []
    seen = f"{options.model} and {options.tokenizer} do not have the same tokenizer: {'; '.join(found)}."
    advice = "Prompts and stop tokens must be those that the model was trained with: take the tokenizer of its folder"
    return [Finding("template", seen, advice)]


def _report(console: Console, diagnosis: Diagnosis, limit: float) -> None:
    if diagnosis.rounds:
        _print(console, f"{'':24}" + "".join(f"{name:>18}" for name in diagnosis.rounds))
        for key, said in ROWS.items():
            numbers = "".join(f"{measured.metrics[key]:>18.3g}" for measured in diagnosis.rounds.values())
            _print(console, f"{said:24}{numbers}")
        tokens = "".join(f"{len(measured.responses.values):>18}" for measured in diagnosis.rounds.values())
        _print(console, f"{'tokens':24}{tokens}")
    if diagnosis.moved is not None:
        _print(console, f"(the update moved the log-probs by {diagnosis.moved:.2g} on average)")
    if diagnosis.no_update is not None:
        _print(console, f"(no update was tried: {diagnosis.no_update})")
    if diagnosis.worst <= limit and not diagnosis.findings:
        _print(console, f"they agree: no difference above {limit:g}")
    for finding in diagnosis.findings:
        console.print(f"[red]LIKELY CAUSE: {finding.kind}[/]")
        _print(console, f"  {finding.evidence}")
        _print(console, f"  {finding.advice}.")
    if diagnosis.findings:
        _print(console, "docs/mismatch.md says what the numbers mean")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)
