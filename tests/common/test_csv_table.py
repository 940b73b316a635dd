"""Tables as CSV text, read back by Python's own reader."""

from __future__ import annotations

import csv
import io
import math

import pytest

from persafl_lit.common.csv_table import columns_to_csv, to_csv


def test_floats_read_back_to_the_same_bits():
    values = [0.1, 1 / 3, 1e-300, -0.0, 2.0**53 + 2]
    (_, *rows) = csv.reader(io.StringIO(columns_to_csv({"x": values, "y": list(range(5))})))
    assert [float(x).hex() for x, _ in rows] == [value.hex() for value in values]
    assert [int(y) for _, y in rows] == list(range(5))


def test_columns_come_as_asked_and_then_as_they_appear_and_what_is_unknown_is_empty():
    rows = [{"b": 1, "new": None}, {"a": math.nan, "other": "x"}]
    assert to_csv(rows, ["a", "b"]) == "a,b,new,other\n,1,,\n,,,x\n"


@pytest.mark.parametrize("text", ["=1+1", "+A1", "-cmd|x", "@SUM(A1)", "\tx"])
def test_no_cell_and_no_name_is_a_formula(text):
    header, cell = csv.reader(io.StringIO(to_csv([{text: text}])))
    assert header == cell == [f"'{text}"]


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        columns_to_csv({"a": [1, 2], "b": [1]})
