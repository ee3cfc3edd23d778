"""Many runs from one command: every combination of lists, or a search among ranges.

`grid` plans and `run_all` runs; `make_space` plans and `search` runs. Plans are checked in full
before anything runs.
"""

from nearsay.sweep.planning import Found, Outcome, Planned, Space, grid, make_space
from nearsay.sweep.running import run_all
from nearsay.sweep.searching import search

__all__ = ["Found", "Outcome", "Planned", "Space", "grid", "make_space", "run_all", "search"]
