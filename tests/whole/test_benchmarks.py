"""The benchmarks run, whatever they find (us): no time is looked at here."""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.benchmarks.__main__ import main


@pytest.mark.requirement("NFR-PERF-001", "NFR-PERF-002", "NFR-PERF-003")
@pytest.mark.once
@pytest.mark.skipif(sys.platform == "win32", reason="the yardstick drives its pipes from the event loop")
@pytest.mark.timeout(260)
def test_every_row_of_the_benchmarks_has_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
        monkeypatch.delenv(name)  # or the servers would be slowed down
    monkeypatch.setattr(sys, "argv", ["tests.benchmarks", "--quick", "--markdown"])
    assert main() == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    headings, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    assert headings[2:5] == ["ours", "theirs", "ratio (quartiles)"]
    assert {row[1] for row in rows} >= {"minimal server", "Executor alone", "limit", "import apcore"}
    for name, _, *figures, _ in rows:
        assert all(re.match(r"-?[\d,]+(\.\d+)?\b", figure) for figure in figures), name
