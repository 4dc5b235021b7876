"""Forecast the memory of a run (`camshaft plan`), and check a machine before it starts (`doctor`).

plan.py            the memory plan of a run, its verdict and changes with which it fits
trace.py           runs the phases of one rank, on real ranks or on a fake one
layers.py          extrapolates the memory of many layers from traces of a few
tensor_memory.py   bytes of live tensors, and execution of code without computing it
devices.py         memory of GPUs by name
engines.py         engines on simulated GPUs
generator.py       memory of the rollout on a GPU
prompts.py         the prompt length of a run that takes it from its data
plan_process.py    runs `camshaft plan` in a process with a time limit
memory_error.py    forecast and peak of a run that ran out of memory
doctor/            checks of a machine and of a run
"""
