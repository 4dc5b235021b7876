"""The contract of `BaseEngine`.

suite.py         the rules, and `check_engine`
checkpoints.py   rules about checkpoints and exported weights
adapters.py      the rule about LoRA adapters
exact_kl.py      rules about a KL divergence over the vocabulary in the loss
harness.py       builds engines on a tiny model, runs steps, compares results
oracle.py        the expected results, computed with transformers
"""
