"""Adapters of the loss and of finished runs to other libraries, which are extras."""

from importlib import import_module
from typing import Any

from nearsay.errors import first_line


def import_library(name: str, extra: str) -> Any:
    """The library, or ImportError with the extra to install."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(
            f'{name} must be installed for this. Use pip install ".[{extra}]" in the clone.'
        ) from None
    except RuntimeError as error:
        # A torchvision that was built for another torch says so in this way.
        raise ImportError(
            f"{name} cannot be imported ({first_line(error)}). "
            f"Install torch, torchvision and {name} together with pip."
        ) from error
