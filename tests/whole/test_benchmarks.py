"""The benchmarks run, whatever they find (us): no time is looked at here."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.mark.requirement("NFR-PERF-001", "NFR-PERF-002", "NFR-PERF-003")
@pytest.mark.once
@pytest.mark.skipif(sys.platform == "win32", reason="the yardstick drives its pipes from the event loop")
@pytest.mark.timeout(260)
def test_every_row_of_the_benchmarks_has_its_figures() -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--markdown"]
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, cwd=ROOT, env=unmeasured, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert headings[2:5] == ["ours", "theirs", "ratio (quartiles)"]
    assert {row[1] for row in rows} >= {"minimal server", "Executor alone", "limit", "import apcore"}
    for name, _, *figures, _ in rows:
        assert all(re.match(r"-?[\d,]+(\.\d+)?\b", figure) for figure in figures), name
