"""The examples of the page about adapters run as they are written, and learn what they should."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"


@pytest.mark.parametrize("library", ["lightning", "transformers", "timm"])
@pytest.mark.filterwarnings("ignore")  # of the libraries, whose defaults the page does not touch
def test_the_example_runs_as_written(library, tmp_path, monkeypatch, capsys, request):
    request.getfixturevalue(f"for_{library}")
    shown = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    [example] = [block for block in shown if f"nearsay.integrations.{library} import" in block]
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "example"}
    exec(example, names)
    found = re.search(
        r"([\d.]+)% right, of wrongly labeled ones ([\d.]+)%", capsys.readouterr().out
    )
    everywhere, wrongly_labeled = (float(number) for number in found.groups())
    assert everywhere > 75  # two labels in three are right: by heart it would be 64
    assert wrongly_labeled > 50  # and none of these
