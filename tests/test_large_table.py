"""The benchmark of large tables runs on a small one."""

import json
from pathlib import Path

from benchmarks import large_table


def test_it_writes_the_memory_of_each_command(tmp_path: Path) -> None:
    large_table.main(["--rows", "40", "--epochs", "1", "--out", str(tmp_path / "result.json")])
    found = json.loads((tmp_path / "result.json").read_text())["tables"]["40"]
    assert found["megabytes"] > 0
    for command in ("fit", "predict", "report"):
        assert 50 < found[command]["anonymous"] < found[command]["memory"]
