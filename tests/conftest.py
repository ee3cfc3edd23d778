"""What all tests share: one thread, and the option that lets no test be skipped without a good reason."""

from typing import Any

import pytest
import torch
from hypothesis import settings

# The same examples each time: a change passes or fails by itself.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")
# The tensors of the tests are small: threads would only wait for each other.
torch.set_num_threads(1)

GOOD_REASONS = (  # for a skip where every library is there
    "needs a CUDA device",
    "only root may make a small disk",
    "SCIPY_ARRAY_API is not set: not checking array_api input",  # of scikit-learn, for estimators that promise it
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-skips",
        action="store_true",
        help=f"let a skipped test fail, unless its reason is one of: {', '.join(GOOD_REASONS)}",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    return judged((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    return judged((yield), collector.config)


def judged(report: Any, config: pytest.Config) -> Any:
    """The report, but a failure if it is a skip that is not allowed."""
    if config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason not in GOOD_REASONS:
            report.outcome = "failed"
            report.longrepr = f"{report.nodeid} was skipped ({reason}), which --no-skips forbids"
    return report
