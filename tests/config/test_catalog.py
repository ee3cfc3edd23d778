"""The default folder of a run, and the descriptions of recipes."""

import re

import pytest

from nearsay import config


def origin(**changes):
    return {
        "recipe": "cifar10",
        "arguments": {"noise": "0.4", "method": "ncr"},
        "overrides": [],
        **changes,
    }


def test_the_default_folder_reads_like_the_command():
    assert config.default_folder(origin()).as_posix() == "runs/cifar10-method=ncr-noise=0.4"
    assert config.default_folder(origin(arguments={})).as_posix() == "runs/cifar10"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("/home/me/data/photos", "photos"),
        ("/home/me/data/photos/", "photos"),
        ("../labels.csv", "labels.csv"),
        ("/a/first.npz,/b/second.npz", "first.npz,second.npz"),  # a list, as sweeps have them
    ],
)
def test_of_a_path_the_default_folder_names_only_what_it_leads_to(path, named):
    folder = config.default_folder(
        origin(arguments={"path": path}, overrides=[f"labels_file={path}"])
    )
    assert re.fullmatch(f"cifar10-path={named}-labels_file={named}-[0-9a-f]{{8}}", folder.name)


def test_the_default_folder_does_not_depend_on_the_order_or_on_where_it_runs():
    same = [
        origin(arguments={"method": "ncr", "noise": "0.4"}),
        origin(overrides=["machine.device=cuda", "machine.workers=2"]),
    ]
    assert {config.default_folder(other) for other in same} == {config.default_folder(origin())}


def test_other_choices_get_another_folder():
    others = [
        origin(),
        origin(arguments={"noise": "0.4"}),
        origin(arguments={"noise": "0.4", "method": "ncr", "seed": "1"}),
        origin(overrides=["objective.k=5"]),
        origin(overrides=["objective.k=50"]),
        origin(arguments={"path": "a/b"}),
        origin(arguments={"path": "b"}),
        origin(arguments={"path": "c/b"}),
        origin(arguments={"path": "a b"}),
        origin(arguments={"path": "a_b"}),
        origin(arguments={"path": "x" * 300}),
        origin(arguments={"path": "x" * 301}),
        origin(recipe="mine.py", sha256="1"),
        origin(recipe="mine.py", sha256="2"),
    ]
    assert len({config.default_folder(other) for other in others}) == len(others)


@pytest.mark.parametrize("value", ["../../etc", "a/b\\c", "é\n\t", "x" * 500, "*?|<>", "~"])
def test_the_default_folder_is_one_plain_name_below_runs(value):
    folder = config.default_folder(origin(arguments={"path": value}))
    assert folder.parent.as_posix() == "runs"
    assert folder.name.isascii()
    assert len(folder.name) <= 120
    assert not set(folder.name) & set("/\\*?|<>~ \n")


def test_a_recipe_of_ones_own_is_read_and_not_run(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "raise SystemExit\n"
        "def recipe(path, a=1, *, b='x', c):\n    '''Mine.\n\n    More.\n    '''\n"
    )
    recipe = config.describe_recipe(str(file))
    assert recipe.summary == "Mine."
    assert recipe.docstring == "Mine.\n\nMore."
    assert recipe.parameters == {"path": "", "a": "1", "b": "x", "c": ""}


@pytest.mark.parametrize(
    ("content", "word"), [("def other(): pass", "function recipe"), ("def (", "Python")]
)
def test_a_file_without_a_recipe_is_refused(tmp_path, content, word):
    (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ValueError, match=word):
        config.describe_recipe(str(tmp_path / "mine.py"))
