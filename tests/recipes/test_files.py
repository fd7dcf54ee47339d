"""What comes in through the door for files is bounded, or refused with the file, the line and the rule."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from recipes import files
from recipes.files import FileError
from recipes.problems import RecipeError
from recipes.yaml_lines import parse

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    BOMB: "more than 100000 values",
    "a: 1\nb: &b [*b]": "y:2: holds more than 100000 values, or is nested too deeply",
    "a: *b": "y:1:4: not YAML: found undefined alias: 'a: *b'",
    "[" * 100_000: "nested too deeply",
    "- " * 100_000: "nested too deeply",
    "- x\n" * 200_000: "y:100000: holds more than 100000 values",
    "a:\n &a {b: [x, x]}\nc:\n" + " - *a\n" * 20_000: "y:2: holds more than 100000 values",
    "a: &a [" + "[" * 40 + "]" * 40 + "]\nb: [[[[[[[[[[[*a]]]]]]]]]]]": "nested too deeply",
    "a: 2026-13-45": "not YAML: month must be in 1..12",
    "a: !!int x": "not YAML",
    "a: 0x" + "f" * 1000: "an integer of 4000 bits",
    "a: " + "9" * 5000: "not YAML",
    'a: "\\0"': r"y:1: holds '\x00': no name or text has a character that a screen obeys",
    '"a\\e[2J": b': r"y:1: holds '\x1b'",
    'a: "\\ud800"': "y:1:7: not YAML: found invalid Unicode character escape code",
    "a: \x01": "not YAML",
    "? [a]\n: b": "not YAML",
    "a: !!python/object:os.system x": "not YAML",
    "a: 1\nrows: {a: [1, 2}": "y:2:16: not YAML: did not find expected ',' or ']': 'rows: {a: [1, 2}'",
    "b: 2\na: 1\n\na: 3": "y:4:1: key 'a' is already in line 2: a key stands once in its mapping; remove one",
    "a: {b: {c: 1, c: 2}}": "y:1:15: key 'c' is already in line 1",
    "a: [{b: 1, b: 2}]": "y:1:12: key 'b' is already in line 1",
}
JSON = {
    "": "is empty",
    "[" * 100_000: "nested too deeply",
    "[" * 51 + "]" * 51: "nested too deeply",
    '{"a": NaN}': "NaN is no JSON",
    "1e999": "1e999 is beyond all floating-point numbers",
    "9" * 5000: "an integer of 5000 digits",
    '["\\ud800"]': "half of a surrogate pair",
    '{"a": 1,\n"a": 2}': ':2: key "a" stands twice in one object (lines 1, 2)',
    '{"a":\n1,}': ": not JSON: ",  # Python 3.13 points at the comma, others behind it
}


@pytest.mark.parametrize("text", YAML, ids=[text[:30] for text in YAML])
def test_yaml_is_refused(text):
    with pytest.raises(RecipeError) as caught:
        parse(text, "y")
    assert YAML[text] in str(caught.value) and "\n" not in str(caught.value)


def test_yaml_may_repeat_itself():
    assert parse("a: &a {b: [1, 2]}\nc: {<<: *a, d: *a}", "y").value["c"] == {"b": [1, 2], "d": {"b": [1, 2]}}


@pytest.mark.parametrize("text", JSON, ids=[text[:30] for text in JSON])
def test_json_is_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        files.read_json(path)
    assert str(caught.value).startswith(str(path)) and JSON[text] in str(caught.value)


def test_json_of_50_levels_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\ufeff" + "[" * 50 + "]" * 50)
    assert files.read_json(path) == json.loads("[" * 50 + "]" * 50)


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "endless", "long name", "NUL", "too large"])
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, kind):
    path = tmp_path / "a"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "too large":
        path.write_bytes(b" " * 1001)
    path = {"endless": Path("/dev/zero"), "long name": tmp_path / ("x" * 300), "NUL": Path("a\0b")}.get(
        kind, path
    )
    for read in (
        files.read_json,
        files.read_safetensors_header,
        lambda path, _=0: [*files.lines_of(path, 1000)],
    ):
        with pytest.raises(FileError):
            read(path, 1000) if read is files.read_json else read(path)


def write_tensors(path: Path, header: object, data: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def entry(start: int, end: int, dtype: str = "F32", shape: object = (2, 3)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_tensors_are_found_where_safetensors_puts_them(tmp_path):
    import torch
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(True), "c": torch.zeros(0, 4)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = files.read_safetensors_header(path)
    assert {name: tensor.shape for name, tensor in found.items()} == {"a": (2, 3), "b": (), "c": (0, 4)}
    content = path.read_bytes()[found["a"].start : found["a"].end]
    assert torch.frombuffer(bytearray(content), dtype=torch.float32).tolist() == list(range(6))


BROKEN = {
    "short": (b"", -8, "damaged"),
    "no JSON": (b"{]", 0, "not JSON"),
    "a list": ([], 0, "its header is a list"),
    "a gap": ({"a": entry(4, 28)}, 28, "tensor a begins at byte"),
    "an overlap": ({"a": entry(0, 24), "b": entry(20, 44)}, 44, "tensor b begins at byte"),
    "cut off": ({"a": entry(0, 24)}, 23, "it is cut off or damaged"),
    "longer": ({"a": entry(0, 24)}, 25, "it is cut off or damaged"),
    "another size": ({"a": entry(0, 23)}, 23, "type, shape and place of a tensor agree"),
    "no such type": ({"a": entry(0, 24, "X32")}, 24, "type, shape and place"),
    "a list as type": ({"a": entry(0, 24, ["F32"])}, 24, "type, shape and place"),
    "a text as shape": ({"a": entry(0, 24, shape="6")}, 24, "type, shape and place"),
    "a negative size": ({"a": entry(0, 24, shape=(-2, -3))}, 24, "type, shape and place"),
    "no entry": ({"a": 3}, 24, "type, shape and place"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_damaged_tensors_are_refused_by_their_header(tmp_path, case):
    path = tmp_path / "a.safetensors"
    header, data, said = BROKEN[case]
    if data < 0:
        path.write_bytes(b"1234567")
    else:
        write_tensors(path, header, data)
    with pytest.raises(FileError, match=said):
        files.read_safetensors_header(path)


def test_a_file_of_settings_has_a_bound_of_values(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({f"key{number}": [1] for number in range(60_000)}))
    with pytest.raises(FileError, match="holds more than 100000 values"):
        files.read_settings(path)
    path.write_text(json.dumps({f"key{number}": [1] for number in range(40_000)}))
    assert len(files.read_settings(path)) == 40_000
