"""Does a generator say of its tokens what a training engine says of them, and if not, why? `camshaft parity`.

    diagnosis = diagnose(ParityCase("fsdp", "vllm", "models/tiny"), prompts, limit=1e-3)
    diagnosis.rounds["as loaded"].metrics["log_prob_diff_max"]
    diagnosis.findings                         # none if they agree

    pair.py       an engine and a rollout on one model folder: hand over, generate, compute again, compare
    causes.py     experiments that change one thing and look whether the difference goes away
    tokens.py     prompts to try it with, two tokenizers side by side
    command.py    what the command prints

It uses the two interfaces and nothing below them, so that it works on engines and generators of other packages.
"""

from camshaft.parity.diagnosis import Diagnosis, Finding, diagnose
from camshaft.parity.pair import Comparison, Pair, ParityCase

__all__ = ["ParityCase", "Finding", "Comparison", "Pair", "Diagnosis", "diagnose"]
