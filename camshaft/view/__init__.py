"""Views of run folders, in a terminal and in a browser. Nothing here imports torch or changes a run.

panels.py    the metrics of each view, in five rows
text.py      tables of runs, responses and differences for a terminal
plot.py      curves as an image, with matplotlib

`camshaft/tracking/run_folder.py` reads the folders. The commands `camshaft show`, `compare` and
`plot` are in `camshaft/cli`.
"""
