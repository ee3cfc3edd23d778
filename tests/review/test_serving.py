"""The page as a process: what it serves, how it ends, and that no end loses a decision."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nearsay import cli
from nearsay.data import tables
from nearsay.review import server as server_module
from nearsay.review.server import review_run
from review.conftest import serving

PAGE = Path(server_module.__file__).parent / "page"


def start(folder):
    """`nearsay review` as a process, and its address."""
    command = [sys.executable, "-m", "nearsay", "review", str(folder), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    line = process.stdout.readline()
    return process, re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)[0]


def decide(address, index, decision="keep", seen=0):
    place = urlsplit(address)
    connection = http.client.HTTPConnection(place.netloc, timeout=10)
    headers = {"Origin": f"http://{place.netloc}", "Content-Type": "application/json"}
    asked = {"key": f"{index} {decision}", "index": index, "decision": decision, "seen": seen}
    connection.request("POST", f"{place.path}decide", json.dumps(asked), headers)
    answer = connection.getresponse()
    status = answer.status
    answer.read()
    connection.close()
    return status


def test_a_killed_review_has_all_that_it_answered_and_goes_on(run, capsys, monkeypatch):
    process, address = start(run)
    for index in range(20):
        assert decide(address, index) == 200
    assert cli.main(["review", str(run), "--no-browser"]) == 75
    assert f"in use by process {process.pid} on " in capsys.readouterr().err
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert tables.read(run / "corrections.csv").columns["index"] == [
        str(index) for index in range(20)
    ]
    with open(run / "corrections.csv", "ab") as file:
        # What a crash of the machine may leave.
        file.write(b"20,")

    def work(address):
        assert decide(address, 20, "drop") == 200
        assert decide(address, 0, "drop", seen=0) == 409
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(
        "webbrowser.open", lambda address: threading.Thread(target=work, args=(address,)).start()
    )
    assert cli.main(["review", str(run), "--open"]) == 0
    said = capsys.readouterr().out
    assert "21 in all" in said
    assert str(run / "corrections.csv") in said
    assert f"nearsay clean {run}" in said
    assert tables.read(run / "corrections.csv").columns["decision"] == ["keep"] * 20 + ["drop"]


def test_a_review_that_is_told_to_stop_says_so(run):
    def stop(address):
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError, match="SIGTERM") as caught:
        review_run(run, opened=stop)
    assert caught.value.code == 143
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_review_without_a_decision_leaves_no_file(run, capsys, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda address: signal.raise_signal(signal.SIGINT))
    assert cli.main(["review", str(run), "--open"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        rf"Review the labels of {re.escape(str(run))} at http://127\.0\.0\.1:\d+/[\w-]{{32}}/ ",
        said,
    )
    assert "No label was decided" in said
    assert not (run / "corrections.csv").exists()


def test_each_start_has_a_token_of_its_own(run):
    addresses = []

    def opened(address):
        addresses.append(urlsplit(address).path)
        signal.raise_signal(signal.SIGINT)

    for _ in range(2):
        assert review_run(run, opened=opened)[:2] == (0, 0)
    assert addresses[0] != addresses[1]


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["review", "EMPTY"], 2, "holds no run"),
        (["review", "RUN", "--port", "70000"], 2, "'--port'"),
        (["review", "BARE"], 65, "audit.csv is missing"),
        (["review", "RUN", "--port", "TAKEN"], 73, "cannot be used"),
    ],
)
def test_what_cannot_be_reviewed_is_said_in_one_sentence(
    run, page, tmp_path, capsys, words, code, part
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "labels.npz").write_bytes((run / "labels.npz").read_bytes())
    places = {
        "EMPTY": tmp_path / "empty",
        "RUN": run,
        "BARE": tmp_path / "bare",
        "TAKEN": page.port,
    }
    assert cli.main([str(places.get(word, word)) for word in words]) == code
    said = capsys.readouterr().err
    assert part in said
    assert said.count("\n") == 1


def test_without_the_extra_the_message_says_what_to_install(run, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("nearsay.review")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["review", str(run)]) == 2
    assert 'pip install ".[review]"' in capsys.readouterr().err


def test_what_a_full_disk_refuses_is_told_and_kept_out_of_the_file(page, run, monkeypatch):
    whole = os.fsync

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    asked = {"key": "k", "index": 0, "decision": "keep", "seen": 0}
    answer = page.ask("POST", "decide", asked)
    assert answer.status == 507
    assert "No space left on device" in json.loads(answer.content)["error"]
    monkeypatch.setattr(os, "fsync", whole)
    assert page.ask("POST", "decide", asked).status == 200
    assert len(tables.read(run / "corrections.csv").lines) == 1


def test_an_error_of_ours_is_one_line_and_the_page_goes_on(page, monkeypatch, capsys):
    monkeypatch.setattr(page.session, "state", lambda: 1 / 0)
    assert page.ask("GET", "state").status == 500
    text, limit = "", time.monotonic() + 30
    # The server answers first and then says why.
    while "\n" not in text and time.monotonic() < limit:
        text += capsys.readouterr().err
        time.sleep(0.01)
    assert text == "internal error: ZeroDivisionError: division by zero\n"
    assert page.ask("GET", "changes/0").status == 200


def test_pictures_are_found_by_number(page, photos):
    assert page.ask("GET", "picture/large/3").content == page.session.pictures.get(3).content
    assert page.ask("GET", "picture/small/3").headers["content-type"] == "image/png"
    assert json.loads(page.ask("GET", "example/3").content)["index"] == 3
    with serving(photos) as other:
        names = other.session.pictures.inputs.names
        broken = next(index for index, name in enumerate(names) if "broken" in name)
        answer = other.ask("GET", f"picture/large/{broken}")
        assert answer.status == 404
        assert b"broken.png" in answer.content


def test_no_file_of_the_page_reaches_outside_or_makes_markup_of_data():
    for path in PAGE.iterdir():
        text = path.read_text()
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), path.name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text
        ), path
        assert not re.search(r"\son\w+=|<style|style=|javascript:", text), path.name
        assert len(text.splitlines()) < 400, path.name
    assert re.findall(r"<script[^>]*>", (PAGE / "index.html").read_text()) == [
        '<script type="module" src="page.js">'
    ]


def test_the_wheel_holds_the_page(tmp_path):
    from hatchling.builders.wheel import WheelBuilder  # noqa: PLC0415

    (built,) = WheelBuilder(str(Path(__file__).parents[2])).build(
        directory=str(tmp_path), versions=["standard"]
    )
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    assert {f"nearsay/review/page/{path.name}" for path in PAGE.iterdir()} <= names
