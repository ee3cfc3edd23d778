"""NCR for training scripts of timm, which call `loss_fn(model(input), target)`."""

from typing import Any

from torch import nn

from nearsay.batch import Objective
from nearsay.integrations.libraries import import_library
from nearsay.losses.criterion import NCRCriterion

__all__ = ["NCRCriterion", "ncr_loss"]

_timm = import_library("timm", "vision")


def ncr_loss(
    model: nn.Module, objective: Objective | None = None, *, num_examples: int = 0
) -> NCRCriterion:
    """The loss function of a network of timm, bare or already wrapped (compiled, distributed).

    Features are what `forward_head(forward_features(x), pre_logits=True)` gives: they enter the classifier, where they
    are caught, so that the network runs once. Targets may be class numbers, or the distributions that Mixup makes.
    """
    network: Any = _timm.utils.unwrap_model(model)  # Any: a network of timm has methods of its own
    if not hasattr(network, "get_classifier"):
        raise ValueError(
            f"{type(network).__name__} has no get_classifier(); give a network of timm.create_model"
        )
    head = network.get_classifier()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"the classifier of {type(network).__name__} is {type(head).__name__}, not one torch.nn.Linear; choose a "
            "network with one linear classifier, and num_classes above 0"
        )
    return NCRCriterion(head, objective, num_examples=num_examples)
