"""Networks as values: `build(num_classes)` gives a module whose outputs are features and logits."""

from nearsay.models.heads import CosineHead, LinearHead
from nearsay.models.mlp import MLP, Linear
from nearsay.models.norm import BatchNorm
from nearsay.models.pretrained import Timm, load_weights
from nearsay.models.resnet import PreActResNet18, ResNet

__all__ = [
    "MLP",
    "BatchNorm",
    "CosineHead",
    "Linear",
    "LinearHead",
    "PreActResNet18",
    "ResNet",
    "Timm",
    "load_weights",
]
