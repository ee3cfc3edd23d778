"""A memory bank: features and logits of recent rows, so that a small batch still finds near neighbors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nearsay.batch import PADDING, Outputs, check_indices, first_rows
from nearsay.validation import can_look, check_whole


@dataclass(frozen=True, kw_only=True)
class Bank:
    """Rows kept as extra neighbors: a queue of the latest `size` rows, or the latest row of every example.

    An example of the current batch is never also found in the bank, and what is found there gets no gradient.
    """

    kind: Literal["queue", "examples"] = "queue"
    size: int = 4096  # of the queue

    def __post_init__(self) -> None:
        if self.kind not in ("queue", "examples"):
            raise ValueError(f'kind={self.kind!r} must be "queue" or "examples"')
        check_whole("size", self.size, 1)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """Empty bank; the last row of each table takes what is not to be kept."""
        rows = 1 + (num_examples if self.kind == "examples" else self.size)
        return {
            "features": torch.zeros(rows, num_features),
            "logits": torch.zeros(rows, num_classes),
            "indices": torch.full((rows,), PADDING),
            "cursor": torch.zeros((), dtype=torch.int64),
        }

    def check(self, state: Mapping[str, Tensor], outputs: Outputs, num_rows: int) -> None:
        """Refuse a memory that is not this bank's, and a batch that it cannot hold, before anything is written."""
        tables = ("features", "logits", "indices", "cursor")
        if any(name not in state for name in tables) or (
            self.kind == "queue" and len(state["indices"]) != self.size + 1
        ):
            raise ValueError(
                f"the memory is not that of {self}; make it with "
                "objective.init_state(num_examples, num_classes, num_features)"
            )
        for name, rows in (("features", outputs.features), ("logits", outputs.logits)):
            if state[name].shape[1] != rows.shape[-1]:
                raise ValueError(
                    f"{name} {tuple(rows.shape)} do not fit a bank whose rows have {state[name].shape[1]}; make its "
                    "memory with objective.init_state(num_examples, num_classes, num_features)"
                )
        if self.kind == "queue" and num_rows > self.size:
            raise ValueError(
                f"a bank of size={self.size} cannot hold a batch of {num_rows} rows; make it at least as large"
            )

    def search(self, state: Mapping[str, Tensor], current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, features and indices of the kept rows, without those of the (B,) examples at hand."""
        self._check_indices(state, current)
        indices = state["indices"]
        if self.kind == "examples":
            stale = torch.zeros_like(indices, dtype=torch.bool).index_fill_(
                0, self._places(state, current), True
            )
        else:
            stale = (indices[:, None] == current).any(dim=1)
        return state["logits"], state["features"], indices.masked_fill(stale, PADDING)

    def write(self, state: Mapping[str, Tensor], outputs: Outputs, indices: Tensor) -> None:
        """Keep the first row of each of the (B,) examples, in place."""
        self._check_indices(state, indices)
        # What is not finite is seen in the loss, and must not stay after a step that was refused.
        is_kept = (
            first_rows(indices)
            & outputs.features.isfinite().all(dim=1)
            & outputs.logits.isfinite().all(dim=1)
        )
        kept = indices.masked_fill(~is_kept, PADDING)
        if self.kind == "examples":
            places = self._places(state, kept)
        else:
            # A row that comes again takes the place of its older one.
            is_older = (state["indices"][:, None] == kept).any(dim=1)
            state["indices"].masked_fill_(is_older, PADDING)
            turn = state["cursor"] + is_kept.cumsum(0) - 1
            places = (turn % self.size).masked_fill(~is_kept, self.size)
            state["cursor"].add_(is_kept.sum()).remainder_(self.size)
        state["features"].index_copy_(
            0, places, outputs.features.detach().to(state["features"].dtype)
        )
        state["logits"].index_copy_(0, places, outputs.logits.detach().to(state["logits"].dtype))
        state["indices"].index_copy_(0, places, kept)
        state["features"][
            -1
        ].zero_()  # which of the rows not kept came last, or what padding held, is no state
        state["logits"][-1].zero_()

    def _places(self, state: Mapping[str, Tensor], indices: Tensor) -> Tensor:
        return indices.masked_fill(indices == PADDING, len(state["indices"]) - 1)

    def _check_indices(self, state: Mapping[str, Tensor], indices: Tensor) -> None:
        """Refuse who cannot be kept; looks only where it costs nothing."""
        if self.kind == "examples":
            check_indices(indices, len(state["indices"]) - 1)
        elif can_look(indices) and (indices < PADDING).any():
            raise ValueError(
                f"index {int(indices.min())} must be 0 or more, or {PADDING} for padding"
            )
