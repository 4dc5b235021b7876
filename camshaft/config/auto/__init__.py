"""Choice of the values of keys that are `auto`, from the rest of the config and the machine.

    choices = choose(values, PPOConfig, Machine("cuda", 8, frozenset({"vllm"})))
    choices[0]                                  # Choice("trainer.device", "cuda", "8 accelerators of this machine")
    fitted = fit_to_rows(config, 48)            # a smaller batch, if the data has only 48 rows
    fitted = fit_to_prompts(fitted, 87)         # the longest prompt of the data has 87 tokens
    format_choices(config)                      # the table that a run prints at its start

    rules.py    the rule of each key
    fitting.py  fits the chosen values to the data and to the memory of accelerators
    table.py    the table of the chosen values

`load.py` puts the choices into the config before it is validated, so no other code handles `auto`. The exceptions are
`trainer.save_freq` and `trainer.test_freq`, whose value `auto` is a schedule by time (`trainer/schedule.py`).

With several machines, the choices describe the machine on which the command runs. Set `trainer.device` and
`trainer.n_gpus_per_node` if the others differ.
"""
