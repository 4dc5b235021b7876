"""Runs in Python: what `camshaft.train`, `camshaft.sft`, `camshaft.reward_model` and `camshaft.load_run` call.

    run.py        Run: metrics, responses, plot, comparison, export and resume of a run
    launch.py     the values, reward functions and hooks with which a run was started
    start.py      starts a run from keys and Python objects
    inputs.py     writes models, tokenizers and rows that are Python objects to the run folder
    export.py     exports the model of a checkpoint; `camshaft export` calls it too

The modules import torch and other large libraries only inside the functions that use them.
"""
