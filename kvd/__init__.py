"""kvd: a daemon that gives language-model agents virtual memory for attention state.

`vm` decides, `store` and `model` act, `scheduler` runs them on one engine thread, `front` speaks to clients,
`daemon` wires everything. `tests/test_layers.py` holds who may import whom.
"""

__version__ = "0.1.0"
