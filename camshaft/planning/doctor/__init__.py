"""Check a machine and a run before the run is started (`camshaft doctor`).

    findings.py        a finding and its report; runs checks side by side, each within a time limit
    machine.py         checks of this machine, without torch
    imports.py         checks of installed packages and of files that shadow them
    deep.py            checks that start processes, which run `probes.py`
    probes.py          the programs of these processes
    probe_role.py      a role for the probe of ranks
    run.py             checks of what one run needs
    weights.py         reads the headers of safetensors files

`machine.py`, `imports.py` and `deep.py` import only the standard library, so `camshaft doctor` also reports packages
that cannot be imported.
"""
