"""Class lists in the formats of other programs."""

import pytest

from data.errors import DataError
from data.extras.class_lists import read_class_list

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("n.txt", "crane\n gull \n\n", ("crane", "gull")),
        ("n.txt", "", "it contains no class names"),
        ("n.txt", "crane\n\ngull", "class 1 has no name"),
        ("n.jsonl", '"crane"\n{"name": "gull"}\n', ("crane", "gull")),
        ("n.jsonl", "7", "class 0 has no name"),
        ("n.json", '["crane", "gull"]', ("crane", "gull")),
        ("n.json", '{"1": "gull", "0": "crane"}', ("crane", "gull")),
        ("n.json", '{"names": ["crane"], "other": 3}', ("crane",)),
        ("n.json", '{"id2label": {"0": "crane"}}', ("crane",)),
        ("n.json", '{"label_names": ["owl"]}', ("owl",)),
        ("n.json", "[]", "it contains no class names"),
        ("n.json", "{}", "it contains no class names"),
        ("n.json", "7", "it contains no class names"),
        ("n.json", '"crane"', "it contains no class names"),
        ("n.json", '["crane", ""]', "class 1 has no name"),
        ("n.json", '{"1": "gull"}', "class 0 has no name"),
        ("n.json", "[3", "n.json: "),
        ("n.txt", "tench\ngoldfish\n\n", ("tench", "goldfish")),
        ("n.json", '{"1": "goldfish", "0": "tench"}', ("tench", "goldfish")),
        ("n.json", '["tench", "goldfish"]', ("tench", "goldfish")),
        ("config.json", '{"model_type": "vit", "id2label": {"0": "tench", "1": "goldfish"}}', ("tench", "goldfish")),
        ("a.index.json", '{"schema": 3, "names": ["tench", "goldfish"]}', ("tench", "goldfish")),
        ("n.jsonl", '{"name": "tench"}\n"goldfish"\n', ("tench", "goldfish")),
        ("n.txt", "tench\n\ngoldfish\n", "class 1 has no name"),
        ("n.json", '{"2": "goldfish", "0": "tench"}', "class 1 has no name"),
        ("n.txt", "", "it contains no class names"),
        ("n.json", "tench", "expected one class name per line"),
    ],
)
def test_a_class_list_is_read_in_every_form(file, text, expected, tmp_path) -> None:
    path = tmp_path / file
    path.write_text(text)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            read_class_list(path)
    else:
        assert read_class_list(path) == expected
