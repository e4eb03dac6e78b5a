"""The package as installed: imports without torch, stubs and docstrings are there, `python -m headwater` is the command."""

import pathlib
import subprocess
import sys

import pytest

import headwater
import headwater.cuda
from headwater.__main__ import command


def test_import_is_framework_free():
    code = "import sys, headwater; print([m for m in ('torch', 'numpy', 'jax') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_stubs_and_marker_are_installed():
    folder = pathlib.Path(headwater.__file__).parent
    assert (folder / "py.typed").is_file()
    stub = (folder / "_core" / "__init__.pyi").read_text()
    assert "class Planner" in stub and "def run(" in stub
    assert (folder / "_core" / "cuda.pyi").is_file() == headwater.cuda.is_built()


def test_everything_public_has_a_docstring():
    missing = [name for name in headwater.__all__ if not getattr(headwater, name).__doc__]
    assert [name for name in missing if name != "__version__"] == []


def test_command():
    done = subprocess.run([sys.executable, "-m", "headwater", "--version"], capture_output=True, text=True)
    if not command().is_file():
        assert done.returncode == 4 and "built without the command" in done.stderr
        pytest.skip("built without the command")
    assert done.stdout.strip() == f"headwater {headwater.__version__}"


def test_a_forked_child_can_run(case):
    """The child has none of the pool's threads."""
    import multiprocessing

    import numpy as np

    plan = headwater.Planner().plan(case.shape, case.batch())
    want = headwater.run(plan, case.q, (case.k, case.v))
    with multiprocessing.get_context("fork").Pool(1) as children:
        assert np.array_equal(children.apply(_run_in_child, (case.q, case.k, case.v)), want)


def _run_in_child(q, k, v):
    from conftest import make_case

    case = make_case()
    return headwater.run(headwater.Planner().plan(case.shape, case.batch()), q, (k, v))
