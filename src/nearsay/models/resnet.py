"""Residual networks: for small images as on CIFAR, and for 224 pixels with the names and shapes of torchvision's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from nearsay.batch import Outputs
from nearsay.models.heads import Head, LinearHead, drawn
from nearsay.models.norm import BatchNorm, Statistics, check_statistics

Norm = Callable[[int], BatchNorm]
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


@dataclass(frozen=True, kw_only=True)
class ResNet:
    """He et al. 2015 (arXiv:1512.03385); depth 50 has bottlenecks that stride in their 3×3 convolution ("v1.5").

    Small images get a 3×3 convolution first; others a 7×7 of stride 2 and a maximum over 3×3 of stride 2. Widths are
    `width` times 1, 2, 4, 8 (and times 4 in bottlenecks). `projection="all"` puts a convolution into every shortcut,
    `zero_last_gamma` starts every block as its shortcut; the released code does both, the paper says nothing of it.
    """

    depth: Literal[18, 34, 50] = 18
    small_images: bool = True
    projection: Literal["first", "all"] = "first"
    zero_last_gamma: bool = False
    width: int = 64
    statistics: Statistics = (
        "global"  # of batch normalization under several processes; released code: "process"
    )
    head: Head = LinearHead()  # noqa: RUF009 — frozen, so it may be shared

    def __post_init__(self) -> None:
        _check_choices(self.width, self.statistics)
        if self.depth not in BLOCKS:
            raise ValueError(
                f"depth is {self.depth}; it must be one of {', '.join(map(str, BLOCKS))}"
            )
        if self.projection not in ("first", "all"):
            raise ValueError(f'projection is {self.projection!r}; it must be "first" or "all"')

    def build(self, num_classes: int, *, num_inputs: int = 3, seed: int = 0) -> nn.Module:
        """A module from (B, num_inputs, H, W) images to `Outputs`; features are averages over places, after a ReLU."""
        norm = partial(BatchNorm, statistics=self.statistics)
        kind = _Bottleneck if self.depth == 50 else _Basic

        def block(before: int, width: int, stride: int) -> nn.Module:
            projects = self.projection == "all" or stride != 1 or before != width * kind.expansion
            return kind(
                before, width, stride, norm, projects=projects, starts_at_zero=self.zero_last_gamma
            )

        num_features = 8 * self.width * kind.expansion
        with drawn(seed):
            first = _convolution(num_inputs, self.width, *((3, 1) if self.small_images else (7, 2)))
            layers = _layers(block, BLOCKS[self.depth], self.width, kind.expansion)
            head = self.head.build(num_features, num_classes)
            return _Network(
                first, norm(self.width), layers, head, num_features, has_pool=not self.small_images
            )


@dataclass(frozen=True, kw_only=True)
class PreActResNet18:
    """The pre-activation network of the public DivideMix and ELR+ code, for small images.

    It differs from He et al. 2016 (arXiv:1603.05027) in three ways: the first convolution is followed by normalization
    and ReLU, nothing of the kind stands before the average at the end, so that features may be negative, and a shortcut
    starts after the activation of its block even where it has no convolution.
    """

    width: int = 64
    statistics: Statistics = "global"  # of batch normalization under several processes
    head: Head = LinearHead()  # noqa: RUF009 — frozen, so it may be shared

    def __post_init__(self) -> None:
        _check_choices(self.width, self.statistics)

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
    """Convolution, normalization, four groups of blocks, average, head, by the names that torchvision gave them."""

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
        # In the precision of the weights: under autocast, features rounded to 16 bits would find other neighbors.
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
    """Four groups of blocks; each but the first halves the image, and each doubles the width of the one before."""
    layers, before = [], width
    for group, depth in enumerate(depths):
        blocks, after = [], width * 2**group
        for place in range(depth):
            blocks.append(block(before, after, 2 if group and place == 0 else 1))
            before = after * expansion
        layers.append(nn.Sequential(*blocks))
    return layers


class _Narrow(nn.Conv2d):
    """A 1×1 convolution with stride and few inputs, whose gradient torch 2.13 computes on CPUs outside of its memory.

    That is where these are channels_last: of 50 × 50 places or more, or an odd number of images for several threads.
    The process dies without a word. Without stride, on every second place, the same comes out.
    """

    def forward(self, input: Tensor) -> Tensor:  # torch's name
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


def _check_choices(width: int, statistics: str) -> None:
    check_statistics(statistics)
    if width < 1:
        raise ValueError(f"width is {width}; it must be at least 1, and is usually 64")
