"""Networks as values: `build(num_classes)` makes a module with the outputs features and logits.

To use your own network, write a frozen dataclass with a method
`build(num_classes, *, num_inputs, seed)` that returns an `nn.Module` from inputs to `Outputs`.
"""

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
