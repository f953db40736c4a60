"""Folders of images are recognised by their content, and counted by class."""

from itertools import islice
from pathlib import Path

import pytest

from data.errors import DataError, UsageError
from data.extras.sources.samples import digits
from data.extras.survey.survey import FoundSet, Sets, one_place, survey
from tests.support.tars import write_tar

pytestmark = pytest.mark.quick


def write_images(folder, counts: dict[str, int]) -> None:
    """Write this many images per class, each into its class folder."""
    images = [sample.image for sample in digits(train=False, image_size=16)]
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            (folder / name / f"{number}.jpg").write_bytes(images.pop())


def test_folders_named_train_and_val_are_two_sets(tmp_path) -> None:
    write_images(tmp_path / "train", {"cat": 4, "dog": 3})
    write_images(tmp_path / "val", {"cat": 1, "dog": 2})
    sets = survey(str(tmp_path), report=lambda _: None)
    assert sets.train.source == "folder"
    assert sets.train.class_counts == {"cat": 4, "dog": 3}
    assert sets.train.shorter_side == 16
    assert sets.test is not None
    assert sets.test.class_counts == {"cat": 1, "dog": 2}
    assert sets.held_out == 0


@pytest.mark.parametrize(
    ("train", "other", "expected"),
    [("train", "val", "val"), ("Train", "Val", "Val"), ("TRAIN", "test", "test"), ("Train", "more", None)],
)
def test_a_set_is_never_its_own_evaluation_set(train: str, other: str, expected: str | None, tmp_path) -> None:
    write_images(tmp_path / train, {"cat": 4, "dog": 3})
    write_images(tmp_path / other, {"cat": 1, "dog": 2})
    sets = survey(str(tmp_path / train), report=lambda _: None)
    assert sets.train.path == str(tmp_path / train)
    assert (sets.test.path if sets.test else None) == (str(tmp_path / expected) if expected else None)


def test_jsonl_tables_named_train_and_test_are_two_sets(tmp_path) -> None:
    """Before, such a folder was one set of unlabelled images."""
    write_images(tmp_path / "images", {"a": 3, "b": 2})
    for name in ("train", "test"):
        rows = [f'{{"file_name": "images/{label}/0.jpg", "label": "{label}"}}\n' for label in "ab"]
        (tmp_path / f"{name}.jsonl").write_text("".join(rows))
    sets = survey(str(tmp_path), report=lambda _: None)
    assert sets.test is not None
    assert [Path(found.path).name for found in (sets.train, sets.test)] == ["train.jsonl", "test.jsonl"]


def test_missing_path_is_rejected(tmp_path) -> None:
    with pytest.raises(DataError):
        survey(str(tmp_path / "nowhere"), report=lambda _: None)


@pytest.mark.parametrize(("count", "percent"), [(4, 0), (499, 20), (500, 10), (250_000, 2), (10_000_000, 1)])
def test_small_set_holds_out_a_larger_share_than_a_large_one(count, percent) -> None:
    found = FoundSet("folder", "photos", images=2 * count, labelled=2 * count)
    found.class_counts.update({"cat": count, "dog": count})
    assert Sets(found).held_out == percent


def test_notes_name_only_classes_that_differ_only_in_case(tmp_path) -> None:
    write_images(tmp_path / "plain", {"cat": 2, "dog": 2})
    assert survey(str(tmp_path / "plain"), report=lambda _: None).train.notes == []
    write_images(tmp_path / "mixed", {"Cat": 2, "cat": 2, "dog": 2})
    assert survey(str(tmp_path / "mixed"), report=lambda _: None).train.notes == [
        "1 class names differ from another class name only in case"
    ]


@pytest.mark.parametrize(
    ("name", "header", "row"),
    [
        ("metadata.csv", "file_name,label\n", "{name},{label}\n"),
        ("metadata.jsonl", "", '{{"file_name": "{name}", "label": "{label}"}}\n'),
    ],
)
def test_folder_with_a_table_of_paths_is_a_table_whose_images_are_opened(name, header, row, tmp_path) -> None:
    write_images(tmp_path / "images", {"a": 3, "b": 2})
    paths = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jpg"))
    (tmp_path / name).write_text(header + "".join(row.format(name=path, label=path[7]) for path in paths))
    (tmp_path / "costs.csv").write_text("month,cost\nMay,3\n")  # has no column of paths
    found = survey(str(tmp_path), report=lambda _: None).train
    assert (found.source, found.path) == ("table", str(tmp_path / name))
    assert found.class_counts == {"a": 3, "b": 2}
    assert found.sides == [(16, 16)] * 5
    assert not found.bad
    assert found.notes == ["not used: 'costs.csv'"]


def test_unused_tables_are_named_with_the_command_that_uses_one(tmp_path) -> None:
    write_images(tmp_path / "images", {"a": 3, "b": 2})
    for name in ("train", "test", "fold 1", "fold 2"):
        rows = [f"images/{label}/{number}.jpg,{label}" for label, number in (("a", 0), ("b", 0))]
        (tmp_path / f"{name}.csv").write_text("\n".join(["path,label", *rows]))
    (tmp_path / "costs.csv").write_text("month,cost\nMay,3\n")
    found = survey(str(tmp_path), report=lambda _: None)
    assert found.test is not None
    assert found.train.notes == [
        "not used: 'costs.csv', 'fold 1.csv', 'fold 2.csv'; to use the images of a table, run python -m jobs new "
        f"'{tmp_path}/fold 1.csv'"
    ]


def test_images_of_tars_are_opened_at_their_offsets(tmp_path) -> None:
    samples = list(islice(digits(train=False, image_size=16), 6))
    (tmp_path / "tars").mkdir()
    for shard in range(2):
        members = []
        for number, sample in enumerate(samples[3 * shard : 3 * shard + 3]):
            members += [(f"{number}.jpg", sample.image), (f"{number}.cls", b"%d" % sample.labels[0])]
        write_tar(tmp_path / "tars" / f"{shard}.tar", members)
    found = survey(str(tmp_path / "tars"), report=lambda _: None).train
    assert found.images == 6
    assert found.sides == [(16, 16)] * 6
    assert found.examples == [sample.image for sample in samples]


@pytest.mark.parametrize(("unlabelled", "source"), [(1, "shards"), (20, "tars")])
def test_unlabelled_samples_are_no_training_images(unlabelled: int, source: str, tmp_path) -> None:
    members = []
    for number, sample in enumerate(islice(digits(train=False, image_size=16), 40)):
        members.append((f"{number}.jpg", sample.image))
        if number >= unlabelled:
            members.append((f"{number}.cls", str(number % 2).encode()))
    write_tar(tmp_path / "a.tar", members)
    sets = survey(str(tmp_path), report=lambda _: None)
    assert sets.train.source == source, "many unlabelled samples would be read in vain in each pass"
    assert sets.images == round(0.8 * (40 - unlabelled)), "a fifth is held out"


def test_paths_that_the_shell_expanded_become_their_pattern_again(tmp_path) -> None:
    names = ["cifar10-train-0.tar", "cifar10-train-1.tar", "cifar10-test-0.tar", "notes.txt"]
    paths = [tmp_path / name for name in names]
    for path in paths:
        path.touch()
    assert one_place([str(path) for path in paths]) == str(tmp_path)
    assert one_place([str(path) for path in paths[:3]]) == str(tmp_path / "cifar10-*.tar")
    assert one_place([str(path) for path in paths[:2]]) == str(tmp_path / "cifar10-train-*.tar")
    with pytest.raises(UsageError, match="no folder or pattern matches exactly these"):
        one_place([str(paths[0]), str(paths[2])])


@pytest.mark.parametrize("label", ["3.5", "-1", "[1, 2"])
def test_a_table_with_a_label_that_packing_refuses_is_refused(tmp_path, label: str) -> None:
    write_images(tmp_path, {"images": 3})
    rows = ["path,label", "images/0.jpg,0", "images/1.jpg,1", f'images/2.jpg,"{label}"']
    (tmp_path / "photos.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"photos\.csv: images/2\.jpg: "):
        survey(str(tmp_path / "photos.csv"), report=lambda _: None)
