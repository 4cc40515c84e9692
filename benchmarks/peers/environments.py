"""A virtual environment for each peer, with pinned versions, made on first use outside of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "varprop-peers"
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fastbnns": ("fastbnns==0.4.3", ()),
    "bayesian-torch": ("bayesian-torch==0.5.0", ()),
    "laplace-torch": (
        "laplace-torch==0.3",
        (
            "asdfghjkl==0.1a4",
            "backpack-for-pytorch",
            "curvlinops-for-pytorch>=3.0.1",
            "scipy",
            "tqdm",
            "opt-einsum",
            "einops",
            "einconv",
            "linear_operator",
            "torchmetrics",
            "unfoldNd",
        ),
    ),
    "torchbnn": ("torchbnn==1.2", ()),
    "blitz": ("blitz-bayesian-pytorch==0.2.8", ("scikit-learn",)),
    "ivon": ("ivon-opt==0.1.3", ()),
    "vbll": ("vbll==0.4.9", ()),
    "pytagi": ("pytagi==0.1.12", ("pandas", "tqdm")),
    "torch-uncertainty": (
        "torch-uncertainty==0.13.0",
        (
            *("einops", "seaborn", "scipy", "lightning<2.7", "torchmetrics", "scikit-learn"),
            *("rich", "jsonargparse", "timm", "torchvision==0.28.0"),
        ),
    ),
}
"""The pinned version of each peer, and what else it imports.

Everything is installed without what it asks for, because many ask for torchvision, whose wheels do not import
beside torch's own CPU build, or for another torch; what is imported is named here instead.
"""


def interpreter(peer: str, folder: Path) -> Path:
    """The Python of a peer's environment, which is made if it is not there yet."""
    version, needs = PEERS[peer]
    home = folder / peer
    python, done = home / "bin" / "python", home / f"{version}.done"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        _install(python, TORCH, "numpy")
        _install(python, "--no-deps", version)
        if needs:
            _install(python, TORCH, *[need for need in needs if not need.startswith(_TORCHVISION)])
            _install(python, "--no-deps", *[need for need in needs if need.startswith(_TORCHVISION)])
        done.touch()
    return python


_TORCHVISION = ("asdfghjkl", "backpack", "curvlinops", "timm", "torchvision")
"""Packages that would bring torchvision along with what it asks for."""


def _install(python: Path, *packages: str) -> None:
    if any(not package.startswith("-") for package in packages):
        command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
