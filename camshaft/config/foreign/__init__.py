"""Names of other libraries, and what stands for them here.

    rows.py         kinds of rows: renamed, expanded, not needed, passed on, missing
    verl.py         keys of verl, whose sections are those of camshaft
    trl.py          arguments of TRL
    openrlhf.py     options of OpenRLHF
    words.py        words that people type for a key
    answers.py      answers to unknown keys
    translate.py    replaces the keys of verl in a config
    topics.py       what is not implemented

A key of verl is replaced with a notice. The names of the other two libraries differ in units and defaults, so that an
error answers them with the key to type. `tools/foreign_tables.py` writes the tables of the pages for users of these
libraries.
"""
