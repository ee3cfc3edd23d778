import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance
from sklearn.datasets import load_sample_images
from torch.testing import assert_close

from nearsay.label_issues import audit, duplicates, scores


@pytest.fixture(scope="module")
def tiles():
    """(N, 3, 32, 32) parts of two photographs that do not overlap, shrunk to half."""
    found = []
    for photo in load_sample_images().images:
        rows, columns = photo.shape[0] // 64, photo.shape[1] // 64
        cut = (
            photo[: rows * 64, : columns * 64]
            .reshape(rows, 64, columns, 64, 3)
            .swapaxes(1, 2)
            .reshape(-1, 64, 64, 3)
        )
        found += [
            np.asarray(Image.fromarray(tile).resize((32, 32), Image.Resampling.BOX)) for tile in cut
        ]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).contiguous()


def changed(image, kind):
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    if kind == "crop":
        picture = picture.crop((1, 3, 29, 31)).resize((32, 32), Image.Resampling.BICUBIC)
    if kind == "jpeg":
        content = io.BytesIO()
        picture.save(content, "JPEG", quality=60)
        picture = Image.open(content).convert("RGB")
    if kind == "resize":
        picture = picture.resize((22, 22), Image.Resampling.BILINEAR).resize(
            (32, 32), Image.Resampling.BICUBIC
        )
    if kind == "brightness":
        picture = ImageEnhance.Brightness(picture).enhance(1.05)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def busy(tiles):
    """Those with something to see on them."""
    return tiles.float().mean(dim=1).flatten(1).std(dim=1) > 20


@pytest.mark.parametrize("kind", ["crop", "jpeg", "resize", "brightness"])
def test_a_changed_picture_is_the_same_and_no_other_is(tiles, kind):
    tiles = tiles[busy(tiles)]
    copies = torch.stack([changed(image, kind) for image in tiles[:20]])
    found = duplicates.same_pictures(duplicates.shrink(torch.cat([tiles, copies])))
    wanted = {(number, len(tiles) + number) for number in range(20)}
    assert len(wanted & set(map(tuple, found.tolist()))) >= 19
    assert len(set(map(tuple, found.tolist())) - wanted) <= 1


def test_parts_of_one_photograph_are_not_the_same(tiles):
    assert len(duplicates.same_pictures(duplicates.shrink(tiles[busy(tiles)]))) == 0


def test_equal_pictures_of_one_color_are_the_same_and_others_are_not():
    levels = torch.tensor([0, 90, 0, 200, 90, 0], dtype=torch.uint8)
    images = levels[:, None, None, None].expand(-1, 3, 32, 32)
    groups = scores.connected_components(6, *duplicates.same_pictures(duplicates.shrink(images)).T)
    assert groups.tolist() == [0, 1, 0, -1, 1, 0]


def test_two_colors_of_one_gray_are_not_the_same_picture():
    colors = torch.tensor(
        [[255, 0, 0], [76, 76, 76], [0, 130, 0], [76, 76, 76], [255, 0, 0], [0, 0, 255]]
    )
    thumbnails = duplicates.shrink(colors.byte()[:, :, None, None].expand(-1, -1, 32, 32))
    assert thumbnails.gray[:5].unique().tolist() == [76]
    assert sorted(map(tuple, duplicates.same_pictures(thumbnails).tolist())) == [(0, 4), (1, 3)]


def test_many_cells_hide_no_pair(tiles, monkeypatch):
    images = torch.cat(
        [tiles[busy(tiles)], *(changed(tile, "crop")[None] for tile in tiles[busy(tiles)][:10])]
    )
    thumbnails = duplicates.shrink(images)
    together = set(map(tuple, duplicates.same_pictures(thumbnails).tolist()))
    monkeypatch.setattr(duplicates, "_QUERIES", 7)
    assert set(map(tuple, duplicates.same_pictures(thumbnails).tolist())) == together
    assert len(together) >= 9


def test_pictures_that_come_one_by_one_give_the_same_thumbnails(tiles):
    together = duplicates.shrink(tiles[:4])
    alone = duplicates.shrink_each(image.permute(1, 2, 0).numpy() for image in tiles[:4])
    for one, other in zip(together, alone, strict=True):
        assert_close(one, other)


def test_an_audit_sees_duplicates_that_features_do_not_show(tiles):
    tiles = tiles[busy(tiles)]
    images = torch.cat([tiles, changed(tiles[0], "crop")[None]])
    features = torch.randn(len(images), 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(len(images)) % 2
    assert (audit(labels, features=features).duplicate_groups == -1).all()
    found = audit(labels, features=features, images=images)
    assert (found.duplicate_groups >= 0).nonzero()[:, 0].tolist() == [0, len(tiles)]
    thumbnails = audit(labels, features=features, images=duplicates.shrink(images))
    assert torch.equal(thumbnails.ood_scores, found.ood_scores)


def test_without_features_pictures_say_what_is_foreign_and_not_what_is_near(tiles):
    probabilities = torch.eye(2)[torch.arange(len(tiles)) % 2]
    found = audit(torch.arange(len(tiles)) % 2, probabilities=probabilities, images=tiles)
    assert found.evidence is None
    assert_close(found.ood_scores, duplicates.typicality_score(duplicates.shrink(tiles)))
    assert found.ood_scores.min() < found.ood_scores.max()


def test_short_features_are_foreign():
    angles = torch.linspace(0, 1, 30)
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    features[4] *= 0.25
    found = audit([0] * 30, features=features)
    assert int(found.ood_scores.argmin()) == 4
    assert_close(scores.length_score(found.evidence)[4:6], torch.tensor([0.25, 1.0]))


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(2, 3, 32, 32),
        torch.zeros(3, 3, 32, 32, dtype=torch.uint8),
        ["one.png", "two.png"],
        [np.zeros((3, 32, side), np.uint8) for side in (32, 16)],
        [Image.new("RGB", (32, 32))] * 2,
    ],
)
def test_images_that_do_not_fit_are_refused(images):
    with pytest.raises(ValueError, match=r"^images"):
        audit([0, 1], features=torch.eye(2), images=images)
