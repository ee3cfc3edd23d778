"""The loss inside other people's loops: Lightning, the Trainer of Hugging Face, and timm."""

from nearsay.losses.criterion import NCRCriterion

__all__ = ["NCRCriterion"]
