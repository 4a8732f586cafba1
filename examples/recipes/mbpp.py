"""The data set MBPP (arXiv:2108.07732): Python problems, each with a few asserts that a correct program passes."""

from collections.abc import Iterator

QUESTION = """{text}

The program must pass these tests:

```python
{tests}
```

Answer with the program, in one Python code block."""
COMMIT = "4bb6404fdc6cacfda99d4ac4205087b89d32030c"  # All runs read this version of the data set.
SPLITS = {"train": "train", "val": "validation"}  # names of the splits in rltrain and on the hub


def rows(split: str) -> Iterator[dict[str, str]]:
    """Yield the problems of the split `train` or `val`, with the columns `question` and `tests`."""
    from datasets import load_dataset

    for row in load_dataset("google-research-datasets/mbpp", "full", split=SPLITS[split], revision=COMMIT):
        tests = "\n".join(row["test_list"])
        question = QUESTION.format(text=row["text"], tests=tests)
        yield {"question": question, "tests": f"{row['test_setup_code']}\n{tests}".strip()}
