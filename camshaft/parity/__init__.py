"""Compare the log-probs of a rollout with those of an engine, and diagnose a difference: `camshaft parity`.

    diagnosis = diagnose(ParityCase("fsdp", "vllm", "models/tiny"), prompts, tokenizer, limit=1e-3)
    diagnosis.comparisons["as loaded"].metrics["log_prob_diff_max"]
    diagnosis.findings                         # empty if the two agree

    pair.py       an engine and a rollout on one model: sync weights, generate, recompute log-probs, compare
    diagnosis.py  experiments that change one setting and test whether the difference disappears
    tokens.py     test prompts, and a comparison of two tokenizers
    report.py     the output of the command

The package uses only the public interfaces, so it works with engines and rollouts of other packages.
"""

from camshaft.parity.diagnosis import Diagnosis, Finding, diagnose
from camshaft.parity.pair import Comparison, Pair, ParityCase

__all__ = ["ParityCase", "Finding", "Comparison", "Pair", "Diagnosis", "diagnose"]
