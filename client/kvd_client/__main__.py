"""`python -m kvd_client`: the `kvd-client` command."""

from __future__ import annotations

from kvd_client.cli import main

if __name__ == "__main__":
    main()
