"""The cells of the tables, one JSON file each.

A file is written completely or not at all, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"


def finished(path: Path, configuration: dict[str, Any]) -> bool:
    """Whether the cell exists and was computed with this configuration."""
    commit()  # cached now, because the tree may change during a long computation
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
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@cache
def commit() -> str:
    """The current commit, followed by a plus if there are uncommitted changes to Python files."""

    def git(*words: str) -> str:
        root = Path(__file__).parent.parent
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "*.py") else "")


def slug(title: str) -> str:
    """A title as the name of a file: without punctuation, and with hyphens for spaces.

    >>> slug("torch's initialisation, 2,000 steps x 0.1")
    'torchs-initialisation-2000-steps-x-0.1'
    """
    return re.sub(r"[^\w. -]", "", title).replace(" ", "-")
