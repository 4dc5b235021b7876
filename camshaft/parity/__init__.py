"""Does a generator say of its tokens what a training engine says of them, and if not, why? `camshaft parity`.

    verdict = investigate(Case("fsdp", "vllm", "models/tiny"), prompts, limit=1e-3)
    verdict.rounds["as loaded"].found["log_prob_diff_max"]
    verdict.causes                         # none if they agree

    pair.py       an engine and a rollout on one model folder: hand over, generate, compute again, compare
    causes.py     experiments that change one thing and look whether the difference goes away
    tokens.py     prompts to try it with, two tokenizers side by side
    command.py    what the command prints

It uses the two interfaces and nothing below them, so that it works on engines and generators of other packages.
"""

from camshaft.parity.diagnosis import Cause, Verdict, investigate
from camshaft.parity.pair import Case, Measured, Pair

__all__ = ["Case", "Cause", "Measured", "Pair", "Verdict", "investigate"]
