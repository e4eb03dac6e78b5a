"""--no-skips (skips.py), in a pytest of its own."""

import os
import pathlib
import subprocess
import sys

import pytest

PROBES = {
    "mark": "@pytest.mark.skipif(True, reason='no CUDA device')\ndef test(): pass",
    "module mark": "pytestmark = pytest.mark.skipif(True, reason='built without CUDA')\ndef test(): pass",
    "import": "pytest.importorskip('no_such_torch', reason='torch is not installed')\ndef test(): pass",
    "call": "def test(): pytest.skip('no CUDA device')",
    "fixture": "@pytest.fixture\ndef gpu(): pytest.skip('no CUDA device')\ndef test(gpu): pass",
    "allowed": "def test(): pytest.importorskip('no_such_cupy', reason='cupy is not installed')",
    "expected failure": "@pytest.mark.xfail\ndef test(): assert False",
    "passes": "def test(): pass",
}


def status_of(tmp_path, body, *options):
    probe = tmp_path / "test_probe.py"
    probe.write_text(f"import pytest\n{body}\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "skips", *options, str(probe)]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("kind", PROBES)
def test_skips_fail_where_they_are_told_to(tmp_path, kind):
    strict = status_of(tmp_path, PROBES[kind], "--no-skips")
    fails = kind not in ("allowed", "expected failure", "passes")
    assert (strict.returncode != 0) == fails, strict.stdout
    assert ("expected, with --no-skips, to run" in strict.stdout) == fails
    if kind in ("mark", "import"):  # without the option they are what they were
        assert status_of(tmp_path, PROBES[kind]).returncode in (0, 5) and "skipped" in status_of(tmp_path, PROBES[kind]).stdout


def test_reasons_that_stay_skips_are_reasons_of_these_tests():
    import skips

    source = "".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("test_cuda*.py"))
    assert all(f'reason="{reason}"' in source for reason in skips.ALLOWED)
