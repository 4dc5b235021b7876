"""The contract suite of `BaseRollout`.

suite.py      `RULES`, `check_rollout`, and the rules about tokens and log-probs
stopping.py   rules about the end of a response and about invalid prompts
weights.py    rules about weights, sleep and digests
harness.py    builds rollouts on tiny models and compares their results with the oracle
"""
