"""NCR for training scripts of timm, which call `loss_fn(model(input), target)`."""

from typing import Any

from torch import nn

from nearsay.batch import Objective
from nearsay.integrations import import_library
from nearsay.losses.criterion import NCRLoss

__all__ = ["ncr_loss"]

_timm = import_library("timm", "vision")


def ncr_loss(
    model: nn.Module, objective: Objective | None = None, *, num_examples: int = 0
) -> NCRLoss:
    """The loss function of a network of timm, bare or already wrapped (compiled, distributed).

    The features are those of `forward_head(forward_features(x), pre_logits=True)`. A hook takes
    them where they enter the classifier, so the network runs once. Targets may be class numbers, or
    the distributions that timm's Mixup makes.

    Args:
        model: a network of `timm.create_model` with one linear classifier.
        objective: the loss; None means `NCR()`.
        num_examples: number of training examples, for losses with a row per example.
    """
    network: Any = _timm.utils.unwrap_model(model)
    if not hasattr(network, "get_classifier"):
        raise ValueError(
            f"model must be a network of timm.create_model, got {type(network).__name__}."
        )
    head = network.get_classifier()
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"model must have one torch.nn.Linear as its classifier, got {type(head).__name__}. "
            "Choose another network, with num_classes above 0."
        )
    return NCRLoss(objective=objective, num_examples=num_examples, head=head)
