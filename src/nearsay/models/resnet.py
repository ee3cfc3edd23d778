"""Residual networks: for small images as on CIFAR, and for 224 pixels with the names and shapes of
torchvision's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from nearsay.batch import Outputs
from nearsay.models.heads import Head, LinearHead, drawn
from nearsay.models.norm import BatchNorm, Statistics, check_statistics
from nearsay.validation import check_choice, check_whole

Norm = Callable[[int], BatchNorm]
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """Residual network (He et al. 2015, arXiv:1512.03385), with torchvision's names and shapes.

    Depth 50 has bottlenecks that stride in their 3×3 convolution ("v1.5").

    Args:
        depth: 18, 34 or 50.
        small_images: True begins with a 3×3 convolution, for images as in CIFAR; False with a 7×7
            of stride 2 and a maximum over 3×3 of stride 2.
        projection: "all" puts a convolution into every shortcut, as the released code of the paper
            does; "first" only where shapes change.
        zero_last_gamma: True starts every block as its shortcut, as the released code does.
        width: Channels of the first group of blocks; the others have 2, 4 and 8 times as many.
        statistics: Of batch normalization under several processes, as in `BatchNorm`; the released
            code uses "process".
        head: The classifier on top of the features.

    >>> import torch
    >>> network = ResNet(width=4).build(num_classes=3)
    >>> network(torch.zeros(2, 3, 8, 8)).logits.shape
    torch.Size([2, 3])
    """

    depth: Literal[18, 34, 50] = 18
    small_images: bool = True
    projection: Literal["first", "all"] = "first"
    zero_last_gamma: bool = False
    width: int = 64
    statistics: Statistics = "global"
    # The head is frozen, so it may be shared.
    head: Head = LinearHead()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_statistics(self.statistics)
        check_whole("width", self.width, 1)
        check_choice("depth", self.depth, BLOCKS)
        check_choice("projection", self.projection, ("first", "all"))

    def build(self, num_classes: int, *, num_inputs: int = 3, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs, H, W) images to `Outputs`; features are averages over
        pixels.
        """
        norm = partial(BatchNorm, statistics=self.statistics)
        kind = _Bottleneck if self.depth == 50 else _Basic

        def block(before: int, width: int, stride: int) -> nn.Module:
            projects = self.projection == "all" or stride != 1 or before != width * kind.expansion
            return kind(
                before, width, stride, norm, projects=projects, starts_at_zero=self.zero_last_gamma
            )

        num_features = 8 * self.width * kind.expansion
        with drawn(seed):
            size, stride = (3, 1) if self.small_images else (7, 2)
            first = _convolution(num_inputs, self.width, size, stride)
            layers = _layers(block, BLOCKS[self.depth], self.width, kind.expansion)
            head = self.head.build(num_features, num_classes)
            return _Network(
                first, norm(self.width), layers, head, num_features, has_pool=not self.small_images
            )


@dataclass(frozen=True, kw_only=True)
class PreActResNet18:
    """The pre-activation network of the public DivideMix and ELR+ code, for small images.

    It differs from He et al. 2016 (arXiv:1603.05027) in three ways. Normalization and ReLU follow
    the first convolution. They do not stand before the average at the end, so features may be
    negative. A shortcut starts after the activation of its block even where it has no convolution.

    Args:
        width: Channels of the first group of blocks; the others have 2, 4 and 8 times as many.
        statistics: Of batch normalization under several processes, as in `BatchNorm`.
        head: The classifier on top of the features.

    >>> import torch
    >>> PreActResNet18(width=4).build(num_classes=3)(torch.zeros(2, 3, 8, 8)).features.shape
    torch.Size([2, 32])
    """

    width: int = 64
    statistics: Statistics = "global"
    # The head is frozen, so it may be shared.
    head: Head = LinearHead()  # noqa: RUF009

    def __post_init__(self) -> None:
        check_statistics(self.statistics)
        check_whole("width", self.width, 1)

    def build(self, num_classes: int, *, num_inputs: int = 3, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs, H, W) images to `Outputs`."""
        norm = partial(BatchNorm, statistics=self.statistics)

        def block(before: int, width: int, stride: int) -> nn.Module:
            return _PreActivated(before, width, stride, norm)

        num_features = 8 * self.width
        with drawn(seed):
            first = _convolution(num_inputs, self.width, 3, 1)
            layers = _layers(block, BLOCKS[18], self.width, 1)
            head = self.head.build(num_features, num_classes)
            return _Network(first, norm(self.width), layers, head, num_features, has_pool=False)


class _Network(nn.Module):
    """Convolution, normalization, four groups of blocks, average, head; names of torchvision."""

    def __init__(
        self,
        first: nn.Conv2d,
        norm: BatchNorm,
        layers: list[nn.Sequential],
        head: nn.Module,
        num_features: int,
        *,
        has_pool: bool,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.conv1, self.bn1 = first, norm
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if has_pool else nn.Identity()
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.fc = head

    def forward(self, inputs: Tensor) -> Outputs:
        places = self.maxpool(_relu(self.bn1(self.conv1(inputs))))
        places = self.layer4(self.layer3(self.layer2(self.layer1(places))))  # (B, D, h, w)
        # In the precision of the weights: features rounded to 16 bits would have other neighbors.
        features = places.mean(dim=(2, 3), dtype=self.conv1.weight.dtype)
        return Outputs(features, self.fc(features))


class _Basic(nn.Module):
    expansion = 1

    def __init__(
        self,
        before: int,
        width: int,
        stride: int,
        norm: Norm,
        *,
        projects: bool,
        starts_at_zero: bool,
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(before, width, 3, stride), norm(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, 1), norm(width)
        self.downsample = _projection(before, width, stride, norm) if projects else nn.Identity()
        if starts_at_zero:
            nn.init.zeros_(self.bn2.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = _relu(self.bn1(self.conv1(inputs)))
        return _relu(self.bn2(self.conv2(hidden)) + self.downsample(inputs))


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(
        self,
        before: int,
        width: int,
        stride: int,
        norm: Norm,
        *,
        projects: bool,
        starts_at_zero: bool,
    ) -> None:
        super().__init__()
        after = width * self.expansion
        self.conv1, self.bn1 = _convolution(before, width, 1, 1), norm(width)
        self.conv2, self.bn2 = _convolution(width, width, 3, stride), norm(width)
        self.conv3, self.bn3 = _convolution(width, after, 1, 1), norm(after)
        self.downsample = _projection(before, after, stride, norm) if projects else nn.Identity()
        if starts_at_zero:
            nn.init.zeros_(self.bn3.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = _relu(self.bn1(self.conv1(inputs)))
        hidden = _relu(self.bn2(self.conv2(hidden)))
        return _relu(self.bn3(self.conv3(hidden)) + self.downsample(inputs))


class _PreActivated(nn.Module):
    def __init__(self, before: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.bn1, self.conv1 = norm(before), _convolution(before, width, 3, stride)
        self.bn2, self.conv2 = norm(width), _convolution(width, width, 3, 1)
        projects = stride != 1 or before != width
        self.downsample = _convolution(before, width, 1, stride) if projects else nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        activated = _relu(self.bn1(inputs))
        hidden = _relu(self.bn2(self.conv1(activated)))
        result: Tensor = self.conv2(hidden) + self.downsample(activated)
        return result


def _layers(
    block: Callable[[int, int, int], nn.Module], depths: tuple[int, ...], width: int, expansion: int
) -> list[nn.Sequential]:
    """Four groups of blocks; each but the first halves the image and doubles the width."""
    layers, before = [], width
    for group, depth in enumerate(depths):
        blocks, after = [], width * 2**group
        for place in range(depth):
            stride = 2 if group and place == 0 else 1
            blocks.append(block(before, after, stride))
            before = after * expansion
        layers.append(nn.Sequential(*blocks))
    return layers


class _Narrow(nn.Conv2d):
    """A 1×1 convolution with stride and few inputs that avoids a crash of torch 2.13 on CPUs.

    torch writes the gradient outside of its memory if the inputs are channels_last and have 50 × 50
    pixels or more, or an odd number of images for several threads. The process then dies without a
    message. A convolution without stride on every second pixel gives the same result.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu" or not input.requires_grad:
            return super().forward(input)
        down, right = self.stride
        return functional.conv2d(input[:, :, ::down, ::right], self.weight)


def _convolution(before: int, after: int, size: int, stride: int) -> nn.Conv2d:
    kind = _Narrow if size == 1 and stride > 1 and before < 16 else nn.Conv2d
    convolution = kind(before, after, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return convolution


def _projection(before: int, after: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(_convolution(before, after, 1, stride), norm(after))


def _relu(values: Tensor) -> Tensor:
    return functional.relu(values, inplace=True)
