"""From a checkpoint of a run to a folder that transformers, vLLM and PEFT read: `camshaft export`.

stored.py      which model a checkpoint holds, and where
command.py     the arguments, and the export itself

The folder is written and checked by `checkpoint/export.py`, as that of a run is; no run is started.
"""
