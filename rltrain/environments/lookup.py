"""Environment of the built-in task `lookup`: a hidden table of ten digits; each call of the tool shows one entry."""

ENTRIES = 10


class Lookup:
    """A hidden table with one digit for each key from 0 to 9.

    The policy reads the table with the tool `lookup`. The environment gives no reward: a reward function compares the
    policy's last answer with the right answer.
    """

    def reset(self, table: str) -> None:
        """Store the table of digits, which the policy can read only with the tool `lookup`.

        Args:
            table: ten decimal digits; the digit at position k is the entry of key k.

        Raises:
            ValueError: `table` does not consist of ten decimal digits.
        """
        if len(table) != ENTRIES or not (table.isascii() and table.isdigit()):
            raise ValueError(f"table={table!r}: the hidden table must consist of {ENTRIES} decimal digits")
        self._table = table

    def lookup(self, key: int) -> str:
        """Show one entry of the hidden table.

        Args:
            key: The key of the entry, from 0 to 9.
        """
        if type(key) is not int or not 0 <= key < ENTRIES:
            raise ValueError(f"key={key!r:.20}: must be an integer from 0 to {ENTRIES - 1}")
        return self._table[key]
