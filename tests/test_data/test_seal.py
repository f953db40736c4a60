"""Sealed records, cache entries and journals: every flipped bit and every truncation is detected."""

import hashlib
import json

import pytest

from data.errors import DataError
from data.seal import Journal, Unsealed, check_schema, read_entry, seal, unseal, write_entry

pytestmark = pytest.mark.quick

ENTRIES = {"key": "1a2b", "seconds": 3.25, "names": ["größe", None]}


@pytest.mark.parametrize("lines", [True, False])
def test_a_record_is_json_whose_last_entry_is_the_digest_of_the_text_before(lines):
    text = seal(ENTRIES, lines=lines)
    digest = json.loads(text)["sha256"]
    before = text.rpartition(',\n "sha256"' if lines else ', "sha256"')[0]
    assert digest == hashlib.sha256((before + ("\n}" if lines else "}")).encode()).hexdigest()
    assert unseal(text.encode()) == ENTRIES


@pytest.mark.parametrize("lines", [True, False])
def test_any_flipped_bit_and_any_truncation_is_detected(lines):
    text = seal(ENTRIES, lines=lines).encode()
    for place in range(len(text)):
        flipped = text[:place] + bytes([text[place] ^ 1 << place % 8]) + text[place + 1 :]
        with pytest.raises((Unsealed, UnicodeDecodeError)):
            unseal(flipped)
        with pytest.raises(Unsealed):
            unseal(text[:place])


def test_altered_cache_entry_is_not_returned(tmp_path):
    path = tmp_path / "entry"
    assert read_entry(path) is None
    write_entry(path, b"pixels")
    assert read_entry(path) == b"pixels"
    path.write_bytes(b"Pixels" + path.read_bytes()[6:])
    assert read_entry(path) is None


def test_journal_keeps_the_records_before_a_truncated_line(tmp_path):
    path = tmp_path / "work.partial"
    with Journal(path, ["setting", 1]) as journal:
        journal.add("a.tar", [1, 2])
        journal.add("b.tar", {"n": 3})
    with open(path, "a") as file:
        file.write('{"key": "c.tar", "rec')
    with Journal(path, ["setting", 1]) as journal:
        assert journal.records == {"a.tar": [1, 2], "b.tar": {"n": 3}}
        journal.add("c.tar", 4)
    with Journal(path, ["setting", 1]) as journal:
        assert list(journal.records) == ["a.tar", "b.tar", "c.tar"]


def test_journal_of_other_settings_is_started_over(tmp_path):
    with Journal(tmp_path / "j", 1) as journal:
        journal.add("a", 1)
    with Journal(tmp_path / "j", 2) as journal:
        assert journal.records == {}


def test_newer_schema_is_refused_and_an_older_one_is_left_to_the_reader():
    check_schema("runs/x/done.json", 1, 2)
    with pytest.raises(DataError, match=r"runs/x/done\.json was written by a newer Patchline: it has schema 3, .* 2\n"):
        check_schema("runs/x/done.json", 3, 2)


@pytest.mark.parametrize("schema", [None, "1", 1.0, [1], {"a": 1}])
def test_schema_that_is_no_whole_number_is_refused(schema):
    with pytest.raises(DataError, match=r"x/done\.json has schema .*, expected a whole number up to 1\n  restore"):
        check_schema("runs/x/done.json", schema, 1)
