"""What is to be looked at, and what deciding does, without a network."""

import random
import threading

import numpy as np
import pytest

from nearsay.data import tables
from nearsay.errors import ImageError, RunError
from nearsay.review.examples import LARGE, SMALL, open_source
from nearsay.review.session import Conflict, Refused
from nearsay.training.run_folder import read_labels
from review.conftest import open_session, write_audit, write_run


def decided(session, index, decision, *, key=None, seen=None, **more):
    seen = session.changes(0) and session._revisions.get(index, 0) if seen is None else seen
    key = key or f"{random.random()}"
    return session.decide({"key": key, "index": index, "decision": decision, "seen": seen, **more})


def rows(folder):
    cells = tables.read(folder / "corrections.csv").columns
    return list(zip(*(cells[name] for name in ("index", "label", "decision")), strict=True))


def test_the_most_suspicious_comes_first_and_what_has_no_score_last(run):
    labels = read_labels(run)
    num = len(labels.given)
    scores = [None if index == 7 else round(abs(index - 100) / num, 6) for index in range(num)]
    write_audit(run, labels, label_score=scores)
    order = open_session(run).state()["index"]
    assert order[:5] == [100, 99, 101, 98, 102]
    assert order[-1] == 7
    assert open_session(run, limit=3).state()["index"] == [100, 99, 101]


def test_what_was_decided_is_shown_however_few_are(run):
    decided(open_session(run), 900, "keep")
    state = open_session(run, limit=2).state()
    assert state["index"] == [0, 1, 900]
    given = read_labels(run).given[900].item()
    standing = {"index": 900, "decision": "keep", "label": given, "revision": 1}
    assert state["standings"] == [standing]


def test_an_example_comes_with_its_evidence(run):
    labels = read_labels(run)
    shown = open_session(run).example(3)
    assert shown["given"] == labels.given[3]
    assert shown["suggested"] == (labels.given[3] + 1) % 10
    assert shown["probability"] == 0.9
    assert shown["score"] == round(3 / len(labels.given), 6)
    assert shown["details"] == {"ood_score": "0.5"}
    assert shown["neighbors"][1] == {"index": 5, "label": labels.given[5].item(), "similarity": 0.8}
    assert len(shown["neighbors"]) == 5


@pytest.mark.parametrize(
    "cell",
    [
        "",
        '[["a", "b", 1]]',
        "[[99999, 1, 0.5]]",
        "[" * 10000,
        '[[1, "0", NaN]]',
        '[[-1, "0", 0.5]]',
    ],
)
def test_neighbors_that_cannot_be_read_are_none(run, cell):
    labels = read_labels(run)
    write_audit(run, labels, neighbors=[cell] * len(labels.given))
    assert open_session(run).example(0)["neighbors"] == []


def test_each_decision_is_a_row_with_the_label_it_means(run):
    session = open_session(run)
    given = read_labels(run).given.tolist()
    decided(session, 0, "accept")
    decided(session, 1, "keep")
    decided(session, 2, "other", label=(given[2] + 5) % 10)
    decided(session, 3, "drop")
    decided(session, 4, "skip")
    decided(session, 5, "other", label=given[5])
    decided(session, 6, "other", label=(given[6] + 1) % 10)
    assert rows(run) == [
        ("0", str((given[0] + 1) % 10), "accept"),
        ("1", str(given[1]), "keep"),
        ("2", str((given[2] + 5) % 10), "other"),
        ("3", None, "drop"),
        ("4", str(given[4]), "skip"),
        ("5", str(given[5]), "keep"),
        ("6", str((given[6] + 1) % 10), "accept"),
    ]
    assert session.tally()[:2] == (6, 6)
    again = open_session(run)
    assert again.tally()[:2] == (0, 6)
    assert again.state()["standings"] == session.state()["standings"]


def test_undo_goes_back_one_decision_at_a_time_and_is_a_row_itself(run):
    session = open_session(run)
    given = read_labels(run).given[0].item()
    decided(session, 0, "accept")
    decided(session, 0, "drop")
    assert decided(session, 0, "undo")["decision"] == "accept"
    assert rows(run)[-1] == ("0", str((given + 1) % 10), "accept")
    assert decided(session, 0, "undo")["decision"] == ""
    assert rows(run)[-1] == ("0", str(given), "undo")
    decisions = [decision for _, _, decision in rows(run)]
    assert decisions == ["accept", "drop", "undo", "accept", "undo"]
    with pytest.raises(Refused, match="nothing to undo"):
        decided(session, 0, "undo")
    assert session.tally()[:2] == (0, 0)
    assert open_session(run).state()["standings"][0]["decision"] == ""
    decided(session, 1, "skip")
    assert decided(session, 1, "undo")["decision"] == ""


def test_undo_goes_as_far_back_after_a_restart_as_before(run):
    session = open_session(run)
    for decision in ("keep", "accept", "drop", "undo"):
        decided(session, 0, decision)
    again = open_session(run)
    assert again.state()["standings"] == session.state()["standings"]
    assert decided(again, 0, "undo")["decision"] == "keep"
    assert decided(open_session(run), 0, "undo")["decision"] == ""
    with pytest.raises(Refused, match="nothing to undo"):
        decided(open_session(run), 0, "undo")


def test_a_window_that_has_not_seen_the_last_decision_does_not_replace_it(run):
    session = open_session(run)
    first = decided(session, 0, "drop", key="one", seen=0)
    # The same request again writes nothing.
    assert decided(session, 0, "drop", key="one", seen=0) == first
    with pytest.raises(Conflict) as caught:
        decided(session, 0, "keep", seen=0)
    assert caught.value.standing == {"index": 0, "decision": "drop", "label": -1, "revision": 1}
    assert len(rows(run)) == 1
    assert decided(session, 0, "keep", seen=1)["revision"] == 2


def test_many_threads_lose_nothing(run):
    session = open_session(run)

    def work(first):
        for index in range(first, 200, 4):
            decided(session, index, "keep", seen=0)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(index) for index, _, _ in rows(run)) == list(range(200))
    assert session.changes(150)["version"] == 200
    assert len(session.changes(150)["standings"]) == 50


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ([], "object"),
        ({}, "key"),
        ({"key": "k", "index": True, "seen": 0}, "index .*'True'"),
        ({"key": "k", "index": 1347, "seen": 0}, "index .*1347"),
        ({"key": "k", "index": 0}, "seen .*'None'"),
        ({"key": "k", "index": 0, "seen": 0}, "decision .*'None'"),
        ({"key": "k", "index": 0, "seen": 0, "decision": "other", "label": 10}, "label .*'10'"),
        ({"key": "k", "index": 0, "seen": 0, "decision": "other", "label": "3"}, "label .*'3'"),
        ({"key": "k", "index": 0, "seen": 0, "decision": ["keep"]}, "decision"),
    ],
)
def test_invalid_decisions_are_refused(run, asked, part):
    with pytest.raises(Refused, match=part):
        open_session(run).decide(asked)
    assert not (run / "corrections.csv").exists()


def test_an_audit_that_was_made_anew_keeps_what_was_decided(run):
    decided(open_session(run), 0, "accept")
    labels = read_labels(run)
    num = len(labels.given)
    write_audit(run, labels, predicted_label=["3"] * num, label_score=[0.5] * num)
    standing = open_session(run).state()["standings"][0]
    assert standing["decision"] == "accept"
    assert standing["label"] == (labels.given[0] + 1) % 10


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda lines: None, "is missing"),
        (lambda lines: lines[:-1], "index"),
        (lambda lines: [lines[0].replace("label_score", "score"), *lines[1:]], "label_score"),
        (lambda lines: [lines[0], lines[1].replace("0.9,0.0", "0.9,low"), *lines[2:]], "low"),
        (lambda lines: [lines[0], lines[1].replace("0.9,0.0", "inf,0.0"), *lines[2:]], "inf"),
    ],
)
def test_a_run_without_a_fitting_audit_is_refused(run, change, part):
    path = run / "audit.csv"
    lines = change(path.read_text().splitlines(keepends=True))
    path.unlink() if lines is None else path.write_text("".join(lines))
    with pytest.raises(RunError) as caught:
        open_session(run)
    assert part in str(caught.value)
    assert caught.value.code == 65


# Pictures


def test_arrays_are_shown_pixel_by_pixel(run):
    from_array = open_session(run).pictures
    found = from_array.get(0)
    assert found.media_type == "image/png"
    assert found.content.startswith(b"\x89PNG")
    assert found.content == from_array.get(0, side=SMALL).content


def test_files_are_decoded_and_made_small(photos):
    pictures = open_session(photos).pictures
    large, small = (pictures.get(0, side=side) for side in (LARGE, SMALL))
    assert (large.media_type, small.media_type) == ("image/jpeg", "image/png")
    labels = read_labels(photos)
    broken = next(index for index, name in enumerate(pictures.inputs.names) if "broken" in name)
    with pytest.raises(ImageError, match=r"broken\.png"):
        pictures.get(broken)
    with pytest.raises(ImageError, match="no picture"):
        pictures.get(len(labels.given))


def test_features_have_no_pictures_and_their_neighbors_still_speak(features):
    session = open_session(features([f"class {number}" for number in range(12)], num_issues=3))
    state = session.state()
    assert state["has_pictures"] is False
    assert state["notes"] == []
    assert len(session.example(0)["neighbors"]) == 5
    with pytest.raises(ImageError):
        session.pictures.get(0)


def test_other_columns_of_a_table_of_labels_are_shown_and_doubted_once_the_features_are_others(
    tmp_path,
):
    features = np.random.default_rng(0).normal(size=(6, 4))
    np.save(tmp_path / "f.npy", features)
    lines = [f"{'cat' if number % 2 else 'dog'},text {number}" for number in range(6)]
    (tmp_path / "l.csv").write_text("\n".join(["label,text", *lines]) + "\n")
    words = [f"path={tmp_path / 'f.npy'}", f"labels={tmp_path / 'l.csv'}"]
    folder = write_run(tmp_path / "run", "embeddings", *words, overrides=["held_out=0"])
    session = open_session(folder)
    assert (session.example(4)["details"]["text"], session.state()["notes"]) == ("text 4", [])
    np.save(tmp_path / "f.npy", features[::-1])
    assert "changed" in open_source(folder, 6).note


def test_data_that_is_gone_or_changed_is_said_and_the_rest_goes_on(photos, tmp_path):
    images = photos.parent / "images"
    images.rename(tmp_path / "elsewhere")
    try:
        source = open_source(photos, 7)
        assert source.inputs is None
        assert "cannot be opened" in source.note
        assert open_session(photos).example(0)["index"] == 0
    finally:
        (tmp_path / "elsewhere").rename(images)
    content = (images / "cat" / "1.png").read_bytes()
    (images / "cat" / "1.png").write_bytes(content + b"more")
    assert "changed" in open_source(photos, 7).note
    (images / "cat" / "1.png").write_bytes(content)
    assert open_source(photos, 7).note == ""
    assert "had 8" in open_source(photos, 8).note


def test_undo_after_skipping_what_was_decided_takes_back_the_decision_before_that(run):
    session = open_session(run)
    decided(session, 0, "drop")
    decided(session, 1, "keep")
    decided(session, 0, "skip")
    assert session.state()["session"] == [0, 1]
    decided(session, 1, "undo")
    assert [(each["index"], each["decision"]) for each in session.state()["standings"]] == [
        (0, "drop"),
        (1, ""),
    ]
    assert [decision for _, _, decision in rows(run)] == ["drop", "keep", "undo"]
