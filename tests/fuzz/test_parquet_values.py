"""A value in a parquet file is loaded, stored and sent unchanged, or an error names its row and column."""

import dataclasses
import functools
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness import cases, read_once, refused
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.model_directory import load_tokenizer
from rltrain.main import load_data
from rltrain.settings.compose import compose

ROWS = 3
UNITS = ["s", "ms", "us", "ns"]
ZONES = [
    None, "UTC", "Europe/Berlin", "America/New_York", "Mars/Base", "+05:30", "+25:00", "-00:01", "", " ", "../x",
    "x" * 300, "posixrules", "ü",
]  # fmt: skip
EDGES = [
    0, 1, -1, 999, 1000, 86_399, 86_400, 253402300799, -62135596800, 2**31 - 1, -(2**31), 2**62, -(2**62), 2**63 - 1,
    -(2**63),
]  # fmt: skip
numbers = st.one_of(st.none(), st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))
texts = st.one_of(
    st.text(max_size=8).map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=8),
    st.sampled_from([b"1 2 3", b"", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\x00", b"x" * 1000]),
)  # fmt: skip


def rows(inner):
    return st.lists(inner, min_size=ROWS, max_size=ROWS)


def viewed(kind: pa.DataType, bits: int):
    """Draw columns of type `kind` whose values have arbitrary bits, because a file may have any bits."""

    def build(values):
        half = 2 ** (bits - 1)
        held = [None if value is None else (value + half) % (2 * half) - half for value in values]
        return pa.array(held, pa.int64() if bits == 64 else pa.int32()).view(kind)

    return rows(numbers).map(build)


def text_column(kind: pa.DataType):
    """Draw text columns with arbitrary bytes, which need not be valid UTF-8."""

    def build(values):
        return pa.array(values, pa.large_binary() if kind == pa.large_string() else pa.binary()).view(kind)

    return rows(st.one_of(st.none(), texts)).map(build)


def typed(values, kind: pa.DataType):
    """Draw columns of type `kind` that mix `values` with nulls."""
    return rows(st.one_of(st.none(), values)).map(lambda drawn: pa.array(drawn, kind))


def dictionary(values) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(range(ROWS), pa.array(values, pa.binary()).view(pa.string()))


plain = st.one_of(
    text_column(pa.string()), text_column(pa.large_string()), st.just(pa.nulls(ROWS)), typed(texts, pa.binary()),
    rows(texts).map(dictionary),
    typed(st.integers(-(10**70), 10**70), pa.decimal256(76, 3)), typed(st.floats(), pa.float64()),
    typed(st.booleans(), pa.bool_()), typed(st.integers(-(2**63), 2**63 - 1), pa.int64()),
    typed(st.binary(min_size=16, max_size=16), pa.uuid()), typed(st.text("ab{", max_size=3), pa.json_()),
    viewed(pa.date32(), 32), viewed(pa.date64(), 64), *(viewed(pa.duration(unit), 64) for unit in UNITS),
    viewed(pa.time32("s"), 32), viewed(pa.time32("ms"), 32), viewed(pa.time64("us"), 64), viewed(pa.time64("ns"), 64),
    st.tuples(st.sampled_from(UNITS), st.one_of(st.sampled_from(ZONES), st.text("abU/+:0", max_size=5))).flatmap(
        lambda kind: viewed(pa.timestamp(*kind), 64)
    ),
)  # fmt: skip


def struct(parts) -> pa.StructArray:
    return pa.StructArray.from_arrays([part for _, part in parts], names=[name for name, _ in parts])


def nested(inner):
    fields = st.lists(st.tuples(st.sampled_from(["a", "b", "role", "content", ""]), inner), min_size=1, max_size=3)
    ends = list(range(ROWS + 1))
    return st.one_of(
        inner.map(lambda column: pa.ListArray.from_arrays(ends, column)),
        inner.map(lambda column: pa.FixedSizeListArray.from_arrays(column, 1)),
        inner.map(lambda column: pa.MapArray.from_arrays(ends, ["k"] * ROWS, column)),
        fields.map(struct),
    )


column = st.recursive(plain, nested, max_leaves=3)
name = st.one_of(st.sampled_from(["prompt", "answer", "", " ", "a.b", "x" * 300, "\x00"]), st.text(max_size=4))
usual_prompts = st.just(pa.array(["1 2 3"] * ROWS))
table = st.builds(
    lambda prompt, others: [("prompt", prompt), *others],
    st.one_of(usual_prompts, usual_prompts, column), st.lists(st.tuples(name, column), max_size=2),
)  # fmt: skip


@functools.cache
def usual(model):
    words = [
        "rollout=hf",
        "placement=inprocess",
        "profile=demo",
        f"model.path={model}",
        "data.train=p.parquet",
        "data.val=null",
    ]
    with read_once():
        config = compose([*words, "reward.functions=[my_reward.py:score]", "trainer.output_dir=new_run"])[0]
    return config, load_tokenizer(model)


@pytest.mark.timeout(7200)
@given(columns=table, prompts=st.sampled_from(["refuse", "filter"]))
@cases(0.08, 40)
def test_parquet_values_are_kept_or_refused_by_row_and_column(here_once, model, columns, prompts):
    config, tokenizer = usual(model)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, overlong_prompts=prompts))
    path = here_once / "p.parquet"
    try:
        made = pa.Table.from_arrays([column for _, column in columns], names=[name for name, _ in columns])
        pq.write_table(made, path)
    except (pa.ArrowException, OSError, ValueError):  # Parquet cannot hold the column.
        return

    def use() -> None:
        train, _ = load_data(config, tokenizer)
        train.fingerprint()
        assert pickle.loads(pickle.dumps(list(train))) is not None  # Reward processes receive rows in pickled form.

    try:
        said = refused(use)
        assert not said or "p.parquet" in said, said
        assert "\n" not in said or "\n" in "".join(name for name, _ in columns), said
    finally:
        path.unlink()
