"""Check of an environment before a run: `camshaft check-environment`.

    findings.py   plays episodes three times, and names what is wrong
    scripted.py   episodes with scripted answers, in the processes of environments
    inputs.py     rows of the data, and the chat template
    manual.py     episodes that a person plays in the terminal

The package imports nothing, because only `inputs.py` needs torch.
"""
