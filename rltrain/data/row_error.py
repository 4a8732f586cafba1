"""The error of a row of data that cannot become a prompt."""


class RowError(ValueError):
    """Raised if a row of the data cannot become a prompt.

    The message of a `RowError` does not name the row; the caller adds the row's location.
    """
