"""Data sets named by a URL in a recipe are indexed by an added stage, once for a campaign."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.errors import ConfigError
from data.extras.shards import indexing
from data.extras.shards.packing import pack
from data.extras.sources.samples import digits
from data.index.index import Index
from data.seal import unseal
from jobs.__main__ import main
from jobs.extras.url_sets import with_indexed_urls
from jobs.resolved_recipe import StageSection
from tests.support.campaigns import KINDS
from tests.support.hub import TOKEN, Hub, hub
from tests.support.recipes import without_check

URL = "hf://datasets/me/photos/train/*.tar"
TEST_URL = "s3://bucket/test"
RECIPE = without_check("""
run: {run}
cluster: {{workers: 2, backend: processes, backoff_s: 0}}
pretrain:
  data: {{train: "{train}", evaluate: "{test}"}}
  model: {{name: mu/8, width: 16, depth: 2, mlp: 32, heads: 2, image_size: 16, classes: 10}}
  optim: {{lr: 1.0e-3, schedule: {{warmup_steps: 5}}}}
  loss: softmax
  steps: 20
  batch_size: 16
  micro_batch: 4
  precision: fp32
""")


def expand(sections: dict[str, object]) -> dict[str, object]:
    """Return the values of the sections after the expansion."""
    expanded = with_indexed_urls({name: StageSection(values, name) for name, values in sections.items()}, KINDS)
    return {name: section.values for name, section in expanded.items()}


@pytest.mark.quick
def test_urls_of_a_section_become_the_sets_of_an_added_stage() -> None:
    section = {"data": {"train": URL, "evaluate": TEST_URL}, "probe": {"train": URL, "test": "shards/test"}}
    assert expand({"pretrain": section}) == {
        "pretrain": {
            "data": {"train": "@pretrain-index/train", "evaluate": "@pretrain-index/evaluate"},
            "probe": {"train": "@pretrain-index/train", "test": "shards/test"},
        },
        "pretrain-index": {
            "kind": "pack",
            "sets": {
                "train": {"source": "shards", "path": URL},
                "evaluate": {"source": "shards", "path": TEST_URL},
            },
            "workers": 8,
        },
    }


@pytest.mark.quick
def test_url_of_two_sections_is_indexed_once_unless_one_ignores_labels() -> None:
    expanded = expand(
        {
            "first": {"kind": "pretrain", "data": {"train": URL}},
            "second": {"kind": "pretrain", "data": {"mixture": {"web": {"train": URL}, "own": {"train": TEST_URL}}}},
            "masked": {"kind": "pretrain", "objective": "masked", "data": {"train": URL}},
        }
    )
    assert expanded["second"]["data"]["mixture"] == {
        "web": {"train": "@first-index/train"},
        "own": {"train": "@second-index/mixture-own-train"},
    }
    assert expanded["masked-index"]["sets"] == {"train": {"source": "shards", "path": URL, "unlabelled": True}}


@pytest.mark.quick
def test_recipe_without_urls_and_pack_stages_are_unchanged() -> None:
    sections = {
        "shards": {"kind": "pack", "sets": {"train": {"source": "shards", "path": URL}}},
        "pretrain": {"data": {"train": "@shards/train"}, "init": "s3://bucket/run/stage"},
    }
    assert expand(sections) == sections


@pytest.mark.quick
def test_name_of_the_added_stage_that_is_in_use_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.train is a URL, which a stage named pretrain-index would index"):
        expand({"pretrain": {"data": {"train": URL}}, "pretrain-index": {"kind": "pack", "sets": {}}})


# ------------------------------------------------------------------------ runs


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Index]:
    folder = tmp_path_factory.mktemp("shards")
    return {
        "train": pack(digits(True, image_size=16), folder / "train", name="train", shard_samples=200),
        "test": pack(digits(False, image_size=16), folder / "test", name="test", shard_samples=200),
    }


@pytest.fixture
def server(sets: dict[str, Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "cache"))
    # Tars stay in the cache if the disk has room, which this test machine may not have.
    monkeypatch.setattr(indexing.shutil, "disk_usage", lambda path: SimpleNamespace(total=100 << 30, free=50 << 30))
    files = {}
    for name, index in sets.items():
        for number, shard in enumerate(index.shards):
            files[f"{name}/{shard.name}"] = Path(index.location(number))
    with hub(files) as state:
        yield state


def run(folder: Path, train: object, test: object) -> Path:
    """Run the recipe, and return the folder of its run."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(run=folder / "run", train=train, test=test))
    assert main(["run", str(recipe)]) == 0
    return folder / "run"


def last_metrics(run: Path) -> dict[str, object]:
    """Return the last line of metrics of the pretrain stage without times."""
    (path,) = run.glob("pretrain-????????/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {name: value for name, value in lines[-1].items() if name in ("step", "loss", "ledger", "accuracy")}


def test_run_on_urls_of_the_hub_has_the_ledger_of_local_files_and_hides_the_token(
    server, sets, tmp_path, monkeypatch, capfd
) -> None:
    server.is_gated = True
    server.throttled = 0.3
    server.page = 4
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "remote").mkdir()
    (tmp_path / "local").mkdir()
    remote = run(tmp_path / "remote", URL, "hf://datasets/me/photos/test")
    output = capfd.readouterr()
    local = run(tmp_path / "local", sets["train"].tables, sets["test"].tables)
    assert last_metrics(remote) == last_metrics(local)

    # One download of each file, one listing of each folder and its parent, one commit.
    assert server.bytes == sum(shard.bytes for index in sets.values() for shard in index.shards)
    assert server.too_early == 0
    (done,) = remote.glob("pretrain-index-????????/done.json")
    record = json.loads(done.read_text())
    assert record["sets"]["train"]["source"] == f"hf://datasets/me/photos@{server.main}/train/*.tar"
    assert unseal((done.parent / "hub.json").read_bytes()) == {"datasets/me/photos@main": server.main}

    written = [path.read_bytes() for path in (tmp_path / "remote").rglob("*") if path.is_file()]
    for text in (*written, output.out.encode(), output.err.encode()):
        assert TOKEN.encode() not in text
        assert b"signature=" not in text


@pytest.mark.slow
def test_run_keeps_its_commit_after_the_branch_has_moved(server, tmp_path, capsys) -> None:
    run(tmp_path, URL, "hf://datasets/me/photos/test")
    server.commits["b" * 40] = {"train/other.tar": next(iter(server.commits[server.main].values()))}
    server.main = "b" * 40
    server.requests.clear()
    recipe = tmp_path / "recipe.yaml"
    assert main(["run", str(recipe), "pretrain.steps=25", "pretrain.optim.lr=2.0e-3"]) == 0
    assert server.requests["tree"] == 0
    assert f"@{'a' * 40}/train" in (tmp_path / "run").joinpath("log.txt").read_text()


def test_gated_set_ends_the_run_before_training(server, tmp_path, capsys) -> None:
    server.is_gated = True
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(run=tmp_path / "run", train=URL, test="hf://datasets/me/photos/test"))
    assert main(["run", str(recipe)]) == 69
    assert "the data set is gated: accept its conditions on its page" in capsys.readouterr().err
    assert main(["plan", str(recipe)]) == 0
