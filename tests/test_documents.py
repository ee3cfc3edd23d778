"""Every command that a page shows exists, with its options and settings."""

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer.main import get_command

from nearsay.cli import app
from nearsay.config import apply_overrides, call_recipe, recipe_names

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")),
]
PLACEHOLDER = re.compile(r"(?<!:)\b[A-Z]{3,}\b|…|\.\.\.$")  # RUN, METHOD, key=...; not FILE.py:SCE


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """What is shown of `nearsay VERB …`: lines of blocks without their remarks, and code in a sentence."""
    text = read(page)
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    shown = [line.split(" #")[0] for line in lines] + re.findall(
        r"`([^`\n]+)`", without_blocks(text)
    )
    return [line.strip() for line in shown if re.match(r"nearsay [a-z]", line)]


def first_values(pairs: list[str]) -> list[str]:
    """The first run of a sweep: one value of each list or range."""
    return [re.sub(r"(?<==)([^(]*?)(,|\.\.).*", r"\1", pair) for pair in pairs]


def wrong_in(command: str) -> str | None:
    """What of a command does not exist, or nothing."""
    _, verb, *words = shlex.split(command)
    found = get_command(app).commands.get(verb)
    if found is None:
        return f"no command {verb}"
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    options = {"--debug"}.union(*(each.opts + each.secondary_opts for each in found.params))
    unknown = [word for word in words if word.startswith("-") and word not in options]
    if unknown:
        return f"no option {unknown[0]} of {verb}"
    settings = [(before, word) for before, word in pairwise(words) if "=" in word]
    if (
        verb in ("train", "sweep")
        and settings
        and words[0] in recipe_names()
        and not PLACEHOLDER.search(command)
    ):
        arguments = [word for before, word in settings if before != "--set"]
        changes = [word for before, word in settings if before == "--set"]
        if verb == "sweep":
            arguments, changes = first_values(arguments), first_values(changes)
        try:
            apply_overrides(call_recipe(words[0], arguments), changes)
        except ValueError as error:
            return str(error)
    return None


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """The files of the contributor's guide, in the folder where the commands are read."""
    shown = re.findall(r"^```python\n(.*?)^```$", read("CONTRIBUTING.md"), re.MULTILINE | re.DOTALL)
    names = (("my_loss.py", "sce.py"), ("my_data.py", "stripes.py"), ("my_net.py",))
    for files, code in zip(names, shown, strict=True):
        for name in files:
            (tmp_path / name).write_text(code, "utf-8")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("own_files")
@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_commands_of_the_pages_exist_with_their_options_and_settings(page):
    told = {command: wrong_in(command) for command in commands(page)}
    assert {command: wrong for command, wrong in told.items() if wrong} == {}


def test_a_command_that_does_not_exist_is_noticed():
    assert wrong_in("nearsay audits RUN") == "no command audits"
    assert wrong_in("nearsay audit RUN --explain") == "no option --explain of audit"
    assert "'kk'" in (wrong_in("nearsay train digits --set objective.kk=5") or "")
    assert (
        wrong_in(
            "nearsay sweep digits method=ncr,other noise=0.2,0.4 --set objective.alpha=0.1..0.9"
        )
        is None
    )
    assert wrong_in("nearsay data get cifar10 --to data") is None
