"""Arrays of numbers, one for each token of an answer, such as token ids, weight versions and log-probs.

A number takes 4 bytes in an array of int32 or float32, and about 30 bytes in a list. Arrays are also pickled as one
block of bytes, so answers cross process boundaries without a Python object for each token.

`rltrain.batch.token_arrays` uses the standard library's arrays and not torch, because environment processes import
`rltrain.batch.token_arrays` but must not load torch.
"""

from array import array
from collections.abc import Iterable

INT32, INT64, FLOAT32 = "i", "q", "f"  # Type codes of arrays.


def int_array(values: Iterable[int]) -> "array[int]":
    """Return the values as an array of int32; an argument that is such an array is returned without a copy."""
    return values if isinstance(values, array) and values.typecode == INT32 else array(INT32, values)


def float_array(values: Iterable[float]) -> "array[float]":
    """Return the values as an array of float32; an argument that is such an array is returned without a copy."""
    return values if isinstance(values, array) and values.typecode == FLOAT32 else array(FLOAT32, values)
