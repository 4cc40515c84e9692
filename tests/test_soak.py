"""The soak runs: a round of it, and how it judges memory."""

import json
from pathlib import Path

import pytest

from benchmarks import soak


def test_a_round_writes_its_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soak.main(["--minutes", "0", "--out", str(tmp_path / "soak.json")])
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["rounds"] == 1
    assert result["memory"]["from"] > 10
    assert "1 rounds" in capsys.readouterr().out


def test_growing_memory_is_seen() -> None:
    rounds = [{"seconds": 36.0 * i, "memory": 500.0 + i} for i in range(100)]
    assert soak.growth(rounds) == pytest.approx({"from": 525, "to": 599, "slope": 100})
