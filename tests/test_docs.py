"""The documentation: examples and commands run, equations match the code, tables hold every rule."""

from __future__ import annotations

import doctest
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from torch import nn

import varprop as vp
from experiments import tabular_ranks

from .shell import run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


layers, consoles = load("layers"), load("consoles")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, doctest_namespace: dict[str, object]) -> None:
    result = doctest.testfile(str(page), module_relative=False, globs=dict(doctest_namespace))
    assert result.failed == 0


def commands(page: Path) -> list[str]:
    """The varprop commands of a page's console blocks, without their comments."""
    return [
        line[2:]
        for block in consoles.blocks(page)
        for line in block.splitlines()
        if line.startswith("$ varprop ")
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_shell_commands_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    consoles.write_tables(tmp_path)
    for line in commands(page):
        _, command, *arguments = shlex.split(line, comments=True)
        quickly = ["--epochs", "2"] if command in ("fit", "update") else []
        result = run(command, *arguments, *quickly)
        assert result.exit_code == (2 if "--strict" in arguments else 0), result.output


LENET, PERCEPTRON = ("LeNet-small", "128"), ("perceptron", "32")


def step_ratios(network: str, batch: str) -> dict[str, list[float]]:
    """The cost of a training step by method, eager and compiled."""
    runs = ROOT / "benchmarks" / "results" / "run"
    found = [json.loads((runs / f"{part}.json").read_text())["found"] for part in ("steps", "compiled")]
    rows = [part[network]["training"][batch] for part in found]
    return {method: [row[method]["ratio"] for row in rows] for method in ("vbp", "dvi", "cvbp")}


def recorded_ratios() -> list[float]:
    """The cost of a perceptron's recorded step, with the same methods."""
    path = ROOT / "benchmarks" / "results" / "run" / "recorded.json"
    network, batch = PERCEPTRON
    row = json.loads(path.read_text())["found"][network]["training"][batch]
    return [row[f"{method}, recorded"]["ratio"] for method in ("vbp", "dvi", "cvbp")]


@pytest.mark.parametrize("row", [LENET, PERCEPTRON])
def test_the_page_of_choices_states_the_committed_speed(row: tuple[str, str]) -> None:
    eager, compiled = zip(*step_ratios(*row).values(), strict=True)
    numbers = " | ".join(f"{ratio:.1f}" for ratio in (*eager, *compiled))
    assert f"batch of {row[1]} | {numbers} |" in (DOCS / "choose.md").read_text()


def test_the_page_of_choices_states_the_cost_of_a_recorded_step() -> None:
    vbp, dvi, cvbp = (f"{ratio:.1f}" for ratio in recorded_ratios())
    assert (
        f"for the perceptron {vbp}, {dvi} and {cvbp} times the plain step" in (DOCS / "choose.md").read_text()
    )


def test_the_readme_states_the_committed_speed_and_calibration() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    lenet, perceptron = (step_ratios(*row) for row in (LENET, PERCEPTRON))
    assert f"with `vp.DVI` takes {lenet['dvi'][0]:.1f} times as long" in readme
    assert f"{lenet['dvi'][1]:.1f} times when both are compiled" in readme
    assert f"it is {perceptron['dvi'][0]:.1f} and {perceptron['dvi'][1]:.1f} times" in readme
    assert f"{recorded_ratios()[1]:.1f} times where `vp.fit` records it" in readme
    cells = (ROOT / "experiments" / "results" / "table1" / "dvi-cosine").glob("*.json")
    shares = [
        np.mean([split["own"]["coverage"] for split in json.loads(path.read_text())["splits"]])
        for path in cells
    ]
    assert len(shares) == 9
    assert f"cover between {min(shares):.0%} and {max(shares):.0%}" in readme.replace(" %", "%")


def test_the_readme_states_the_committed_ranks() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    folder = ROOT / "experiments" / "results" / "tabular"
    for title, name, larger in (("log-likelihood", "log_likelihood", True), ("CRPS", "crps", False)):
        found = tabular_ranks.ranks(tabular_ranks.score(folder, "regression", "report", name), larger=larger)
        assert found is not None
        assert list(found.mean)[:2] == ["varprop", "forest"]
        assert (len(found.mean), len(found.tables)) == (9, 11)
        ours, next_best, *_ = found.mean.values()
        assert f"in {title} ({ours:.2f}; random forest {next_best:.2f})" in readme
    scores = tabular_ranks.score(folder, "classes", "report", "log_likelihood")
    found = tabular_ranks.ranks(scores, larger=True)
    assert found is not None
    assert len(found.tables) == 6
    (first, ours), (second, next_best), *_ = found.mean.items()
    assert (first, second) == ("varprop", "catboost")
    assert f"the best in log-likelihood ({ours:.2f}; CatBoost {next_best:.2f})" in readme
    coverage = tabular_ranks.score(folder, "regression", "report", "coverage")["varprop"].values()
    assert f"90 % intervals cover {100 * np.mean(list(coverage)):.0f} %" in readme


def test_the_readme_states_the_committed_errors_of_images() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())

    def errors(row: str) -> list[float]:
        folder = ROOT / "experiments" / "results" / "table2" / "short" / row
        cells = [folder.glob(f"{name}-?.json") for name in ("MNIST", "FashionMNIST", "CIFAR-10", "CIFAR-100")]
        return [
            100 * float(np.mean([json.loads(path.read_text())["own"]["error"] for path in paths]))
            for paths in cells
        ]

    mnist, fashion, ten, hundred = errors("vbp")
    first = f"{mnist:.2f} % of MNIST, {fashion:.1f} % of FashionMNIST, {ten:.1f} % of CIFAR-10"
    assert f"{first} and {hundred:.1f} % of CIFAR-100" in readme
    mnist, fashion, ten, hundred = errors("dvi")
    assert f"`vp.DVI` on {mnist:.2f}, {fashion:.1f}, {ten:.1f} and {hundred:.1f} %" in readme


def test_the_page_of_streams_states_the_committed_measurement() -> None:
    page = " ".join((DOCS / "streaming.md").read_text().split())
    found = json.loads((ROOT / "benchmarks" / "results" / "stream.json").read_text())
    first, *_, last = found["parts"]
    assert f"took {last['seconds']:.0f} seconds of processor time" in page
    assert f"{first['memory']:.0f} MB after the first part and {last['memory']:.0f} MB after the last" in page
    assert f"from {first['log_likelihood']:.3f} to {last['log_likelihood']:.3f}" in page
    assert f"of the noise is {found['log_likelihood_of_the_noise']:.3f}" in page


def test_every_page_and_file_that_is_named_exists() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *(ROOT / "experiments" / "notes").glob("*.md")]:
        text = page.read_text()
        named = set(re.findall(r"`((?:docs|experiments|benchmarks|tests)/[\w./-]+)`", text))
        linked = set(re.findall(r"\]\(([\w./-]+)[)#]", text))
        missing = [path for path in named if "_build" not in path and not (ROOT / path).exists()]
        folder = page.parent.parent if page.parent.name == "notes" else page.parent  # of the whole page
        missing += [path for path in linked if not (folder / path).exists()]
        assert not missing, f"{page.name}: {missing}"


def cited() -> set[int]:
    return {
        int(n)
        for file in (ROOT / "varprop").rglob("*.py")
        for n in re.findall(r"Eq\. (\d+)", file.read_text())
    }


def test_every_cited_equation_is_on_the_page_of_mathematics_under_its_number() -> None:
    labels = [
        int(n) for n in re.findall(r"^\$\$ \(eq-(\d+)\)$", (DOCS / "maths.md").read_text(), re.MULTILINE)
    ]
    assert labels == list(range(1, len(labels) + 1)), "Sphinx numbers equations in their order on the page"
    assert cited() == set(labels)


def test_pages_refer_only_to_equations_that_exist() -> None:
    for page in PAGES:
        assert {int(n) for n in re.findall(r"\{eq\}`eq-(\d+)`", page.read_text())} <= cited(), page.name


@pytest.mark.parametrize("method", [*vp.METHODS.values(), vp.vbp(10.0)], ids=lambda method: method.name)
def test_every_rule_of_every_table_is_on_the_page_of_layers(method: vp.Method) -> None:
    page = layers.page()
    for layer, rule in method.rules.items():
        assert layers.kind(rule).word
        if layer is nn.Module:
            continue
        if isinstance(layer, type):
            assert f"\n| `{layer.__name__}` |" in page
        else:
            assert f"`{layer if isinstance(layer, str) else layer.__name__}`" in page


def test_the_tables_say_what_the_rules_are() -> None:
    assert [
        layers.cell(method, nn.ReLU) for method in (vp.VBP, vp.DVI, vp.LOCAL_REPARAM, vp.DETERMINISTIC)
    ] == [
        "approximate, {eq}`eq-6`",
        "exact, {eq}`eq-8`",
        "sampled",
        "plain",
    ]
    assert layers.cell(vp.Method("EMPTY", {}), nn.ReLU) == "none"


def test_a_rule_without_a_kind_stops_the_build() -> None:
    with pytest.raises(KeyError, match="does not state its kind"):
        layers.kind(lambda method, module, x: x)
