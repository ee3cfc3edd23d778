"""A memory bank: rows of recent batches, so that a small batch still has near neighbors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from nearsay.batch import PADDING, Outputs, check_indices, first_rows
from nearsay.validation import can_look, check_choice, check_whole

Kind = Literal["queue", "examples"]


@dataclass(frozen=True, kw_only=True)
class Bank:
    """Features and logits of earlier rows, which NCR searches besides the batch.

    A row of the bank that shows an example of the current batch is not searched. Rows of the bank
    get no gradient.

    Attributes:
        kind: "queue" keeps the latest `size` rows, "examples" the latest row of every example.
        size: the number of rows of a queue; at least the number of rows in a batch.

    >>> from nearsay.losses import NCR
    >>> objective = NCR(bank=Bank(size=1024))
    >>> state = objective.init_state(num_examples=0, num_classes=10, num_features=64)
    >>> state["bank.features"].shape
    torch.Size([1025, 64])
    """

    kind: Kind = "queue"
    size: int = 4096

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        check_whole("size", self.size, 1)

    def init_state(
        self, num_examples: int, num_classes: int, num_features: int
    ) -> dict[str, Tensor]:
        """An empty bank. The last row of each table takes what must not be kept."""
        rows = 1 + (num_examples if self.kind == "examples" else self.size)
        return {
            "features": torch.zeros(rows, num_features),
            "logits": torch.zeros(rows, num_classes),
            "indices": torch.full((rows,), PADDING),
            "cursor": torch.zeros((), dtype=torch.int64),
        }

    def check(self, state: Mapping[str, Tensor], outputs: Outputs, num_rows: int) -> None:
        """Refuse a state or a batch that does not fit this bank, before anything is written."""
        is_whole = {"features", "logits", "indices", "cursor"} <= state.keys()
        if is_whole and self.kind == "queue":
            is_whole = len(state["indices"]) == self.size + 1
        if not is_whole:
            raise ValueError(
                f"state must be that of {self}. "
                "Use objective.init_state(num_examples, num_classes, num_features)."
            )
        for name, rows in (("features", outputs.features), ("logits", outputs.logits)):
            if state[name].shape[1] != rows.shape[-1]:
                raise ValueError(
                    f"{name} must have {state[name].shape[1]} columns like the bank, "
                    f"got {rows.shape[-1]}."
                )
        if self.kind == "queue" and num_rows > self.size:
            raise ValueError(
                f"size must be {num_rows} or more, the rows of a batch, got {self.size}."
            )

    def search(self, state: Mapping[str, Tensor], current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, features and indices of the bank; index −1 for the (B,) current examples."""
        self._check_indices(state, current)
        indices = state["indices"]
        if self.kind == "examples":
            # Row i of the table is example i.
            stale = torch.zeros_like(indices, dtype=torch.bool)
            stale.index_fill_(0, self._places(state, current), True)
        else:
            stale = (indices[:, None] == current).any(dim=1)
        return state["logits"], state["features"], indices.masked_fill(stale, PADDING)

    def write(self, state: Mapping[str, Tensor], outputs: Outputs, indices: Tensor) -> None:
        """Keep the first row of each of the (B,) examples, in place."""
        self._check_indices(state, indices)
        # The loss shows what is not finite. It must not stay in the bank after a refused step.
        is_finite = outputs.features.isfinite().all(dim=1) & outputs.logits.isfinite().all(dim=1)
        is_kept = first_rows(indices) & is_finite
        kept = indices.masked_fill(~is_kept, PADDING)
        if self.kind == "examples":
            places = self._places(state, kept)
        else:
            # An older row of the same example leaves the queue.
            is_older = (state["indices"][:, None] == kept).any(dim=1)
            state["indices"].masked_fill_(is_older, PADDING)
            # The n-th row that is kept goes n places behind the cursor, and around at the end.
            turn = state["cursor"] + is_kept.cumsum(0) - 1
            places = (turn % self.size).masked_fill(~is_kept, self.size)
            state["cursor"].add_(is_kept.sum()).remainder_(self.size)
        for name, rows in (("features", outputs.features), ("logits", outputs.logits)):
            state[name].index_copy_(0, places, rows.detach().to(state[name].dtype))
            # The last row took what is not kept, such as the content of padding.
            state[name][-1].zero_()
        state["indices"].index_copy_(0, places, kept)

    def _places(self, state: Mapping[str, Tensor], indices: Tensor) -> Tensor:
        return indices.masked_fill(indices == PADDING, len(state["indices"]) - 1)

    def _check_indices(self, state: Mapping[str, Tensor], indices: Tensor) -> None:
        """Refuse impossible indices; only where values cost nothing to read."""
        if self.kind == "examples":
            check_indices(indices, len(state["indices"]) - 1)
        elif can_look(indices) and (indices < PADDING).any():
            raise ValueError(
                f"index must be 0 or more, or {PADDING} for padding, got {int(indices.min())}."
            )
