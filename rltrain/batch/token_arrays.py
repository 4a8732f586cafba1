"""Compact arrays for values that every token of an answer has, such as its id, weight version and log-prob.

A number takes 4 bytes in an array of int32 or float32, and about 30 bytes in a list. Arrays are also pickled as one
block of bytes, so answers cross process boundaries without a Python object for each token.

`rltrain.batch.token_arrays` uses the standard library's arrays and not torch, because environment processes import
`rltrain.batch.token_arrays` but must not load torch.
"""

from array import array
from collections.abc import Iterable

INT16, INT32, INT64, FLOAT32 = "h", "i", "q", "f"  # Type codes of the class `array.array`.
NOT_RECORDED = -1  # Takes the place of an expert's number where no expert was recorded.


def int_array(values: Iterable[int]) -> "array[int]":
    """Convert the values to an array of int32. If `values` already is an array of int32, it is returned itself."""
    return values if isinstance(values, array) and values.typecode == INT32 else array(INT32, values)


def short_array(values: Iterable[int]) -> "array[int]":
    """Convert the values to an array of int16. If `values` already is an array of int16, it is returned itself."""
    return values if isinstance(values, array) and values.typecode == INT16 else array(INT16, values)


def float_array(values: Iterable[float]) -> "array[float]":
    """Convert the values to an array of float32. If `values` already is an array of float32, it is returned itself."""
    return values if isinstance(values, array) and values.typecode == FLOAT32 else array(FLOAT32, values)
