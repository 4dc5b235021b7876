"""The contract of `BaseRollout`.

suite.py      the rules, and `check_rollout`
stopping.py   rules about the end of a response and about invalid prompts
weights.py    rules about weights, sleep and digests
harness.py    builds rollouts on tiny models and compares their results with the oracle
"""
