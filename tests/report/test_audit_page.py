"""The page of an audited run: its words and pictures; hostile text stays text."""

import base64
import hashlib
import io
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from markupsafe import Markup
from PIL import Image

from nearsay.batch import Files
from nearsay.report import audit_page, charts
from nearsay.report.audit_examples import MOST_POINTS, choose_points, place
from nearsay.report.findings import SIDE, Album
from nearsay.training.progress import plain
from report.making import CLASSES, PAYLOADS, Reader, make_findings, render_with


@pytest.fixture
def quick(monkeypatch):
    """Without drawing, for tests of the words."""
    monkeypatch.setattr(charts, "_drawn", lambda chart: Markup("<svg></svg>"))


def read(findings):
    return Reader(audit_page.render(findings))


def with_audit(findings, **changes):
    return replace(findings, audit=replace(findings.audit, **changes))


# Words


def test_the_summary_says_how_many_are_wrong_what_is_confused_and_what_to_do(quick):
    words = read(make_findings(CLASSES, name="my run")).words("In short")
    assert words.startswith("15labels of 15 examples3seem wrong another label is likelier")
    assert "1 labeled dog that seems to be cat" in words
    assert re.search(r"about \d+ to find 80 %, \d+ to find 90 %, \d+ to find 95 %", words)
    assert "3 labels (20.0 %) are wrong" in words
    assert "in 98.7 % of pairs" in words
    assert "nearsay review 'my run'" in words
    assert "--set labels_file='my run'/cleaned.npz" in words
    assert "Beware" not in words


@pytest.mark.parametrize(("num_issues", "has"), [(0, "0 have a"), (1, "1 has a"), (2, "2 have a")])
def test_where_no_label_seems_wrong_nothing_is_left_to_do(quick, num_issues, has):
    findings = make_findings(CLASSES)
    is_issue = findings.audit.is_issue & (findings.audit.is_issue.cumsum(0) <= num_issues)
    summary = findings.summary | {"num_issues": num_issues}
    findings = replace(with_audit(findings, is_issue=is_issue), summary=summary)
    reader = read(findings)
    assert ("No label seems wrong" in reader.words("In short")) == (num_issues == 0)
    assert ("nearsay clean" in reader.words("In short")) == (num_issues > 0)
    assert f"{has} suspicious label" in reader.words("Map of the examples")
    assert "nearsay clean" in read(replace(findings, corrections={3: 1})).words("In short")


def test_the_share_of_wrong_labels_leaves_out_examples_without_a_label(quick):
    findings = make_findings(CLASSES)
    right = (~findings.is_wrong()).nonzero()[:10, 0]
    given = findings.audit.given.index_fill(0, right, -1)  # of 15
    words = read(with_audit(findings, given=given)).words("In short")
    assert "3 labels (60.0 %) are wrong" in words


def test_an_audit_with_a_doubt_shows_it_at_the_top(quick):
    words = read(make_findings(CLASSES, doubt="so <b>many</b> are wrong")).words("In short")
    assert "Beware: so <b>many</b> are wrong." in words


def test_without_the_truth_labels_are_split_by_the_audit(quick):
    reader = read(make_findings(CLASSES, knows_truth=False))
    assert "truth" not in reader.words("In short") + reader.words("The most suspicious labels")
    assert "12 other labels and 3 suspicious labels" in reader.words("How labels are judged")


def test_histograms_are_of_right_and_of_wrong_labels(quick, monkeypatch):
    calls = []

    def record(histograms, *, title, **named):
        calls.append((title, dict(histograms)))
        return Markup("")

    monkeypatch.setattr(charts, "histogram", record)
    read(make_findings(CLASSES))
    score, network, _, agreement = calls
    assert network[0] == "confidence in the given label (%)"
    assert list(network[1]) == ["right label", "wrong label"]
    assert [(shares[0], shares[-1]) for shares in network[1].values()] == [(0, 100), (100, 0)]
    assert [shares[0] for shares in agreement[1].values()] == [0, 100]
    assert sum(score[1]["wrong label"][:10]) == 100


@pytest.mark.parametrize(("num_classes", "has_map"), [(2, True), (30, True), (31, False)])
def test_a_large_matrix_is_shown_by_its_largest_cells(quick, monkeypatch, num_classes, has_map):
    calls = []
    monkeypatch.setattr(charts, "heat_map", lambda *shares, **_: calls.append(shares) or Markup(""))
    reader = read(make_findings([f"class {number}" for number in range(num_classes)]))
    words = reader.words("Which labels are confused")
    assert len(calls) == has_map
    if has_map:
        assert calls[0][0][0][:2] == [80, 20]
    else:
        assert "The 20 largest of 930 ways to be wrong." in words
        assert "class 0class 120.0class 1class 220.0" in words


def test_a_card_shows_labels_score_decision_and_the_nearest_with_theirs(quick):
    findings = make_findings(CLASSES, corrections={4: 2, 9: -1})
    words = read(findings).words("The most suspicious labels")
    assert "3 suspicious labels; the lowest score" in words
    assert "The first" not in words
    cards = {}
    for text, number in re.findall(r"(given\w+seems.*?)\d+\. example (\d+)", words):
        cards[int(number)] = text
    assert cards[4].startswith("givendogseemscat ")
    assert "truthcat" in cards[4]
    assert "by handemu" in cards[4]
    assert "by handlabel dropped" in cards[9]
    assert "by hand" not in cards[14]
    assert re.search(r"score0\.\d{3}(cat\d+){3}cat", cards[4])


def test_an_example_without_a_label_differs_from_no_near_duplicate(quick):
    findings = make_findings(CLASSES)
    findings.audit.evidence.groups[:] = torch.tensor([0, 0, 1, 1, 2, 2, 2, *[-1] * 8])
    findings.audit.given[:7] = torch.tensor([-1, 0, -1, -1, 1, -1, 0])
    words = read(findings).words("Near-duplicates")
    assert "3 groups of examples that are nearly the same; in 1 of them the labels differ." in words
    mixed = "labels differdog#4no label#5cat#6"
    half = "same label, where there is oneno label#0cat#1"
    assert words.endswith(f"{mixed}{half}no labelno label#2no label#3")


def test_files_that_cannot_be_read_are_listed_with_the_reason(quick, tmp_path):
    names = tuple(f"{number}.png" for number in range(17))
    (tmp_path / "15.png").write_bytes(b"no image")
    findings = make_findings(
        ["a", "b", "c"], inputs=Files(tmp_path, names), unreadable={15: "b", 16: ""}
    )
    words = read(findings).words("Unreadable files")
    assert "not judged: 2 examples." in words
    assert re.search(r"1515\.pngb\w.*JPEG.*1616\.pngno label\w", words)
    assert str(tmp_path) not in words


# Pictures


def test_tiny_images_keep_every_pixel_and_large_ones_are_made_small(tmp_path):
    images = torch.arange(2 * 3 * 8 * 8).reshape(2, 3, 8, 8).to(torch.uint8)
    address = Album(images).address(1)
    assert torch.equal(pixels(address), images[1])
    Image.effect_noise((400, 200), 50).convert("RGB").save(tmp_path / "a.png")
    album = Album(Files(tmp_path, ("a.png", "gone.png")))
    assert album.address(0).startswith("data:image/jpeg;base64,")
    assert pixels(album.address(0)).shape == (3, SIDE // 2, SIDE)
    assert album.address(1) is None


@pytest.mark.parametrize(
    ("inputs", "has_pictures"),
    [
        (torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), True),
        (torch.full((2, 3, 8, 8), 7, dtype=torch.uint8), True),
        (torch.full((2, 5, 8, 8), 7, dtype=torch.uint8), False),
        (torch.rand(2, 3, 8, 8), False),
    ],
)
def test_only_tensors_of_images_have_pictures(inputs, has_pictures):
    album = Album(inputs)
    assert album.has_pictures == has_pictures
    assert (album.address(0) is not None) == has_pictures
    assert len(album.sheets([0, 1]).addresses) == has_pictures


def test_a_tile_of_a_sheet_shows_its_example():
    images = (torch.arange(300) % 250).to(torch.uint8)[:, None, None, None].repeat(1, 3, 8, 8)
    asked = [299, *range(280)]
    sheets = Album(images).sheets(asked)
    assert (len(sheets.addresses), sheets.side, sheets.columns) == (2, 8, 16)
    decoded = list(map(pixels, sheets.addresses))
    for index, tile in zip(asked, sheets.places, strict=True):
        sheet, within = divmod(tile, 256)
        top, left = within // 16 * 8, within % 16 * 8
        shown = decoded[sheet][:, top : top + 8, left : left + 8].float().mean()
        assert shown == pytest.approx(index % 250, abs=2)


def test_pictures_end_at_the_limit_of_bytes(tmp_path, monkeypatch):
    for number in range(3):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    size = (tmp_path / "0.png").stat().st_size
    monkeypatch.setattr("nearsay.report.findings._MOST_BYTES", 2 * size)
    album = Album(Files(tmp_path, ("0.png", "1.png", "2.png")))
    has_picture = [album.address(number) is not None for number in (0, 1, 2, 0)]
    assert has_picture == [True, True, False, True]
    assert album.num_left_out == 1


def pixels(address):
    content = base64.b64decode(address.partition(",")[2])
    image = Image.open(io.BytesIO(content)).convert("RGB")
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, 3).permute(2, 0, 1)


# The map


def test_the_map_holds_the_most_suspicious_and_a_draw_that_stays():
    order = torch.arange(9000).flip(0)
    chosen = choose_points(order, 9000)
    assert len(chosen) == MOST_POINTS == len(set(chosen.tolist()))
    assert set(range(8000, 9000)) <= set(chosen.tolist())
    assert torch.equal(chosen, choose_points(order, 9000))
    assert choose_points(order[:3], 9000)[-3:].tolist() == [8997, 8998, 8999]
    assert choose_points(torch.tensor([1]), 4).tolist() == [0, 1, 2, 3]


def test_similar_features_are_near_on_the_map():
    kinds = torch.arange(90) % 3
    noise = torch.randn(90, 8, generator=torch.Generator().manual_seed(0))
    features = 5 * torch.eye(3, 8)[kinds] + 0.1 * noise
    where = place(features, torch.arange(90))
    distances = torch.cdist(where, where).fill_diagonal_(torch.inf)
    assert torch.equal(kinds[distances.argmin(dim=1)], kinds)
    assert (where.min().item(), where.max().item()) == (0, 1)
    assert torch.equal(where, place(features, torch.arange(90)))


@pytest.mark.parametrize(
    "features", [torch.ones(30, 4), torch.eye(3), torch.ones(1, 1), torch.zeros(12, 2)]
)
def test_features_that_cannot_be_spread_have_a_map_too(features):
    where = place(features, torch.arange(len(features)))
    assert where.shape == (len(features), 2)
    assert ((where >= 0) & (where <= 1)).all()


def test_the_script_gets_all_that_it_draws(quick):
    images = torch.arange(15).to(torch.uint8)[:, None, None, None].repeat(1, 3, 8, 8)
    points = read(make_findings(CLASSES, inputs=images)).points()
    assert points["classes"] == list(CLASSES)
    assert points["given"][:5] == [0, 0, 0, 0, 1]
    assert points["seems"][:5] == [0] * 5
    assert [number for number, is_issue in enumerate(points["issue"]) if is_issue] == [4, 9, 14]
    assert sorted(points["tile"]) == list(range(15))
    assert points["tile"][4] == 0  # pictures of the suspicious are read first


# Safety

WORDS = [f"word {number}" for number in range(len(PAYLOADS))]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A harmless page and a hostile one of the same shape."""
    root = tmp_path_factory.mktemp("root")
    with pytest.MonkeyPatch.context() as patch:
        return [render_with(texts, root, patch) for texts in (WORDS, PAYLOADS)]


@pytest.fixture(scope="module")
def readers(pages):
    return [Reader(page) for page in pages]


def is_shown(place, reader, text):
    """Whether a part of the page shows the text as that place puts it."""
    suspects = reader.parts["The most suspicious labels"]
    places = {
        "file name": f"{text} 0" in reader.points()["file"],
        "label": f"given{text}seems" in suspects,
        "class": text in reader.points()["classes"],
        "config": text in reader.parts["The experiment"],
        "error text": f"{text} went wrong" in reader.parts["Unreadable files"],
        "corrections": f"by hand{text}score" in suspects,
    }
    return places[place]


def test_a_hostile_text_is_text(readers):
    harmless, hostile = readers
    for where in ("file name", "label", "class", "config", "error text", "corrections"):
        assert [word for word in WORDS if not is_shown(where, harmless, word)] == [], where
        assert [t for t in PAYLOADS if not is_shown(where, hostile, plain(t))] == [], where


def test_hostile_texts_add_no_element_no_attribute_and_no_script(readers):
    harmless, hostile = readers
    assert Counter(hostile.tags) == Counter(harmless.tags)
    names = [Counter((tag, name) for tag, name, _ in reader.attributes) for reader in readers]
    assert names[0] == names[1]
    active = [name for _, name in names[1] if name.startswith("on") or name in ("srcset", "action")]
    assert active == []
    assert [kind for kind, _ in hostile.scripts] == ["application/json", None]
    assert hostile.scripts[1] == harmless.scripts[1]


def test_only_our_own_script_may_run_and_nothing_is_fetched(pages, readers):
    for page, reader in zip(pages, readers, strict=True):
        digest = base64.b64encode(hashlib.sha256(reader.scripts[1][1].encode()).digest()).decode()
        policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        policy += f"script-src 'sha256-{digest}'"
        contents = [value for _, name, value in reader.attributes if name == "content"]
        assert any(policy in content for content in contents)
        for _, name, value in reader.attributes:
            assert name not in ("src", "href", "xlink:href") or value.startswith("data:")
        data = page.partition('id="atlas-data">')[2].partition("</script>")[0]
        assert not set("<>&\u2028\u2029") & set(data)
    assert "@import" not in pages[0]
    assert "url(" not in pages[0]


def test_the_same_findings_give_the_same_bytes():
    pages = [audit_page.render(make_findings(CLASSES)) for _ in range(2)]
    assert pages[0] == pages[1]
