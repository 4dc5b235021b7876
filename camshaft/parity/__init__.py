"""Compares the log-probs of a rollout with those of an engine, and diagnoses differences: `camshaft parity`.

    diagnosis = diagnose(ParityCase("fsdp", "vllm", "models/tiny"), prompts, tokenizer, limit=1e-3)
    diagnosis.comparisons["as loaded"].metrics["log_prob_diff_max"]
    diagnosis.causes                           # empty if engine and rollout agree

    pair.py       builds an engine and a rollout on one model, generates, and compares log-probs
    diagnosis.py  finds the cause of a difference by changing one setting at a time
    tokens.py     creates test prompts, and compares tokenizers
    report.py     runs the command and prints its report

The package uses only the public interfaces, so it works with engines and rollouts of other packages.
"""

from camshaft.parity.diagnosis import Cause, Diagnosis, diagnose
from camshaft.parity.pair import Comparison, Pair, ParityCase

__all__ = ["ParityCase", "Cause", "Comparison", "Pair", "Diagnosis", "diagnose"]
