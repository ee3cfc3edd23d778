"""The libraries whose loops are adapted to: each is an extra, and the sentence of a missing one says which."""

from importlib import import_module
from typing import Any

from nearsay.errors import first_line


def import_library(name: str, extra: str) -> Any:  # Any: the library may be missing
    """The library, or ImportError in one sentence with its cure."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f'this adapter needs {name}; pip install ".[{extra}]" in the clone'
        ) from None
    except RuntimeError as error:  # a torchvision that was built for another torch
        reason = first_line(error)
        raise ImportError(
            f"{name} cannot be imported ({reason}); let one pip install torch, torchvision and {name} together"
        ) from error
