"""Views of run folders, in a terminal and in a browser. Nothing here imports torch or changes a run.

server.py    the live page; its files are in static/
export.py    the page as one file
data.py      the data of the page
ranking.py   the worst and best responses of all steps
advice.py    problems of a run with their causes
panels.py    the metrics of each view, in five rows
text.py      tables of runs, responses and differences for a terminal
plot.py      curves as an image, with matplotlib

`camshaft/tracking/run_folder.py` reads the folders. The commands `camshaft view`, `show`, `compare` and
`plot` are in `camshaft/cli`.
"""
