"""The benchmark of large tables runs on a small one."""

import json
from pathlib import Path

from benchmarks import large_table


def test_it_writes_the_memory_of_each_table(tmp_path: Path) -> None:
    large_table.main(["--rows", "50", "--train", "50", "--out", str(tmp_path / "result.json")])
    found = json.loads((tmp_path / "result.json").read_text())["predict"]["50"]
    assert found["memory"] > 50
    assert found["size"] > 0
