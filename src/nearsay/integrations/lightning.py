"""NCR in a Lightning module: the loss is part of it, and a callback sets epochs and logs."""

from typing import Any

from nearsay.integrations import import_library
from nearsay.losses.criterion import NCRLoss

__all__ = ["NCRCallback"]

_lightning = import_library("lightning", "lightning")


class NCRCallback(_lightning.pytorch.Callback):  # type: ignore[misc, name-defined]
    """Sets the epoch of every `NCRLoss` inside the module and logs the terms of its loss.

    The log names are `train/ncr` and so on, or `train/NAME/ncr` by the attribute NAME if the module
    has several losses.

    Args:
        prefix: the beginning of the names in the log.
    """

    def __init__(self, prefix: str = "train/") -> None:
        super().__init__()
        self.prefix = prefix

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse a module without an NCRLoss, for which this callback could do nothing."""
        if not _losses(pl_module):
            raise ValueError(
                f"{type(pl_module).__name__} must have an NCRLoss. "
                "Make one in its __init__, as in self.loss = NCRLoss(head=self.head)."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch here too: training that resumes inside an epoch has no start of it."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Set the epoch."""
        for loss in _losses(pl_module).values():
            loss.set_epoch(float(trainer.current_epoch))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the mean of each term over the epoch."""
        losses = _losses(pl_module)
        for name, loss in losses.items():
            prefix = self.prefix if len(losses) == 1 else f"{self.prefix}{name}/"
            terms = {f"{prefix}{term}": value for term, value in loss.terms.items()}
            pl_module.log_dict(terms, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)


def _losses(module: Any) -> dict[str, NCRLoss]:
    return {name: part for name, part in module.named_modules() if isinstance(part, NCRLoss)}
