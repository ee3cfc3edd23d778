"""NCR in a Lightning module: the criterion is a part of the module, and a callback tells it the epoch and logs."""

from typing import Any

from nearsay.integrations.libraries import import_library
from nearsay.losses.criterion import NCRCriterion

__all__ = ["NCRCallback", "NCRCriterion"]

_lightning = import_library("lightning", "lightning")


class NCRCallback(_lightning.pytorch.Callback):  # type: ignore[misc, name-defined]  # Lightning may be missing
    """For every `NCRCriterion` inside the module: `start_epoch` is kept, and the terms of its loss are logged.

    They are called `train/ncr` and so on; where there are several criteria, `train/NAME/ncr`, by their names there.
    """

    def __init__(self, prefix: str = "train/") -> None:
        super().__init__()
        self.prefix = prefix

    def setup(
        self, trainer: Any, pl_module: Any, stage: str
    ) -> None:  # Any: Lightning may be missing
        """Refuse a module that this callback would have nothing to do with."""
        if not _criteria(pl_module):
            raise ValueError(
                f"{type(pl_module).__name__} has no NCRCriterion; make one in its __init__, as in "
                "self.criterion = NCRCriterion(self.head)"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell the epoch: a training that is resumed inside of one has no start of it."""
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Tell the epoch."""
        for criterion in _criteria(pl_module).values():
            criterion.set_epoch(float(trainer.current_epoch))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the mean of each term over the epoch."""
        criteria = _criteria(pl_module)
        for place, criterion in criteria.items():
            prefix = self.prefix if len(criteria) == 1 else f"{self.prefix}{place}/"
            terms = {f"{prefix}{name}": value for name, value in criterion.terms.items()}
            pl_module.log_dict(terms, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)


def _criteria(module: Any) -> dict[str, NCRCriterion]:
    return {name: each for name, each in module.named_modules() if isinstance(each, NCRCriterion)}
