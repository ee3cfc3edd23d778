"""Train in spite of wrong labels, and hold a run folder as an object: `train`, `load` and `Run`."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nearsay.doors.run import Run, load, train

__all__ = ["Run", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import what brings torch when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'nearsay.doors' has no attribute {name!r}")
    return getattr(import_module("nearsay.doors.run"), name)
