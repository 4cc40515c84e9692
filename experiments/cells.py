"""The cells of a table: one JSON file each, written whole or not at all, so that a killed run continues where it was."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def finished(path: Path, configuration: dict[str, Any]) -> bool:
    """Whether the cell is there and was computed by this configuration."""
    commit()  # noted before the computing: the tree may move on meanwhile
    return path.exists() and json.loads(path.read_text())["configuration"] == configuration


def write(path: Path, configuration: dict[str, Any], **content: Any) -> None:
    cell = {"configuration": configuration, **content, "machine": machine(), "commit": commit()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(cell, indent=1) + "\n")
    os.replace(part, path)


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor()


@cache
def commit() -> str:
    """The commit that the code is at; with a plus where its Python files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "*.py") else "")
