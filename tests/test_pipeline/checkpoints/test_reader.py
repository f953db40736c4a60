"""Reading any range of a checkpoint, at any topology, from as few files as possible."""

import os
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from data.errors import CheckpointError
from pipeline.checkpoints import manifest as manifests
from pipeline.checkpoints.manifest import (
    ChunkedRecord,
    committed,
    digest,
    read_manifest,
)
from pipeline.checkpoints.reader import MAX_OPEN, Reader
from tests.support import savers

pytestmark = pytest.mark.quick


@pytest.fixture
def group(tmp_path) -> savers.WorkerGroup:
    """Return a run with committed steps 10 and 20."""
    return savers.with_steps(tmp_path / "run")


def test_missing_fragment_is_an_error_not_zeros(group) -> None:
    newest = committed(group.folder)[0]
    (newest / "rank-00001.safetensors").unlink()
    name = "rank-00000.safetensors"
    reader = Reader(newest, {name: read_manifest(newest).files[name]})
    assert torch.equal(reader("w", "master", 3, 40), savers.known("w", "master", 3, 40) + 20)
    with pytest.raises(CheckpointError, match="48 of 96 elements of w"):
        reader("w", "master", 0, 96)


CUTS = [0, 100, 20_000, 20_001, 31_000, 48_000]  # boundaries of the parameters in a flat state


def ranges_of(rank: int, world: int, cuts: list[int], *, is_parted: bool) -> Iterator[tuple[str, int, int, int]]:
    """Return (parameter, its first element, first, stop) for each range of a flat state that a worker owns.

    ZeRO 1 and 2 split the whole state evenly, ZeRO 3 every parameter.
    """
    for number, (begin, end) in enumerate(pairwise(cuts)):
        begin_cutting, length = (begin, end - begin) if is_parted else (0, cuts[-1])
        part = -(-length // world)
        start = begin_cutting + rank * part
        first, stop = max(begin, start), min(end, start + part)
        if first < stop:
            yield f"p{number}", begin, first, stop


def save_cut(
    folder: Path, state: torch.Tensor, cuts: list[int], world: int, *, is_parted: bool
) -> dict[str, ChunkedRecord]:
    """Write the files of a group of workers that save the flat state; return their records."""
    records = {}
    for rank in range(world):
        views = {}
        for parameter, begin, first, stop in ranges_of(rank, world, cuts, is_parted=is_parted):
            views[f"{parameter}|master|{first - begin}"] = state[first:stop].clone()
        path = folder / f"rank-{rank:05d}.safetensors"
        save_file(views, path)
        records[path.name] = digest(memoryview(path.read_bytes()))
    return records


@pytest.mark.parametrize("is_parted", [False, True], ids=["save_flat", "save_parted"])
@pytest.mark.parametrize("world", [8, 64])
def test_worker_opens_and_verifies_only_the_files_that_it_needs(is_parted, world, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(manifests, "MIN_CHUNK_BYTES", 512)
    state = torch.arange(48_000.0)
    files = save_cut(tmp_path, state, CUTS, world, is_parted=is_parted)
    sizes = [file["bytes"] for file in files.values()]
    head_bytes = max(sizes) - len(state) * 4 // world
    for next_world in (world // 2, world, world * 2):
        opened = 0
        for rank in range(next_world):
            reader = Reader(tmp_path, files, (rank + 0.5) / next_world)
            ranges = 0
            read_bytes = 0
            for parameter, begin, first, stop in ranges_of(rank, next_world, CUTS, is_parted=is_parted):
                ranges += 1
                read_bytes += 4 * (stop - first)
                assert torch.equal(reader(parameter, "master", first - begin, stop - first), state[first:stop])
            files_here = len(reader.opened)
            assert files_here <= (1 if next_world == world else 4)
            opened += files_here
            # Besides the ranges: the headers, and the rest of the chunks at the ends of headers and ranges.
            ends = 2 * (ranges + files_here) * 512 + files_here * (head_bytes + 512)
            assert read_bytes <= reader.hashed_bytes <= read_bytes + ends
            with pytest.raises(CheckpointError, match="0 of 1 elements of p9"):
                reader("p9", "master", 0, 1)
            assert len(reader.opened) == world, "it is nowhere"
        assert opened <= 2 * max(world, next_world) + next_world, "not the product of both worlds"


@pytest.mark.parametrize("share", [None, 0.5], ids=["all", "what-is-asked-for"])
def test_checkpoint_with_more_files_than_the_open_file_limit_is_read(share, tmp_path) -> None:
    world = MAX_OPEN + 100
    state = torch.arange(4.0 * world)
    records = save_cut(tmp_path, state, [0, len(state)], world, is_parted=False)
    used = max(map(int, os.listdir("/proc/self/fd"))) + 1  # the limit applies to the highest number
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + MAX_OPEN + 20, before[1]))
    try:
        reader = Reader(tmp_path, records, share)
        assert torch.equal(reader("p0", "master", 0, len(state)), state)
        assert torch.equal(reader("p0", "master", 0, len(state)), state), "every file again"
        assert torch.equal(reader.weights({"p0": state.shape})["p0"], state)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(reader.opened) == world
    holding = [file for file in reader.opened.values() if file.handle is not None or file.cached_chunk]
    assert len(holding) <= MAX_OPEN, "neither descriptors nor chunks of all files"
