"""Networks of timm, with the stand-in of conftest.py, and weights from files."""

import os
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

from nearsay.models import CosineHead, ResNet, Timm, load_weights
from nearsay.models.norm import BatchNorm

OFFLINE = "HF_HUB_OFFLINE"


def write(folder, state, name="weights.safetensors"):
    save_file({key: value.contiguous() for key, value in state.items()}, folder / name)
    return folder / name


def small(num_classes=5, seed=0, **choices):
    return ResNet(width=2, **choices).build(num_classes, seed=seed)


def test_features_are_as_wide_as_what_enters_the_classifier():
    assert Timm(name="tiny").build(5).num_features == 10  # not the 6 before its last layer
    assert Timm(name="narrow").build(5).num_features == 6


def test_every_normalization_of_timm_counts_all_processes():
    network = Timm(name="tiny").build(5)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 2
    assert all(isinstance(norm, BatchNorm) for norm in norms)


def test_network_without_pooled_features_is_refused():
    network = Timm(name="unpooled").build(5)
    with pytest.raises(ValueError, match="features"):
        network(torch.zeros(2, 3, 8, 8))


def test_head_is_not_drawn_from_the_numbers_of_the_body():
    network = Timm(name="tiny", head=CosineHead()).build(5)
    first = network.body.stem.weight.flatten()
    numbers = network.fc.weight.flatten()[: len(first)]
    assert abs(torch.corrcoef(torch.stack([first[: len(numbers)], numbers]))[0, 1]) < 0.5


def test_unknown_name_is_refused_with_those_nearby():
    with pytest.raises(ValueError, match="'tinny'"):
        Timm(name="tinny").build(5)
    with pytest.raises(ValueError, match=r"timm cannot build 'tiny.b9': Invalid pretrained tag"):
        Timm(name="tiny.b9").build(5)


def test_missing_timm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=re.escape('pip install ".[vision]" in the clone')):
        Timm(name="tiny").build(5)


def test_broken_torchvision_is_one_sentence(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist\\nmore')"
    )
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ImportError,
        match=r"^timm cannot be imported \(operator torchvision::nms does not exist\); let",
    ):
        Timm(name="tiny").build(5)


def test_what_timm_itself_misses_is_not_blamed_on_timm(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("import no_such_module")
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        Timm(name="tiny").build(5)


def test_weights_come_from_a_file_without_its_classifier(tmp_path):
    donor = sys.modules["timm"].create_model("tiny", pretrained=False, num_classes=9, in_chans=3)
    path = write(tmp_path, donor.state_dict())
    assert "head_dist.weight" in load_file(path)
    network = Timm(name="tiny", weights=str(path)).build(5)
    body = network.body.state_dict()
    assert_close(
        body,
        {name: value for name, value in donor.state_dict().items() if name in body},
        rtol=0,
        atol=0,
    )


def test_file_of_another_network_is_refused(tmp_path):
    path = write(tmp_path, small().state_dict())
    with pytest.raises(
        ValueError,
        match="lacks",
    ):
        Timm(name="tiny", weights=str(path)).build(5)


def test_published_weights_on_this_machine_are_taken_without_the_network(hub):
    hub.cached = True
    network = Timm(name="tiny", weights="timm").build(5)
    assert_close(network.body.widen.bias, torch.full((10,), 7.0))
    assert hub.tried == [False]


@pytest.mark.parametrize("wished", [None, "0", "1"])
def test_without_leave_nothing_is_downloaded_and_the_cure_is_named(hub, monkeypatch, wished):
    if wished is not None:
        monkeypatch.setenv(OFFLINE, wished)
    with pytest.raises(ValueError, match="weights") as caught:
        Timm(name="tiny", weights="timm").build(5)
    assert "download=True" in str(caught.value)
    assert "model.safetensors of https://huggingface.co/timm/tiny.a1" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hub.tried == [False]
    assert os.environ.get(OFFLINE) == wished
    assert hub.HF_HUB_OFFLINE is False


@pytest.mark.parametrize(("wished", "expected"), [(None, False), ("1", True)])
def test_library_imported_meanwhile_may_download_later(hub, monkeypatch, wished, expected):
    """It takes what it finds in the environment when it is imported, which here is while nothing is
    allowed.
    """
    if wished is not None:
        monkeypatch.setenv(OFFLINE, wished)
    monkeypatch.delitem(sys.modules, "huggingface_hub.constants")
    timm = sys.modules["timm"]

    def list_models():
        hub.HF_HUB_OFFLINE = os.environ[OFFLINE] == "1"
        sys.modules["huggingface_hub.constants"] = hub
        return ["tiny"]

    monkeypatch.setattr(timm, "list_models", list_models)
    with pytest.raises(ValueError, match="not on this machine"):
        Timm(name="tiny", weights="timm").build(5)
    assert hub.tried == [False]
    assert hub.HF_HUB_OFFLINE is expected


def test_with_leave_the_network_is_tried(hub):
    with pytest.raises(ValueError, match="downloaded") as error:
        Timm(name="tiny", weights="timm", download=True).build(5)
    assert "download=True" not in str(error.value)
    assert hub.tried == [True]


def test_weights_that_do_not_come_from_the_hub_need_leave_as_well(hub):
    with pytest.raises(ValueError, match="download"):
        Timm(name="narrow", weights="timm").build(5)
    assert hub.tried == []


def test_network_without_published_weights_says_so():
    with pytest.raises(ValueError, match="timm"):
        Timm(name="unpooled", weights="timm", download=True).build(5)


def test_other_number_of_classes_is_refused_unless_the_head_is_skipped(tmp_path):
    donor, network = small(9, seed=1), small(5, seed=2)
    path = write(tmp_path, donor.state_dict())
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with pytest.raises(ValueError, match=r"fc\.weight") as caught:
        load_weights(network, path)
    assert str(path) in str(caught.value)
    assert_close(network.state_dict(), before, rtol=0, atol=0)  # all or nothing
    load_weights(network, path, skip_head=True)
    for name, value in network.state_dict().items():
        assert torch.equal(
            value, before[name] if name.startswith("fc.") else donor.state_dict()[name]
        ), name


def test_head_is_skipped_even_where_it_would_fit(tmp_path):
    donor, network = small(seed=1), small(seed=2)
    before = network.fc.weight.detach().clone()
    load_weights(network, write(tmp_path, donor.state_dict()), skip_head=True)
    assert torch.equal(network.fc.weight, before)
    assert torch.equal(network.conv1.weight, donor.conv1.weight)


def test_what_is_missing_unexpected_or_of_another_shape_is_named(tmp_path):
    state = small().state_dict()
    del state["bn1.weight"]
    state["extra.weight"] = torch.zeros(1)
    state["conv1.weight"] = torch.zeros(2, 3, 5, 5)
    with pytest.raises(ValueError, match="fit") as caught:
        load_weights(small(), write(tmp_path, state))
    text = str(caught.value)
    assert "lacks bn1.weight;" in text
    assert "extra.weight" in text
    assert "conv1.weight (2, 3, 5, 5)" in text
    # It would not help here.
    assert "skip_head" not in text
    assert "\n" not in text


def test_file_that_lacks_something_is_refused(tmp_path):
    state = small().state_dict()
    del state["layer1.0.bn1.running_mean"]
    with pytest.raises(
        ValueError,
        match="lacks",
    ):
        load_weights(small(), write(tmp_path, state))


def test_names_that_only_begin_like_the_head_are_not_skipped(tmp_path):
    state = small().state_dict() | {"fc_norm.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="network"):
        load_weights(small(), write(tmp_path, state), skip_head=True)


def test_file_may_lack_the_count_of_batches(tmp_path):
    donor = small(seed=1)
    state = {name: value for name, value in donor.state_dict().items() if "num_batches" not in name}
    network = small(seed=2)
    load_weights(network, write(tmp_path, state))
    assert torch.equal(network.layer4[1].bn2.weight, donor.layer4[1].bn2.weight)


def test_weights_are_copied_into_the_precision_and_layout_of_the_network(tmp_path):
    donor, network = small(seed=1), small(seed=2).double().to(memory_format=torch.channels_last)
    place = network.conv1.weight.data_ptr()
    load_weights(network, write(tmp_path, donor.state_dict()))
    assert_close(network.conv1.weight, donor.conv1.weight.double(), rtol=0, atol=0)
    assert network.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    assert network.conv1.weight.data_ptr() == place
    assert network.conv1.weight.requires_grad


@pytest.mark.parametrize("content", [b"", b"\x80\x02not safetensors"])
def test_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "weights.pth").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.pth"):
        load_weights(small(), tmp_path / "weights.pth")


def test_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="file"):
        load_weights(small(), tmp_path / "nowhere")
