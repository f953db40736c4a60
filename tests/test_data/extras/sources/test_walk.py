"""The folder walk of all image sources: links, loops, hidden files and system folders."""

import os
from collections import Counter
from pathlib import Path

import pytest

from data.extras.sources.walk import (
    HIDDEN,
    LOOP,
    NO_FILE,
    READ_BEFORE,
    SYSTEM_FOLDERS,
    class_folders_in,
    files_below,
    matching,
)

pytestmark = pytest.mark.quick


def tree(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"image")


def below(root: Path) -> tuple[list[str], Counter[str]]:
    skipped: Counter[str] = Counter()
    return [str(path.relative_to(root)) for path in files_below(root, skipped)], skipped


def test_links_to_files_and_folders_are_followed_as_by_a_walk_that_follows_links(tmp_path: Path) -> None:
    tree(tmp_path, "store/more/7.jpg", "store/8.jpg", "set/cat/1.jpg", "set/cat/deep/2.jpg")
    (tmp_path / "set/cat/more").symlink_to("../../store/more")
    (tmp_path / "set/cat/8.jpg").symlink_to("../../store/8.jpg")
    (tmp_path / "set/dog").symlink_to(tmp_path / "store")
    files, skipped = below(tmp_path / "set")
    expected = [
        os.path.join(folder, name) for folder, _, names in os.walk(tmp_path / "set", followlinks=True) for name in names
    ]
    assert sorted(files) == sorted(os.path.relpath(path, tmp_path / "set") for path in expected)
    assert len(files) == 6
    assert not skipped


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_a_link_to_a_folder_above_it_is_counted_and_not_followed(tmp_path: Path, target: str) -> None:
    root = tmp_path / "set"
    tree(root, "cat/deep/1.jpg", "dog/2.jpg")
    (root / "cat/deep/loop").symlink_to(target)
    files, skipped = below(root)
    assert files == ["cat/deep/1.jpg", "dog/2.jpg"]
    assert skipped == {LOOP: 1}


def test_walk_through_two_mutual_links_ends(tmp_path: Path) -> None:
    root = tmp_path / "set"
    tree(root, "a/1.jpg", "b/2.jpg")
    (root / "a/to_b").symlink_to("../b")
    (root / "b/to_a").symlink_to("../a")
    files, skipped = below(root)
    assert files == ["a/1.jpg", "a/to_b/2.jpg", "b/2.jpg", "b/to_a/1.jpg"]
    assert skipped == {LOOP: 2}


@pytest.mark.parametrize("count", [8, 45])
def test_folders_that_all_link_to_each_other_are_read_a_few_times_each(tmp_path: Path, count: int) -> None:
    """Even 8 such folders have 109,600 paths; with more than 40, the longest have too many links for the system."""
    root = tmp_path / "set"
    names = [f"{number:02d}" for number in range(count)]
    tree(root, *(f"{name}/{name}.jpg" for name in names))
    for name in names:
        for other in names:
            if other != name:
                (root / name / f"to-{other}").symlink_to(f"../{other}")
    files, skipped = below(root)
    for name in names:
        direct = {f"{name}/to-{other}/{other}.jpg" for other in names if other != name}
        assert {*direct, f"{name}/{name}.jpg"} <= set(files)
    # Once by its own name, once through each link in a real folder, and at most once through links in linked folders.
    assert len(files) <= count * (1 + (count - 1) + 1)
    assert skipped[READ_BEFORE] > 0
    # The walk of a single class, as for packing.
    files, _ = below(root / names[0])
    assert {path.rpartition("/")[2] for path in files} == {f"{name}.jpg" for name in names}
    assert len(files) < 2 * count


def test_a_link_to_itself_is_a_broken_link(tmp_path: Path) -> None:
    tree(tmp_path, "cat/1.jpg")
    (tmp_path / "cat/2.jpg").symlink_to("2.jpg")
    files, skipped = below(tmp_path)
    assert files == ["cat/1.jpg"]
    assert skipped == {NO_FILE: 1}


def test_a_folder_linked_twice_outside_of_linked_folders_is_read_twice(tmp_path: Path) -> None:
    tree(tmp_path, "store/deep/1.jpg", "set/cat/2.jpg", "set/dog/3.jpg")
    for name in ("cat/more", "cat/again", "dog/more"):
        (tmp_path / "set" / name).symlink_to("../../store")
    files, skipped = below(tmp_path / "set")
    assert files == ["cat/2.jpg", "cat/again/deep/1.jpg", "cat/more/deep/1.jpg", "dog/3.jpg", "dog/more/deep/1.jpg"]
    assert not skipped


@pytest.mark.parametrize("name", sorted(SYSTEM_FOLDERS))
def test_system_folders_are_neither_images_nor_classes(tmp_path: Path, name: str) -> None:
    tree(tmp_path, "cat/1.jpg", f"cat/{name}/1.jpg/thumb.jpg", f"cat/{name}/2.jpg", f"{name}/3.jpg", "dog/4.jpg")
    files, skipped = below(tmp_path)
    assert files == ["cat/1.jpg", "dog/4.jpg"]
    assert skipped == {f"file in a system folder ({name})": 3}
    of_classes: Counter[str] = Counter()
    assert class_folders_in(tmp_path, of_classes) == ["cat", "dog"]
    assert of_classes == {f"file in a system folder ({name})": 1}


def test_hidden_files_broken_links_and_devices_are_counted(tmp_path: Path) -> None:
    tree(tmp_path, "1.jpg", "._1.jpg", ".ipynb_checkpoints/1-checkpoint.jpg", ".ipynb_checkpoints/deep/2.jpg")
    (tmp_path / "lost.jpg").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.jpg")
    files, skipped = below(tmp_path)
    assert files == ["1.jpg"]
    assert skipped == {HIDDEN: 3, NO_FILE: 2}


@pytest.mark.parametrize("name", ["@eaDir", ".hidden"])
def test_a_skipped_folder_without_files_counts_for_nothing(tmp_path: Path, name: str) -> None:
    tree(tmp_path, "cat/1.jpg")
    (tmp_path / name / "deep").mkdir(parents=True)
    files, skipped = below(tmp_path)
    assert files == ["cat/1.jpg"]
    assert not skipped


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{00..02}.tar", ["a-00.tar", "a-01.tar", "a-02.tar"]),
        ("a-*.tar", ["a-00.tar", "a-01.tar"]),
        ("{a,b}-*.tar", ["a-00.tar", "a-01.tar", "b-11.tar", "b-[1]?.tar"]),
        ("b-[1]?.tar", ["b-[1]?.tar"]),
        ("b-[1]*.tar", ["b-[1]?.tar"]),
        ("c-*.tar", ["c-*.tar"]),
    ],
)
def test_patterns_are_braces_and_stars_only(tmp_path: Path, pattern: str, names: list[str]) -> None:
    tree(tmp_path, "a-00.tar", "a-01.tar", "b-[1]?.tar", "b-11.tar")
    assert [path.name for path in matching(tmp_path / pattern)] == names
