"""Every kind of column becomes the numbers that are promised, in the library and in a graph."""

import json
import math
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from varprop.table.dates import order_of
from varprop.table.encoding import Encoder
from varprop.table.kinds import REACH, Category, Date, Number
from varprop.table.messages import TableError, TableWarning

ROWS = 400


@pytest.fixture
def table() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "town": rng.choice(["Ulm", "Köln", "a,b", '"quoted"'], ROWS),
            "area": rng.gamma(3.0, 10.0, ROWS),
            "rooms": rng.integers(1, 6, ROWS).astype(float),
            "garden": rng.choice(["true", "false"], ROWS),
            "income": np.exp(2.0 * rng.normal(size=ROWS)),
            "sold": pd.Timestamp("2020-02-28") + pd.to_timedelta(rng.integers(0, 900, ROWS), "D"),
        }
    )
    frame.loc[::7, "town"] = None
    frame.loc[::5, "rooms"] = None
    return frame


def reference(table: pd.DataFrame) -> np.ndarray:
    """The same with pandas alone."""
    numeric = table[["area", "rooms", "income"]].copy()
    median = table.income.median()
    distance = (table.income - median).abs()
    numeric["rooms"] = table.rooms.fillna(table.rooms.median())
    numeric["income"] = np.arcsinh((table.income - median) / (5 * distance[distance > 0].median()))
    days = (table.sold - pd.Timestamp("1970-01-01")).dt.days
    angles = np.stack([2 * np.pi * days / 365.2425, 2 * np.pi * ((days + 3) % 7 - 3) / 7], 1)
    towns = pd.get_dummies(table.town.fillna(""), dtype=float)
    gardens = pd.get_dummies(table.garden, dtype=float)
    none = np.zeros((len(table), 1))
    missing = table[["rooms"]].isna()
    return np.hstack(
        [
            numeric,
            days.to_numpy()[:, None],
            np.sin(angles),
            np.cos(angles),
            missing,
            towns,
            none,
            gardens,
            none,
        ]
    )


def test_every_kind_of_column_is_encoded_as_pandas_would(table: pd.DataFrame) -> None:
    encoder = Encoder.fit(table)
    np.testing.assert_allclose(encoder.transform(table), reference(table), atol=1e-9)
    again = Encoder.from_json(json.loads(json.dumps(encoder.to_json(), allow_nan=False)))
    assert again == encoder
    np.testing.assert_array_equal(again.transform(table), encoder.transform(table))


def test_a_graph_takes_places_days_and_nan(table: pd.DataFrame) -> None:
    encoder = Encoder.fit(table)
    x = torch.tensor(encoder.coded(table))
    assert list(encoder.types) == ["area", "rooms", "income", "sold", "town", "garden"]
    assert x.isnan().any(0).tolist() == [False, True, False, False, False, False]
    x[x[:, 4] == 0, 4] = torch.nan  # a missing category may be given by its place or as NaN
    assert x[:, 4].isnan().any()
    np.testing.assert_array_equal(encoder.module()(x), encoder.transform(table))
    for other in (-1.0, 0.5, 9.0, 5.0):
        x[:, 4] = other
        towns = encoder.module()(x)[:, -9:-3]
        assert towns.shape[1] == len(encoder.categories[0].categories) + 1
        assert towns[:, -1].eq(1).all()
        assert towns[:, :-1].eq(0).all()


@pytest.mark.parametrize("kinds", [["numeric"], ["text"], ["date"], ["numeric", "date", "text"]])
def test_the_graph_of_many_columns_is_no_larger(kinds: list[str]) -> None:
    values = {
        "numeric": [1.0, 2.0, None, 3000.0, 2.5],
        "date": ["2020-01-01", "2020-01-02T12:00", None, "2021-01-01", "2022-01-01"],
        "text": ["a", "b", "c", None, "a"],
    }

    def operations(count: int) -> int:
        table = pd.DataFrame({f"{kind} {i}": values[kind] for kind in kinds for i in range(count)})
        encoder = Encoder.fit(table)
        module, x = encoder.module(), torch.tensor(encoder.coded(table))
        np.testing.assert_array_equal(module(x), encoder.transform(table))
        return len([node for node in torch.fx.symbolic_trace(module).graph.nodes if node.op != "get_attr"])

    assert operations(1) == operations(50) < 60


def test_every_row_is_encoded_by_itself(table: pd.DataFrame) -> None:
    encoder = Encoder.fit(table)
    rows = np.vstack([encoder.transform(table.iloc[i : i + 1]) for i in range(20)])
    np.testing.assert_array_equal(rows, encoder.transform(table.iloc[:20]))


def test_only_columns_with_heavy_tails_are_squashed() -> None:
    rng = np.random.default_rng(1)
    table = pd.DataFrame(
        {
            "normal": rng.normal(size=5000),
            "uniform": rng.uniform(size=5000),
            "lognormal": np.exp(1.5 * rng.normal(size=5000)),
            "mostly zero": np.where(rng.uniform(size=5000) < 0.9, 0.0, np.exp(2 * rng.normal(size=5000))),
            "flag": rng.integers(0, 2, 5000).astype(float),
        }
    )
    encoder = Encoder.fit(table)
    assert [n.name for n in encoder.numbers if n.scale is not None] == ["lognormal", "mostly zero"]
    encoded = encoder.transform(table)
    order = np.argsort(table["lognormal"])
    assert (np.diff(encoded[order, 2]) >= 0).all()
    assert np.abs(encoded[:, 2:4]).max() < 10


def test_rare_categories_are_pooled_and_share_the_place_of_new_ones() -> None:
    table = pd.DataFrame(
        {"c": ["a"] * 490 + ["b"] * 6 + ["c"] * 4, "x": np.random.default_rng(0).normal(size=500)}
    )
    (category,) = Encoder.fit(table).categories
    assert (category.categories, category.rare) == (["a", "b"], ["c"])  # 1 % of 500 rows are 5
    encoder = Encoder.fit(table)
    np.testing.assert_array_equal(encoder.transform(table)[-5:, 1:], [[0, 1, 0]] + [[0, 0, 1]] * 4)
    new = pd.DataFrame({"c": ["z", "c", "q", None], "x": 0.0}, index=[7, 8, 9, 10])
    with pytest.warns(TableWarning) as caught:
        encoded = encoder.transform(new)
    np.testing.assert_array_equal(encoded[:, 1:], [[0, 0, 1]] * 4)
    (message,) = {str(warning.message) for warning in caught}
    assert message == (
        "column 'c' has 'z' in row 7 and 2 more like it, which training never had; it is treated as unknown."
    )


def test_small_tables_keep_all_categories() -> None:
    table = pd.DataFrame({"c": list("aabbc"), "x": [1.0, 2.0, 3.0, 5.0, 4.0]})
    (category,) = Encoder.fit(table).categories
    assert (category.categories, category.rare) == (["a", "b", "c"], [])


@pytest.mark.parametrize("large", [1e30, math.inf])
def test_what_training_never_had_is_told(table: pd.DataFrame, large: float) -> None:
    encoder = Encoder.fit(table)
    new = table.iloc[:3].copy()
    new.loc[1, "area"] = None
    new.loc[2, "income"] = large
    with pytest.warns(TableWarning) as caught:
        encoded = encoder.transform(new)
    assert sorted(str(w.message) for w in caught) == [
        "column 'area' has no value in row 1, where training always had one; the median is taken.",
        f"column 'income' has '{large}' in row 2, far beyond all that training had; the prediction is a "
        "guess.",
    ]
    assert np.isfinite(encoded).all()
    assert np.abs(encoded[:, 2]).max() < np.arcsinh(2 * REACH * table.income.max())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder.transform(table)  # what training had is not


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        ([f"name {i}" for i in range(ROWS)], "text with 400 different values"),
        ([f"name {i // 2}" for i in range(ROWS)], "text with 200 different values"),
        ([None] * ROWS, "has no values"),
        (["NA", ""] * (ROWS // 2), "has no values"),
        ([3.5] * ROWS, "has one value only"),
        (["x"] * ROWS, "has one value only"),
        (range(ROWS), "numbers the rows"),
        (range(1, ROWS + 1), "numbers the rows"),
        ([str(i) for i in range(ROWS)], "numbers the rows"),
    ],
)
def test_columns_that_are_left_out_are_named(table: pd.DataFrame, column: object, reason: str) -> None:
    table["extra"] = column
    encoder = Encoder.fit(table.sample(frac=0.9, random_state=0))  # in any order: the index knows
    assert list(encoder.left_out) == ["extra"]
    if "different" not in reason:
        assert encoder.left_out["extra"] == reason
    assert "left out: 'extra'" in encoder.notes[-1]
    assert "extra" not in encoder.types


@pytest.mark.parametrize(
    "name", ["id", "customer_id", "Customer ID", "userId", "uuid", "Unnamed: 0", "row-index"]
)
def test_unique_values_under_the_name_of_an_identifier_are_left_out(table: pd.DataFrame, name: str) -> None:
    table[name] = np.random.default_rng(0).permutation(10**6)[:ROWS]
    assert Encoder.fit(table).left_out == {name: "is an identifier"}
    assert name in Encoder.fit(table, keep=[name]).types
    table.loc[0, name] = table.loc[1, name]
    assert not Encoder.fit(table).left_out


@pytest.mark.parametrize("name", ["width", "acid", "paid", "humid", "price"])
def test_other_unique_numbers_are_used(table: pd.DataFrame, name: str) -> None:
    table[name] = np.random.default_rng(0).permutation(10**6)[:ROWS]
    assert not Encoder.fit(table).left_out


def test_a_row_number_is_used_where_there_is_nothing_else() -> None:
    table = pd.DataFrame({"t": range(50), "const": 1})
    assert list(Encoder.fit(table).types) == ["t"]


def test_many_frequent_categories_are_kept_up_to_a_hundred() -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"c": [f"c{i}" for i in rng.geometric(0.02, 20_000)], "x": rng.normal(size=20_000)})
    (category,) = Encoder.fit(table).categories
    assert len(category.categories) == 100
    assert len(category.rare) > 20


def test_words_in_a_column_of_numbers_are_missing_values() -> None:
    rng = np.random.default_rng(0)
    text = [f"{v:.3f}" for v in rng.normal(size=100)]
    table = pd.DataFrame({"some": [*text[:95], "broken", *text[96:]], "many": ["?", "-"] * 20 + text[:60]})
    encoder = Encoder.fit(table)
    assert [(n.name, n.missing, n.words) for n in encoder.numbers] == [
        ("some", True, ["broken"]),
        ("many", True, ["-", "?"]),
    ]
    assert "'some' ('broken'), 'many' ('-', '?')" in encoder.notes[0]
    np.testing.assert_array_equal(encoder.transform(table)[:, 2], [float(i == 95) for i in range(100)])
    with pytest.raises(
        TableError, match="column 'some' has 'lost' in row 0, where a finite number is needed"
    ):
        encoder.transform(table.assign(some="lost"))


def test_numbers_and_words_in_equal_parts_are_categories() -> None:
    encoder = Encoder.fit(pd.DataFrame({"size": ["8", "10", "XL", "M"] * 25}))
    assert encoder.categories[0].categories == ["10", "8", "M", "XL"]


def test_percents_thousands_and_currencies_are_numbers() -> None:
    table = pd.DataFrame(
        {"rate": ["49.8%", "3%", "7.5 %"], "price": ["36,953", "1,000.5", "$12"], "x": [1, 2, 4]}
    )
    encoder = Encoder.fit(table)
    np.testing.assert_array_equal(encoder.coded(table)[:, :2], [[49.8, 36953], [3, 1000.5], [7.5, 12]])
    assert "'rate' ('49.8%'), 'price' ('36,953')" in encoder.notes[0]


@pytest.mark.parametrize(
    "dates",
    [
        ["2020-02-29", "2021-03-01", None],
        [pd.Timestamp("2020-02-29"), pd.Timestamp("2021-03-01"), None],
        ["2020-02-29T00:00:00Z", "2021-03-01 01:00+01:00", "NA"],
    ],
)
def test_dates_become_days_and_cycles(dates: list[object]) -> None:
    table = pd.DataFrame({"when": dates})
    encoder = Encoder.fit(table)
    (date,) = encoder.numbers
    assert isinstance(date, Date)
    assert not date.clock
    encoded = encoder.transform(table)
    np.testing.assert_array_equal(encoded[:2, 0], [18321, 18687])
    # sine and cosine of the year and of the week, one for missing dates
    np.testing.assert_allclose(encoded[:, 1:5].reshape(3, 2, 2).transpose(0, 2, 1) ** 2 @ [1, 1], 1)
    np.testing.assert_array_equal(encoded[:, 5], [0, 0, 1])
    with pytest.raises(TableError, match=r"column 'when' has 'soon' in row 0, where a date"):
        encoder.transform(pd.DataFrame({"when": ["soon"]}))


@pytest.mark.parametrize(
    ("dates", "order"),
    [
        (["29/02/2024", "1/3/2024"], "day"),
        (["2/29/2024", "03-01-2024"], "month"),
        (["2024/2/29", "2024.03.01"], "year"),
        (["29.2.2024 00:00", "1.3.2024 0:00:00"], "day"),
        (["2/29/2024 0:00", "2024-03-01"], "month"),
    ],
)
def test_dates_are_read_in_the_order_that_suits_all(dates: list[str], order: str) -> None:
    encoder = Encoder.fit(pd.DataFrame({"when": dates}))
    (date,) = encoder.numbers
    assert isinstance(date, Date)
    assert date.order == order
    assert encoder.notes == ["dates become parts: 'when'" + f" ({order} first)" * (order != "year")]
    again = Encoder.from_json(json.loads(json.dumps(encoder.to_json())))
    new = pd.DataFrame({"when": [*dates, "2024-03-02", pd.Timestamp("2024-03-03")]})
    assert again.coded(new)[:, 0].tolist() == [19782, 19783, 19784, 19785]
    with pytest.raises(TableError, match=r"has '31/31/2024' in row 0, where a date such as \S*2024"):
        again.coded(pd.DataFrame({"when": ["31/31/2024"]}))


def test_points_stand_between_day_and_month_where_either_could_be_first() -> None:
    assert order_of(pd.Series(["1.2.2024", "3.4.2024"])) == "day"
    assert order_of(pd.Series(["1/2/2024", "3/4/2024"])) == "month"
    assert order_of(pd.Series(["2.13.2024", "3.4.2024"])) == "month"
    for text in ("1.2.3", "10-11-12", "2024", "20240229", "13/13/2024", "13/1/2024 25:00"):
        assert order_of(pd.Series([text])) is None


def test_times_of_day_are_kept() -> None:
    table = pd.DataFrame({"when": ["2020-01-01 06:00", "2020-01-02 12:00", "2020-01-05"]})
    encoded = Encoder.fit(table).transform(table)
    np.testing.assert_allclose(encoded[:, 3], [1, 0, 0], atol=1e-9)  # the sine of the time of day
    np.testing.assert_allclose(encoded[:, 6], [0, -1, 1], atol=1e-9)


def test_truth_values_are_categories_however_they_are_written() -> None:
    truth = [True, False, True, False, True]
    first = Encoder.fit(pd.DataFrame({"flag": truth}))
    assert first.categories[0].categories == ["False", "True"]
    np.testing.assert_array_equal(
        first.transform(pd.DataFrame({"flag": [str(t) for t in truth]})),
        first.transform(pd.DataFrame({"flag": truth})),
    )


def test_pandas_categories_and_strings_are_categories(table: pd.DataFrame) -> None:
    typed = table.astype({"town": "category", "garden": "string"})
    np.testing.assert_array_equal(Encoder.fit(typed).transform(typed), Encoder.fit(table).transform(table))
    (rooms,) = Encoder.fit(table[["rooms"]].astype("category")).categories
    assert rooms.categories == ["", "1.0", "2.0", "3.0", "4.0", "5.0"]


def test_encoders_of_earlier_versions(table: pd.DataFrame) -> None:
    encoder = Encoder.from_json({"medians": {"area": 2.0}, "categories": {"town": ["", "Köln", "Ulm"]}})
    rows = pd.DataFrame({"area": [1.0, None], "town": ["Ulm", None]})
    np.testing.assert_array_equal(encoder.transform(rows), [[1, 0, 0, 1], [2, 1, 0, 0]])
    with pytest.warns(TableWarning, match="'Rome' in row 0"):
        assert encoder.transform(pd.DataFrame({"area": [1.0], "town": ["Rome"]}))[0, 1:].sum() == 0


def test_tables_that_cannot_be_used(table: pd.DataFrame) -> None:
    with pytest.raises(TableError, match="no column besides the target"):
        Encoder.fit(table[[]])
    with pytest.raises(TableError, match="no column can be learned from: 'area' has one value only"):
        Encoder.fit(table[["area"]].iloc[:1])
    with pytest.raises(TableError, match="column 'area' has 'inf' in row 2"):
        Encoder.fit(table.assign(area=[1.0, 2.0, np.inf, 3.0] * 100))
    with pytest.raises(TableError, match="more than one column 'area'"):
        Encoder.fit(pd.concat([table, table[["area"]]], axis=1))
    with pytest.raises(TableError, match="the table has no column 'rooms'; it has 'town', 'area'"):
        Encoder.fit(table).transform(table.drop(columns="rooms"))


def test_kinds_say_what_they_are() -> None:
    assert Number("a", 1.0).about() == {"name": "a"}
    assert Category("b", ["x"]).about() == {"name": "b", "categories": ["x"]}
    assert Date("c", 1.0).about() == {"name": "c", "unit": "days since 1970-01-01"}
