"""`kvd doctor`: examines the machine, the model and the data folder, and heals the folder when told to.

A part of the composition root: it may import anything of kvd and kvd_client; nothing but `kvd.cli_doctor` and the soak
(`kvd.bench.soak_check`) imports it.
Without a repair nothing changes in the data folder, at the socket or beside the model (P8).

- `findings`: a check's result and a report, as plain data.
- `folder_state`, `socket_state`, `model_state`: looks at a data folder, a socket, a model, that change nothing.
- `aside`: a temporary folder for what a look has to write.
- `context`: what checks look at, found out once.
- `store_look`, `deep`: one model's logs, pages and catalog against each other; every checksum.
- `machine_checks`, `folder_checks`, `socket_checks`, `store_checks`: the checks.
- `repair`: modes, sockets, corrupt pages, recovery for real, catalogs made anew.
- `examine`, `render`: the table of checks and its run; a report for people.
"""

from kvd.doctor.context import Options
from kvd.doctor.examine import examine
from kvd.doctor.findings import Check, Report
from kvd.doctor.render import render

__all__ = ["Check", "Options", "Report", "examine", "render"]
