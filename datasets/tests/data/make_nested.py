"""Makes nested.parquet and nested.json: rows with lists, structs and maps, and what pyarrow reads back.

Needs `pip install pyarrow`.
"""

import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.int64()))]))),
    ]
)
SCHEMA = pa.schema(
    [
        ("messages", pa.list_(MESSAGE)),
        ("tools", pa.list_(pa.list_(pa.string()))),
        ("options", pa.struct([("deep", pa.struct([("flag", pa.bool_()), ("share", pa.float32())]))])),
        ("large", pa.large_string()),
        ("count", pa.uint64()),
        ("day", pa.date32()),
    ]
)
ROWS = [
    {
        "messages": [
            {"role": "user", "content": "caf\u00e9?", "tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"name": "add", "arguments": [("a", 1), ("b", None)]}, {"name": "none", "arguments": []}],
            },
        ],
        "tools": [["x", None], [], None],
        "options": {"deep": {"flag": True, "share": 0.1}},
        "large": "text",
        "count": 2**64 - 1,
    },
    {"messages": [], "tools": None, "options": None, "large": None, "count": None},
    {"messages": None, "tools": [], "options": {"deep": None}, "large": "", "count": 0},
    {"messages": [None], "tools": [[]], "options": {"deep": {"flag": None, "share": -2.5}}, "large": "x", "count": 7},
]


def plain(value, kind):
    """Returns a value of pyarrow as JSON: maps are objects, and a float32 has the digits that it needs."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return {name: plain(item, kind.item_type) for name, item in value}
    if pa.types.is_list(kind):
        return [plain(item, kind.value_type) for item in value]
    if pa.types.is_float32(kind):
        return float(f"{value:.7g}")
    return value


def main():
    folder = Path(__file__).parent
    rows = [row | {"day": datetime.date(2026, 7, 4)} for row in ROWS]
    table = pa.Table.from_pylist(rows, SCHEMA)
    pq.write_table(table, folder / "nested.parquet", compression="zstd", row_group_size=3)
    read = pq.read_table(folder / "nested.parquet").drop_columns(["day"])
    expected = [{f.name: plain(row[f.name], f.type) for f in read.schema} for row in read.to_pylist()]
    (folder / "nested.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
