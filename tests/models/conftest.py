"""A small stand-in for timm, which is not installed where these tests run: its names, and what they
do for us.
"""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

OFFLINE = "HF_HUB_OFFLINE"


class ActivatedNorm(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.drop, self.act = nn.Identity(), nn.ReLU()

    def forward(self, inputs):
        return self.act(self.drop(super().forward(inputs)))


class TinyNetwork(nn.Module):
    """As mobilenetv3 does, it widens its features after pooling; its classifier has two parts."""

    def __init__(self, num_inputs, num_classes):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(num_inputs, 6, 3, bias=False), ActivatedNorm(6)
        self.conv, self.bn = nn.Conv2d(6, 6, 3, bias=False), nn.BatchNorm2d(6)
        self.widen = nn.Linear(6, 10)
        if num_classes:
            self.head, self.head_dist = nn.Linear(10, num_classes), nn.Linear(10, num_classes)
        self.num_features, self.head_hidden_size = 6, 10
        self.pretrained_cfg = {"classifier": ("head", "head_dist")}

    def forward_features(self, inputs):
        return self.bn(self.conv(self.norm(self.stem(inputs))))

    def forward_head(self, features, pre_logits=False):
        assert pre_logits
        return self.widen(features.mean(dim=(2, 3)))


class Narrow(TinyNetwork):
    """Does not widen, and does not know the word."""

    def __init__(self, num_inputs, num_classes):
        super().__init__(num_inputs, num_classes)
        del self.widen, self.head_hidden_size

    def forward_head(self, features, pre_logits=False):
        return features.mean(dim=(2, 3))


class Unpooled(Narrow):
    def forward_head(self, features, pre_logits=False):
        return features


NETWORKS = {"tiny": TinyNetwork, "narrow": Narrow, "unpooled": Unpooled}
PUBLISHED = {
    "tiny": SimpleNamespace(hf_hub_id="timm/tiny.a1", url=None),
    "narrow": SimpleNamespace(hf_hub_id=None, url="https://example.org/narrow.pth"),
    "unpooled": None,
}


def make_timm():
    timm, constants = ModuleType("timm"), ModuleType("huggingface_hub.constants")
    constants.HF_HUB_OFFLINE = False
    constants.tried = []  # whether each wish for weights went to the network
    constants.cached = False

    def create_model(name, *, pretrained, num_classes, in_chans):
        if name not in NETWORKS:
            raise RuntimeError("Invalid pretrained tag")
        network = NETWORKS[name](in_chans, num_classes)
        if pretrained:
            is_offline = constants.HF_HUB_OFFLINE and os.environ.get(OFFLINE) == "1"
            constants.tried.append(not is_offline)
            if not constants.cached:
                raise OSError("we cannot reach it.\nPlease try again.")
            with torch.no_grad():
                network.widen.bias.fill_(7)
        return network

    timm.create_model = create_model
    timm.list_models = lambda: list(NETWORKS)
    timm.get_pretrained_cfg = PUBLISHED.__getitem__
    return timm, constants


@pytest.fixture(autouse=True)
def hub(monkeypatch):
    """timm and what it downloads with, as if both had been imported before."""
    timm, constants = make_timm()
    monkeypatch.setitem(sys.modules, "timm", timm)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", constants)
    monkeypatch.delenv(OFFLINE, raising=False)
    return constants
