"""Check a machine and a run before the run is started.

    findings.py        a finding and its report; runs checks side by side, each within a time limit
    machine.py         checks of this machine, without torch
    imports.py         checks of installed packages and of files that shadow them
    deep.py            checks that start processes, which run `probes.py`
    probes.py          the programs of these processes
    run.py             checks of what one run needs
    tensor_memory.py   bytes of live tensors, and execution of code without computing it
    trace.py           runs the phases of one rank, on real ranks or on a fake one
    plan.py            the memory plan of a run, its verdict and changes with which it fits (`camshaft plan`)
    plan_process.py    runs `camshaft plan` in a process with a time limit
    memory_error.py    forecast and peak of a run that ran out of memory
    operations.py      operations and bytes of the phases of a step
    step_time.py       the time of a step, from the times of an earlier run
    weights.py         reads the headers of safetensors files

`machine.py`, `imports.py` and `deep.py` import only the standard library, so `camshaft doctor` also reports packages
that cannot be imported.
"""
