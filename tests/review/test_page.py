"""The page in a real browser: keys, windows, accidents, and names that were made to do harm."""

import os
import re
import shutil
import signal

import pytest

from nearsay.data import tables
from nearsay.training.run_folder import read_labels
from review.conftest import serving, write_audit
from review.test_serving import start

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None:
    pytest.skip("needs chromium", allow_module_level=True)

WIDE, NARROW = {"width": 1400, "height": 900}, {"width": 380, "height": 800}
MARK = "window.hit=1"
SCRIPT = f"<script>{MARK}</script>"
PAYLOADS = [
    SCRIPT, f"</script>{SCRIPT}", f"<img src=x onerror={MARK}>", f"'\"><img src=x onerror={MARK}>",
    f"<svg onload={MARK}>", f"<svg>{SCRIPT}</svg>", f"<details open ontoggle={MARK}>",
    f"<iframe srcdoc='<script>parent.{MARK}</script>'>", f"<input autofocus onfocus={MARK}>",
    f"<a href='javascript:{MARK}'>x</a>", f"javascript:{MARK}", f"<base href='//evil.example/'>{SCRIPT}",
    f"<style>@import 'x'</style><style onload={MARK}></style>", f"<template>{SCRIPT}</template>",
    f"<meta http-equiv=refresh content='0;url=javascript:{MARK}'>", f"<!-->{SCRIPT}-->",
    f"&lt;script&gt;{MARK}&lt;/script&gt;", f"\\u003cscript\\u003e{MARK}", f"${{{MARK}}}",
    f"{{{{constructor.constructor('{MARK}')()}}}}", f"';{MARK};//", f'";{MARK};//', f"`;{MARK};//",
    "__proto__", "constructor", "\u202eevitsop\u202c", "\u2028\u2029", "line\nbreak\ttab",
    "long " * 400, "../../etc/passwd",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser):
    """A window at an address: `visit(address)`; what goes wrong in it fails the test."""
    contexts, errors = [], []

    def opened(address, *, size=WIDE, context=None):
        context = context or browser.new_context(viewport=size)
        contexts.append(context)
        window = context.new_page()
        window.set_default_timeout(5000)
        window.on("pageerror", lambda error: errors.append(str(error)))
        window.on(
            "dialog",
            lambda dialog: (
                errors.append(dialog.message) if dialog.type == "alert" else dialog.accept()
            ),
        )
        window.goto(address)
        window.wait_for_selector("#session:not([hidden]) #place:not(:empty), #end:not([hidden])")
        return window

    yield opened
    for context in dict.fromkeys(contexts):
        context.close()
    assert errors == []


def rows(folder):
    cells = tables.read(folder / "corrections.csv").columns
    return [
        (int(index), cells["label"][row], cells["decision"][row])
        for row, index in enumerate(cells["index"])
    ]


def at(window, index):
    """Wait until an example is shown."""
    window.wait_for_function(
        "index => document.getElementById('place').textContent.includes(`example ${index} `)",
        arg=index,
    )


def press(window, keys, first=0):
    """Keys, each for the next example."""
    for number, key in enumerate(keys, start=first):
        at(window, number)
        window.keyboard.press(key)


def count(window, name):
    return int(window.inner_text(f"#{name}").replace(",", ""))


def test_twenty_labels_are_decided_by_keyboard(page, run, visit):
    window = visit(page.address)
    given = read_labels(run).given.tolist()
    assert window.inner_text("#given") == str(given[0])
    assert window.inner_text("#suggested") == str((given[0] + 1) % 10)
    assert window.inner_text("#probability") == "· 90 %"
    assert window.locator("#neighbors li").count() == 5
    assert count(window, "left") == 30
    other = [(label + 5) % 10 for label in given]
    keys = ["a", "k", "A", "d", *(str(other[index]) for index in range(4, 8)), *"aaaakkkkdaka"]
    press(window, keys)
    at(window, 20)
    meaning = {"a": "accept", "k": "keep", "d": "drop"}
    wanted = []
    for index, key in enumerate(keys):
        decision = meaning.get(key.lower(), "other")
        label = {
            "accept": (given[index] + 1) % 10,
            "keep": given[index],
            "drop": None,
            "other": other[index],
        }[decision]
        wanted.append((index, None if label is None else str(label), decision))
    assert rows(run) == wanted
    assert (count(window, "done"), count(window, "left")) == (20, 10)
    assert int(window.inner_text("#rate").replace(",", "")) > 300
    assert window.inner_text("#said") == f"Accepted {(given[19] + 1) % 10} for example 19"


def test_the_next_example_is_there_before_it_is_asked_for(page, visit):
    window = visit(page.address)
    window.wait_for_load_state("networkidle")
    asked = []
    window.on("request", lambda request: asked.append(request.url.removeprefix(page.address)))
    window.keyboard.press("k")
    at(window, 1)
    assert [path for path in asked if path in ("example/1", "picture/large/1")] == []
    assert window.evaluate("document.getElementById('picture').naturalWidth") == 8
    assert "crisp" in window.get_attribute("#picture", "class")


def test_undo_takes_back_one_after_the_other_also_after_a_reload(page, run, visit):
    window = visit(page.address)
    press(window, "adk")
    at(window, 3)
    window.keyboard.press("u")
    at(window, 2)
    window.keyboard.press("Control+z")
    at(window, 1)
    window.reload()
    at(window, 1)
    window.click("#undo")
    at(window, 0)
    given = read_labels(run).given.tolist()
    assert rows(run)[3:] == [(index, str(given[index]), "undo") for index in (2, 1, 0)]
    assert count(window, "done") == 0
    assert window.is_disabled("#undo")
    press(window, "k")
    assert window.locator("#standing").is_hidden()


def test_arrows_decide_nothing_and_show_how_an_example_stands(page, run, visit):
    window = visit(page.address)
    press(window, "ds")
    at(window, 2)
    window.keyboard.press("ArrowRight")
    at(window, 3)
    for index in (2, 1, 0):
        window.keyboard.press("ArrowLeft")
        at(window, index)
    assert window.inner_text("#standing").startswith("Dropped the label")
    window.keyboard.press("a")
    at(window, 2)
    assert [decision for _, _, decision in rows(run)] == ["drop", "skip", "accept"]
    window.keyboard.down("k")
    at(window, 3)
    for _ in range(5):
        # Held down.
        window.keyboard.down("k")
    window.keyboard.up("k")
    at(window, 3)
    assert len(rows(run)) == 4


def test_filters_choose_by_class_score_and_decision(page, run, visit):
    window = visit(page.address)
    press(window, "dsa")
    at(window, 3)
    given = read_labels(run).given.tolist()
    window.keyboard.press("f")

    def matches(**values):
        for name, value in values.items():
            field = window.locator(f"[name={name}]")
            field.fill(value) if name in ("from", "to") else field.select_option(value)
        return int(window.inner_text("#matches").split()[0].replace(",", ""))

    assert matches() == 30
    assert matches(decision="decided") == 2
    at(window, 0)
    assert matches(decision="skipped") == 1
    assert window.inner_text("#matches") == "1 label matches"
    at(window, 1)
    assert matches(decision="all", which="all") == len(given)
    assert matches(given="3") == given.count(3)
    assert matches(suggested="5") == 0
    assert window.inner_text("#end-title") == "No label matches"
    assert matches(suggested="4", to="0.5") == sum(
        label == 3 for label in given[: len(given) // 2 + 1]
    )
    window.click("#filters button[type=reset]")
    at(window, 3)
    assert matches() == 27
    matches(given="3", suggested="5", to="0.1")
    window.click("#see-all")
    assert matches() == len(given)


def test_a_reload_keeps_place_filter_and_decisions(page, visit):
    window = visit(page.address)
    press(window, "kk")
    at(window, 2)
    window.keyboard.press("f")
    window.locator("[name=which]").select_option("all")
    window.keyboard.press("Escape")
    for index in (3, 4):
        window.keyboard.press("ArrowRight")
        at(window, index)
    window.reload()
    at(window, 4)
    assert window.locator("[name=which]").input_value() == "all"
    assert count(window, "done") == 2


def test_two_windows_lose_nothing(page, run, visit):
    first = visit(page.address)
    second = visit(page.address)
    press(first, "a")
    at(first, 1)
    at(second, 0)
    # Not knowing of the other.
    second.keyboard.press("d")
    second.wait_for_selector("#alert:not([hidden])")
    assert "Another window has decided about example 0" in second.inner_text("#alert p")
    assert second.inner_text("#standing").startswith("Accepted")
    assert [decision for _, _, decision in rows(run)] == ["accept"]
    second.keyboard.press("d")
    at(second, 1)
    press(second, "k", first=1)
    first.wait_for_function("() => document.getElementById('done').textContent === '2'")
    first.wait_for_function(
        "() => document.getElementById('standing').textContent.startsWith('Kept')"
    )
    assert [decision for _, _, decision in rows(run)] == ["accept", "drop", "keep"]


def test_an_answer_that_got_lost_does_not_decide_twice(page, run, visit):
    window = visit(page.address)
    at(window, 0)
    lost = []

    def lose(route):
        if lost:
            route.continue_()
        else:
            # It arrives, but the answer does not.
            lost.append(route.fetch().status)
            route.abort()

    window.route("**/decide", lose)
    window.keyboard.press("a")
    window.wait_for_selector("#alert:not([hidden])")
    assert "The decision on example 0 is kept here" in window.inner_text("#alert p")
    # Nothing is decided before the answer.
    window.keyboard.press("d")
    window.click("#alert button")
    at(window, 1)
    assert lost == [200]
    assert [row[2] for row in rows(run)] == ["accept"]
    assert window.locator("#alert").is_hidden()


def test_a_slow_server_is_waited_for_in_sight(page, run, browser):
    window = browser.new_context(viewport=WIDE).new_page()
    held = []
    window.route(re.compile("/(example/|decide)"), lambda route: held.append(route))

    def let_go(name):
        for route in [each for each in held if name in each.request.url]:
            held.remove(route)
            route.continue_()

    window.goto(page.address)
    window.wait_for_function("() => document.getElementById('left').textContent === '30'")
    assert window.is_visible("#waiting")
    # There is nothing to decide about yet.
    assert window.is_hidden("#session")
    let_go("/example/")
    at(window, 0)
    assert window.is_hidden("#waiting")
    assert window.is_visible("#session")
    window.keyboard.press("a")
    window.wait_for_function("() => document.getElementById('said').textContent === 'Saving …'")
    assert count(window, "done") == 0
    let_go("/decide")
    window.wait_for_function(
        "() => document.getElementById('said').textContent.startsWith('Accepted')"
    )
    assert [row[0] for row in rows(run)] == [0]
    window.context.close()


def test_a_killed_server_is_noticed_and_nothing_that_was_shown_as_done_is_lost(run, visit):
    process, address = start(run)
    try:
        window = visit(address)
        press(window, "akd")
        at(window, 3)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    window.keyboard.press("a")
    window.wait_for_selector("#alert:not([hidden])")
    assert "No answer from nearsay review" in window.inner_text("#alert p")
    assert "example 3 is kept here" in window.inner_text("#alert p")
    at(window, 3)
    with serving(run) as again:
        window = visit(again.address)
        at(window, 3)
        assert count(window, "done") == 3
        press(window, "a", first=3)
        at(window, 4)
    assert [decision for _, _, decision in rows(run)] == ["accept", "keep", "drop", "accept"]


def test_at_the_end_of_the_list_the_page_says_what_comes_next(run, visit):
    write_audit(run, read_labels(run), num_issues=3)
    with serving(run) as page:
        window = visit(page.address)
        press(window, "ksa")
        window.wait_for_selector("#end:not([hidden])")
        assert window.inner_text("#end-title") == "All done here"
        assert "nearsay clean" in window.inner_text("#end-text")
        window.click("#see-skipped")
        at(window, 1)
        window.keyboard.press("d")
        window.wait_for_selector("#end:not([hidden])")
        window.keyboard.press("u")
        at(window, 1)
    assert [decision for _, _, decision in rows(run)] == ["keep", "skip", "accept", "drop", "undo"]


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_page_fits_the_window_and_can_be_used_without_a_mouse(page, visit, size):
    window = visit(page.address, size=size)
    window.wait_for_load_state("networkidle")
    assert window.evaluate("document.documentElement.scrollWidth") <= size["width"]
    for name in ("keep", "accept", "drop", "skip", "picture"):
        box = window.locator(f"#{name}").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= size["width"]
        assert box["y"] + box["height"] <= size["height"], name
    unnamed = """[...document.querySelectorAll("button, input, select")].filter((each) =>
        !each.textContent.trim() && !each.labels?.length
        && !each.getAttribute("aria-label")).length"""
    assert window.evaluate(unnamed) == 0
    window.keyboard.press("?")
    assert window.locator("#help").is_visible()
    # Decides nothing behind the help.
    window.keyboard.press("d")
    window.click("#help button")
    assert window.locator("#help").is_hidden()
    window.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert window.evaluate(outline) == "solid"
    assert page.session.changes(0)["version"] == 0


def test_a_label_among_many_is_found_by_typing(features, visit):
    names = [f"breed {number}" for number in range(40)] + ["Großer Schweizer"]
    folder = features(names, num_issues=41)
    with serving(folder) as page:
        window = visit(page.address)
        assert "row of features" in window.inner_text("#no-picture")
        assert window.locator("#picture").is_hidden()
        window.keyboard.press("o")
        window.keyboard.type("schweiz")
        assert window.locator("#found li").all_inner_texts() == ["Großer Schweizer"]
        window.keyboard.press("Enter")
        at(window, 1)
        window.keyboard.press("o")
        window.keyboard.type("breed 3")
        window.keyboard.press("ArrowDown")
        window.keyboard.press("Enter")
        at(window, 2)
        # The nearest neighbor's label that is not offered above.
        window.keyboard.press("1")
        at(window, 3)
        window.keyboard.press("o")
        window.keyboard.type("nothing like it")
        window.keyboard.press("Enter")
        window.keyboard.press("Escape")
        at(window, 3)
    assert rows(folder) == [
        (0, "Großer Schweizer", "other"),
        (1, "breed 30", "other"),
        (2, "breed 4", "other"),
    ]


def test_a_file_that_cannot_be_read_is_shown_as_such(photos, visit):
    with serving(photos) as page:
        window = visit(page.address)
        names = page.session.pictures.inputs.names
        broken = next(index for index, name in enumerate(names) if "broken" in name)
        for index in range(broken):
            at(window, index)
            window.keyboard.press("ArrowRight")
        window.wait_for_function(
            "() => document.getElementById('no-picture').textContent.includes('broken.png')"
        )
        assert window.locator("#picture").is_hidden()
        window.keyboard.press("ArrowLeft")
        at(window, broken - 1)
        assert window.locator("#no-picture").is_hidden()
        assert window.locator("#picture").is_visible()


def test_names_that_were_made_to_do_harm_are_only_text(features, visit):
    num = len(PAYLOADS)
    changes = dict.fromkeys(("path", "status", "ood_score", "note", PAYLOADS[2]), PAYLOADS)
    folder = features(PAYLOADS, num_issues=num, **changes)
    with serving(folder) as page:
        window = visit(page.address)
        tags = "[...document.querySelectorAll('*')].map((each) => each.tagName)"
        allowed = {*window.evaluate(tags), "LI"}
        outside = []
        window.on("request", lambda request: outside.append(request.url))
        for index, payload in enumerate(PAYLOADS):
            at(window, index)
            shown = window.evaluate(
                """['given', 'suggested', 'path']
                .map((id) => document.getElementById(id).textContent)
                .concat([...document.querySelectorAll('#details dd')]
                .map((each) => each.textContent))"""
            )
            assert shown[0] == shown[2] == shown[3] == payload
            assert shown[1] == PAYLOADS[(index + 1) % num]
            window.keyboard.press("k" if index % 2 else "a")
        window.wait_for_selector("#end:not([hidden])")
        window.keyboard.press("f")
        window.locator("[name=decision]").select_option("all")
        at(window, 0)
        window.keyboard.press("Escape")
        window.keyboard.press("o")
        assert window.locator("#found li").count() == num
        assert window.evaluate("window.hit") is None
        assert {*window.evaluate(tags)} <= allowed
        assert window.locator("script").count() == 1
        assert [url for url in outside if not url.startswith(page.address)] == []
    assert [label for _, label, _ in rows(folder)] == [
        PAYLOADS[index if index % 2 else (index + 1) % num] for index in range(num)
    ]
