"""Every decoder-only model type of the installed transformers, trained by an engine and by plain transformers.

    python -m tests.families                    # a table; an error if it contradicts the list in `refused.py`
    python -m tests.families qwen3 olmo2        # some types

The models are tiny and random. The oracle (`checks.py`) is transformers in float64, one row at a time, with the
attention of torch and one expert after the other.
"""
