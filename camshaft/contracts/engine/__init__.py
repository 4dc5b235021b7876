"""The contract of `BaseEngine`.

suite.py          `check_engine`, and rules about predictions, steps and modes
checkpoints.py    rules about checkpoints and exported weights
adapters.py       rules about LoRA adapters
hyperparameters.py  the rule about hyperparameters of single optimizer steps
missing_calls.py  the rule about errors of calls that come too early
exact_kl.py       rules about losses that contain the KL divergence over the whole vocabulary
targets.py        the rule about log-probs of tokens that are not the input
harness.py        builds engines on a tiny model, runs steps and compares results
oracle.py         computes the expected results with transformers
ranks.py          runs the contract in several processes
"""
