"""The demo, shortened: what `make demo` shows exists and is drawn."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

import varprop as vp
from varprop import demo
from varprop.training import loop as training


def test_the_demo_prints_tables_and_writes_a_page_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        demo, "fit", lambda elbo, data, **options: training.fit(elbo, data, **{**options, "epochs": 2})
    )
    quick = partial(vp.BayesianMLPRegressor, hidden_layer_sizes=5, epochs=1, noise="constant")
    monkeypatch.setattr(demo, "BayesianMLPRegressor", quick)
    demo.demo(tmp_path)
    printed = capsys.readouterr().out
    assert all(
        text in printed
        for text in ("diabetes", "digits", "boosting", "plain network", "VBP", "calibration error")
    )
    assert (tmp_path / "regression.png").stat().st_size > 10_000
    assert "</html>" in (tmp_path / "report.html").read_text()
