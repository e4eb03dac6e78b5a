"""`--no-skips`: a test that is skipped fails, but for reasons that have nothing to do with a GPU, torch or the build.

For machines that have what the tests want: there a skip says that the machine, or the build, is not what it was taken
for. conftest.py takes these hooks over.
"""

import pytest

#: Reasons that stay skips: optional frameworks, and tests of what a machine without a GPU or a build without CUDA says.
ALLOWED = ("cupy is not installed", "there is a GPU", "built with CUDA")


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="tests that are skipped for want of a GPU, torch, ... fail")


def _judged(report, config):
    if config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in ALLOWED:
            report.outcome = "failed"
            report.longrepr = f"skipped: {reason}; expected, with --no-skips, to run"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    return _judged((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _judged((yield), collector.config)
