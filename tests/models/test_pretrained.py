"""Networks of timm, with the stand-in of conftest.py, and weights from files."""

import os
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from nearsay.models import ResNet, Timm, load_weights

OFFLINE = "HF_HUB_OFFLINE"


def write(folder, state, name="weights.safetensors"):
    save_file({key: value.contiguous() for key, value in state.items()}, folder / name)
    return folder / name


def small(num_classes=5, seed=0, **choices):
    return ResNet(width=2, **choices).build(num_classes, seed=seed)


def test_features_are_as_wide_as_what_enters_the_classifier():
    assert Timm(name="tiny").build(5).num_features == 10  # not the 6 before its last layer
    assert Timm(name="narrow").build(5).num_features == 6


def test_network_without_pooled_features_is_refused():
    network = Timm(name="unpooled").build(5)
    with pytest.raises(ValueError, match="features"):
        network(torch.zeros(2, 3, 8, 8))


def test_unknown_name_is_refused():
    for name in ("tinny", "tiny.b9"):
        with pytest.raises(ValueError, match=name):
            Timm(name=name).build(5)


def test_missing_timm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"\[vision\]"):
        Timm(name="tiny").build(5)


@pytest.mark.parametrize("code", ["import no_such_module", "raise RuntimeError('no_such_module')"])
def test_what_timm_itself_misses_is_not_blamed_on_timm(monkeypatch, tmp_path, code):
    (tmp_path / "timm.py").write_text(code)
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="no_such_module"):
        Timm(name="tiny").build(5)


def test_weights_come_from_a_file_without_its_classifier(tmp_path):
    donor = sys.modules["timm"].create_model("tiny", pretrained=False, num_classes=9, in_chans=3)
    path = write(tmp_path, donor.state_dict())
    assert "head_dist.weight" in load_file(path)
    body = Timm(name="tiny", weights=str(path)).build(5).body.state_dict()
    expected = {name: value for name, value in donor.state_dict().items() if name in body}
    assert_close(body, expected, rtol=0, atol=0)
    path = write(tmp_path, small().state_dict())
    with pytest.raises(ValueError, match="lacks"):
        Timm(name="tiny", weights=str(path)).build(5)


def test_published_weights_on_this_machine_are_taken_without_the_network(hub):
    hub.cached = True
    network = Timm(name="tiny", weights="timm").build(5)
    assert_close(network.body.widen.bias, torch.full((10,), 7.0))
    assert hub.tried == [False]


@pytest.mark.parametrize("wished", [None, "0", "1"])
def test_without_leave_nothing_is_downloaded(hub, monkeypatch, wished):
    if wished is not None:
        monkeypatch.setenv(OFFLINE, wished)
    with pytest.raises(ValueError, match="download=True"):
        Timm(name="tiny", weights="timm").build(5)
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
    with pytest.raises(ValueError, match="downloaded"):
        Timm(name="tiny", weights="timm", download=True).build(5)
    assert hub.tried == [True]


def test_weights_that_do_not_come_from_the_hub_need_leave_or_do_not_exist(hub):
    with pytest.raises(ValueError, match="download"):
        Timm(name="narrow", weights="timm").build(5)
    with pytest.raises(ValueError, match="timm"):
        Timm(name="unpooled", weights="timm", download=True).build(5)
    assert hub.tried == []


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
    del state["bn1.running_mean"]
    with pytest.raises(ValueError, match=r"bn1\.running_mean"):
        load_weights(small(), write(tmp_path, state))
    # "fc_norm" only begins like the head, so skip_head does not skip it.
    more = {"fc_norm.weight": torch.zeros(1), "conv1.weight": torch.zeros(2, 3, 5, 5)}
    with pytest.raises(ValueError, match="network") as caught:
        load_weights(small(), write(tmp_path, state | more), skip_head=True)
    for words in ("bn1.running_mean", "fc_norm.weight", "conv1.weight (2, 3, 5, 5)"):
        assert words in str(caught.value)


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


def test_file_of_another_kind_or_none_is_refused(tmp_path):
    path = tmp_path / "weights.pth"
    for content in (None, b"", b"\x80\x02not safetensors"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=r"weights\.pth"):
            load_weights(small(), path)
