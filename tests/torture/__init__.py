"""`make torture`: faults by the hundred, under load. Not collected by pytest; `tests/faults` is the form that CI runs.

- `client`: a client process that plays turns, survives its daemon, and holds it to what it promised.
- `kills`: `kill -9` at random moments under several such clients, then every answer against an undisturbed daemon's.
- `flips`: random bits in page files, logs and the catalog of a folder that real daemons left.
- `rivals`: daemons that start at once on one folder.

`python -m tests.torture` runs them, prints seeds and counts, and exits with 1 when anything was lost or wrong.
"""
