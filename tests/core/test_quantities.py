"""Numbers in text: what people write is accepted, what only Python reads as a number is not."""

from __future__ import annotations

import math

import pytest
from pydantic import TypeAdapter, ValidationError

from service.core.quantities import convert_to_float, parse_float, parse_integer
from service.serving.parameters import DecimalFloat, DecimalInteger

# An underscore, Arabic and fullwidth digits, and spaces that are not ASCII.
PYTHON_NUMERALS = ("1_0", "\u0661\u0660", "\uff11\uff10", "\u00a010", "10\u3000")


@pytest.mark.parametrize(
    "text", [*PYTHON_NUMERALS, "1_0.5", "\u0660.\u0665", "1e1_0", "inf", "nan", "1e999", "0x10", "", "."]
)
def test_text_that_is_no_decimal_number_is_refused(text: str) -> None:
    for parse in (parse_float, parse_integer, convert_to_float):
        with pytest.raises(ValueError, match="not"):
            parse(text)


@pytest.mark.parametrize(("text", "number"), [("10", 10), (" 0.5", 0.5), ("+.5\n", 0.5), ("-5.", -5), ("1E-3", 0.001)])
def test_decimal_numbers_are_read(text: str, number: float) -> None:
    assert parse_float(text) == convert_to_float(text) == convert_to_float(number) == number
    if number == int(number) and "." not in text:
        assert parse_integer(text) == number


def test_numbers_of_metadata_are_converted() -> None:
    assert math.isinf(convert_to_float(math.inf))
    with pytest.raises(TypeError):
        convert_to_float(None)


@pytest.mark.parametrize("number_type", [DecimalInteger, DecimalFloat])
@pytest.mark.parametrize("value", [*PYTHON_NUMERALS, True])
def test_fields_refuse_other_numerals_and_truth_values(number_type: type, value: object) -> None:
    adapter: TypeAdapter[float] = TypeAdapter(number_type)
    assert adapter.validate_python("10") == adapter.validate_python(10) == 10
    with pytest.raises(ValidationError):
        adapter.validate_python(value)
