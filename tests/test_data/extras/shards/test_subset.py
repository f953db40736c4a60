"""A subset is an index over the same tars: the samples chosen by a rule, with their original class ids."""

import json
import shutil
import struct
import sys
import tarfile
import tracemalloc
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from data.draws import stratified
from data.errors import ConfigError, DataError
from data.extras.shards import subset
from data.extras.shards.indexing import build_index
from data.extras.shards.packing import pack
from data.extras.shards.subset import Labels, Rule, bounds_of, count_classes
from data.extras.sources.samples import Sample
from data.index.document import load_index
from data.index.index import Index, exclude
from data.reader import ShardReader, check_sizes
from data.remote.config import CacheConfig
from data.seal import seal
from jobs.__main__ import main
from tests.support.archives import make_subset
from tests.support.campaigns import load
from tests.support.shards import digits, flip, write_set
from tests.support.tars import picture, write_tar

LABELS = [3, 0, 1, 1, 2, 0, 3, 3, 1, 0, 2, 1, 0, 0, 3, 1, 2, 3, 1, 0, 1, 3, 0, 1, 3]  # of s00, s01, …
NAMES = ("ant", "bee", "cat", "dog", "eel")  # no sample is an eel


@pytest.fixture
def parent(tmp_path) -> Index:
    """Return 25 samples in the shards train-000000.tar (7), …, train-000003.tar (4)."""
    samples = [Sample(f"s{number:02d}", picture(10 * number, 16), (label,)) for number, label in enumerate(LABELS)]
    return pack(samples, tmp_path / "shards" / "train", shard_samples=7, classes=5, names=NAMES)


def held(index: Index) -> list[int]:
    """Return the numbers of an index's samples in order, read from its tars; compare each with its label."""
    reader = ShardReader(index)
    numbers = []
    for shard, samples in enumerate(index.shard_samples):
        for sample in range(samples):
            key, image, label = reader.read(shard, sample)
            number = int(key[1:])
            assert image == picture(10 * number, 16)
            assert int(label) == LABELS[number]
            numbers.append(number)
    return numbers


def chosen(parent: Index, folder: Path, **rule) -> list[int]:
    return held(make_subset(parent, folder, Rule(**rule)))


# ------------------------------------------------------------------------------------------------ choosing


def test_samples_with_several_labels_or_none_are_searched_in_pieces(monkeypatch):
    monkeypatch.setattr(subset, "AT_ONCE", 3)
    rng = np.random.default_rng(0)
    labels_of = [rng.integers(0, 5, rng.integers(0, 4)).tolist() for _ in range(20)]
    values = np.array([label for labels in labels_of for label in labels], np.int32)
    labels = Labels(values, np.cumsum([len(labels) for labels in labels_of]))
    assert labels.any_of_sample(np.isin(values, [2, 4])).tolist() == [bool({2, 4} & set(each)) for each in labels_of]


def test_shots_are_those_that_the_few_shot_probe_of_big_vision_draws(tmp_path, parent):
    """Compares with a copy of the loop in its evaluators/fewshot_lsr.py."""
    generator = np.random.default_rng(5)
    drawn = []
    for label in range(4):
        drawn += generator.permutation([n for n, own in enumerate(LABELS) if own == label])[:3].tolist()
    index = make_subset(parent, tmp_path / "s", Rule(shots=3, seed=5))
    assert held(index) == sorted(drawn)
    # Tars, ids and names are those of the whole set; counts are those of the chosen samples.
    assert index.class_counts == (3, 3, 3, 3, 0)
    assert index.names == NAMES
    assert index.location(0) == parent.location(0)
    assert not list((tmp_path / "s").glob("*.tar"))
    assert set(chosen(parent, tmp_path / "s1", shots=1, seed=5)) < set(drawn), "nested"
    assert chosen(parent, tmp_path / "s2", shots=3, seed=6) != sorted(drawn)


def test_classes_lists_and_parts_choose_the_same_samples_as_a_loop(tmp_path, parent):
    assert chosen(parent, tmp_path / "a", keep=("bee", 3)) == [n for n, own in enumerate(LABELS) if own in (1, 3)]
    (tmp_path / "list.txt").write_text("s03\ntrain-000002.tar\ts15\ntrain/train-000000.tar\ts00\n")
    assert chosen(parent, tmp_path / "b", only=str(tmp_path / "list.txt")) == [0, 3, 15]
    (tmp_path / "list.json").write_text(json.dumps(["s03", ["train-000002.tar", "s15"], "s00"]))
    rest = chosen(parent, tmp_path / "c", but=str(tmp_path / "list.json"))
    assert rest == [n for n in range(25) if n not in (0, 3, 15)]
    assert chosen(parent, tmp_path / "d", part=":20%") == [0, 1, 2, 3, 4]
    assert chosen(parent, tmp_path / "e", part="-3:") == [22, 23, 24]
    # Rules apply in order: ants and bees, without one sample, the first four.
    (tmp_path / "one.txt").write_text("s02\n")
    both = chosen(parent, tmp_path / "f", keep=(0, 1), but=str(tmp_path / "one.txt"), part=":4")
    assert both == [n for n, own in enumerate(LABELS) if own in (0, 1) and n != 2][:4]


@pytest.mark.parametrize("seed", [None, 0])
def test_two_parts_share_no_sample_and_are_together_the_whole(tmp_path, parent, seed):
    train = chosen(parent, tmp_path / "train", part=":80%", seed=seed)
    held_out = chosen(parent, tmp_path / "held-out", part="80%:", seed=seed)
    assert len(train) == 20
    assert sorted(train + held_out) == list(range(25))
    assert (train == list(range(20))) == (seed is None)


def test_part_has_its_share_of_every_class_and_contains_smaller_parts_of_the_seed(tmp_path, parent):
    """LABELS has 7, 8, 3 and 7 samples per class; a plain random permutation would sometimes omit a class."""
    drawn = set()
    for seed in range(1, 13):
        half = chosen(parent, tmp_path / f"half{seed}", part=":52%", seed=seed)
        fifth = chosen(parent, tmp_path / f"fifth{seed}", part=":20%", seed=seed)
        assert len(half) == 13
        assert set(fifth) < set(half)
        for label in range(4):
            assert abs(sum(LABELS[n] == label for n in half) - 0.52 * LABELS.count(label)) < 2
        drawn.add(tuple(half))
        # Rules apply in order: the seed's part of two classes has its share of both.
        two = chosen(parent, tmp_path / f"two{seed}", keep=(0, 3), part="-6:", seed=seed)
        assert Counter(LABELS[n] for n in two) == {0: 3, 3: 3}
    assert len(drawn) == 12


def test_a_stratified_order_is_fair_to_every_row_and_every_class():
    """Simulates 37 classes as in Pets, sixty single-row classes among forty larger ones, and fifty single rows."""
    rng = np.random.default_rng(11)
    of_pets = rng.integers(93, 101, 37)
    unequal = np.concatenate([np.ones(60, int), rng.integers(2, 500, 40)])
    singles = []
    for counts in (of_pets, unequal):
        labels = rng.permutation(np.repeat(np.arange(len(counts)), counts))
        rows = 3 * np.arange(len(labels)) + 1
        for seed in range(1, 41):
            order = stratified(rows, labels, seed)
            assert np.array_equal(np.sort(order), rows)
            for part in (order[: round(0.1 * len(rows))], order[round(0.9 * len(rows)) :]):
                held_by_class = np.bincount(labels[(part - 1) // 3], minlength=len(counts))
                assert np.abs(held_by_class - 0.1 * counts).max() < 2
                singles.append(held_by_class[counts == 1].sum())
    of_unequal = singles[80:]
    assert abs(np.mean(of_unequal) - 6) < 4 * np.sqrt(60 * 0.1 * 0.9 / len(of_unequal))
    labels = rng.integers(0, 5, 50)
    hits = np.zeros(50)
    for seed in range(1, 2001):
        hits[stratified(np.arange(50), labels, seed)[:10]] += 1
    # Binomial, five standard deviations.
    assert np.abs(hits / 2000 - 0.2).max() < 5 * np.sqrt(0.2 * 0.8 / 2000)


def test_label_above_the_last_class_is_omitted_and_the_last_class_is_read(parent):
    alone = replace(parent.single_shard(0), classes=3)
    values, counts = subset.read_shard_labels(alone, CacheConfig())
    assert values.tolist() == [label for label in LABELS[:7] if label < 3]
    assert counts.tolist() == [int(label < 3) for label in LABELS[:7]]


def test_the_rows_of_an_origin_are_where_tarfile_finds_the_samples(tmp_path, parent):
    index = make_subset(parent, tmp_path / "s", Rule(part=":40%", seed=5))
    numbers = set(held(index))
    places = sha256()
    for shard in parent.shards:
        offsets: dict[str, list[int]] = {"jpg": [], "cls": []}
        with tarfile.open(parent.location(shard)) as tar:
            for member in tar.getmembers():
                key, _, extension = member.name.partition(".")
                if int(key[1:]) in numbers:
                    offsets[extension].append(member.offset_data)
        for column in offsets.values():
            places.update(struct.pack(f"<{len(column)}Q", *column))
    assert index.origin.rows == places.hexdigest()


def test_a_kill_while_tables_are_replaced_leaves_no_subset(tmp_path, parent, monkeypatch):
    """Its JSON is deleted first, because otherwise some tables would belong to another rule."""
    make_subset(parent, tmp_path / "s", Rule(part=":50%", seed=3))

    def killed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(subset, "write_table", killed)
    with pytest.raises(KeyboardInterrupt):
        make_subset(parent, tmp_path / "s", Rule(part=":50%", seed=4))
    with pytest.raises(DataError, match="expected one"):
        load_index(tmp_path / "s")


def test_parts_are_rounded_as_in_tensorflow_datasets():
    """Expected values from its documentation and `_pct_to_abs_closest`: int(round(boundary · n / 100))."""
    assert bounds_of(":98%", 1_281_167) == (0, 1_255_544)
    assert bounds_of("[98%:]", 1_281_167) == (1_255_544, 1_281_167)
    assert bounds_of("98%:99%", 999) == (979, 989)
    assert bounds_of("-10000:", 50_000) == (40_000, 50_000)
    for wrong in ("98%", "98", ":-2%", "a:b", ""):
        with pytest.raises(ConfigError, match="expected first:stop"):
            bounds_of(wrong, 10)


def test_samples_of_several_labels_and_of_none(tmp_path):
    """Shots use the first label, classes any label; an unlabelled sample is never a shot, but stays in a part."""
    labels = {"a": b"1 2", "b": b"", "c": b"2", "d": b"0 0", "e": b"9"}
    files = [
        (f"{key}.{kind}", picture(10, 16) if kind == "jpg" else raw)
        for key, raw in labels.items()
        for kind in ("jpg", "cls")
    ]
    (tmp_path / "in").mkdir()
    write_tar(tmp_path / "in" / "x.tar", files)
    whole = build_index(tmp_path / "in", classes=10)
    counted = {}
    for name, rule in {"shots": Rule(shots=1, seed=0), "keep": Rule(keep=(2,)), "part": Rule(part=":2")}.items():
        index = make_subset(whole, tmp_path / name, rule, workers=2)
        counted[name] = (index.samples, {label: n for label, n in enumerate(index.class_counts) if n})
    assert counted == {
        "shots": (4, {0: 1, 1: 1, 2: 2, 9: 1}),
        "keep": (2, {1: 1, 2: 2}),
        "part": (2, {1: 1, 2: 1}),
    }
    assert load_index(tmp_path / "shots").keys(0).tolist() == ["a", "c", "d", "e"]


def test_classes_are_counted_in_few_bytes_a_sample():
    """With 300 million samples, an array of numbered labels would not fit in memory next to the labels."""
    rng = np.random.default_rng(0)
    counts = rng.choice([0, 1, 3], 50_000, p=[0.01, 0.98, 0.01])
    labels = Labels(rng.integers(0, 5, counts.sum(), dtype=np.int32), counts.cumsum())
    is_chosen = rng.random(len(counts)) < 0.5
    expected: Counter[int] = Counter()
    for own, wanted in zip(np.split(labels.values, labels.ends[:-1]), is_chosen, strict=True):
        expected.update(set(own.tolist()) if wanted else ())
    tracemalloc.start()
    try:
        counted = count_classes(labels, is_chosen, 6)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert counted == [expected[label] for label in range(6)]
    assert peak < 24 * len(counts)


# ------------------------------------------------------------------------------------------- in one pass

OPENED: list[str] = []  # every file that this process opens, by the interpreter's audit hook
sys.addaudithook(lambda event, arguments: OPENED.append(str(arguments[0])) if event == "open" else None)


def hollow(index: Index, keep_labels: bool = False) -> None:
    """Overwrite the tars of a set with zeros, optionally except their labels."""
    for number in range(len(index.shards)):
        tar = Path(index.location(number))
        content = np.frombuffer(tar.read_bytes(), np.uint8)
        left = np.zeros_like(content)
        for row in index.table(number) if keep_labels else []:
            place = slice(int(row["label"]), int(row["label"]) + int(row["label_size"]))
            left[place] = content[place]
        tar.write_bytes(left.tobytes())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def opened_by(*words: str) -> Counter[str]:
    OPENED.clear()
    assert main(["subset", *words]) == 0
    return Counter(Path(path).name for path in OPENED if path.endswith((".tar", ".npy")) and "/train/" in path)


def test_parts_of_a_set_are_made_in_one_pass_over_its_tables_and_no_tar_is_opened(tmp_path, parent, capsys):
    parts = {"a": ":3", "b": ":10", "c": "-12:"}
    for name, part in parts.items():
        make_subset(parent, tmp_path / "alone" / name, Rule(part=part))
    drawn = {name: chosen(parent, tmp_path / "drawn" / name, part=part, seed=4) for name, part in parts.items()}
    kept = chosen(parent, tmp_path / "kept", keep=(0, "cat"), shots=3, seed=1)
    assert len(kept) == 6
    assert {LABELS[n] for n in kept} == {0, 2}
    hollow(parent)

    def words(names: str, *more: str) -> list[str]:
        given = [str(parent.tables)]
        for name in names:
            given += [f"--part={parts[name]}", f"--output={tmp_path}/together/{name}"]
        return [*given, *more]

    opened = opened_by(*words("abc"))
    assert capsys.readouterr().out.count(" of 25 samples") == 3
    for name in parts:
        assert files_of(tmp_path / "together" / name) == files_of(tmp_path / "alone" / name)
    # As many readings of each table as for the largest of them alone; those of the others are in these.
    assert opened == opened_by(*words("b")) | opened_by(*words("c"))
    assert not [name for name in opened if name.endswith(".tar")]
    # Rules about labels read them from the tables.
    assert not [name for name in opened_by(*words("abc", "--seed=4")) if name.endswith(".tar")]
    for name in parts:
        assert files_of(tmp_path / "together" / name) == files_of(tmp_path / "drawn" / name)
        assert len(drawn[name]) == load_index(tmp_path / "together" / name).samples
    make_subset(parent, tmp_path / "hollow" / "kept", Rule(keep=(0, "cat"), shots=3, seed=1))
    assert load_index(tmp_path / "hollow" / "kept").class_counts == (3, 0, 3, 0, 0)
    # Write an --output for each part.
    assert main(["subset", *words("ab"), "--part=:4"]) == 64
    assert main(["subset", *words("a"), *words("a")[1:]]) == 65


def test_only_the_bytes_of_labels_unknown_from_the_tables_are_read(tmp_path):
    """With several labels per sample, as in JFT, a part reads only the labels in its own tars, and no images."""
    rng = np.random.default_rng(3)
    labels_of = [sorted(rng.choice(30, rng.integers(1, 4), replace=False).tolist()) for _ in range(40)]
    samples = [Sample(f"s{n:02d}", picture(n, 16), tuple(own)) for n, own in enumerate(labels_of)]
    whole = pack(samples, tmp_path / "train", shard_samples=10, classes=30)
    hollow(whole, keep_labels=True)
    opened = opened_by(str(whole.tables), "--part=10:20", f"--output={tmp_path}/part")
    assert [name for name in opened if name.endswith(".tar")] == ["train-000001.tar"]
    expected: Counter[int] = Counter()
    for own in labels_of[10:20]:
        expected.update(own)
    assert load_index(tmp_path / "part").class_counts == tuple(expected[label] for label in range(30))
    two = make_subset(whole, tmp_path / "two", Rule(keep=(5, 7)))
    assert [int(key[1:]) for n in range(len(two.shards)) for key in two.keys(n)] == [
        n for n, own in enumerate(labels_of) if {5, 7} & set(own)
    ]


def test_subsets_of_a_stage_are_created_in_one_pass(tmp_path, parent, monkeypatch):
    recipe = tmp_path / "r.yaml"
    sets = {f"p{n}": {"source": "subset", "path": str(parent.tables), "part": f":{n}"} for n in (3, 9, 20)}
    recipe.write_text(json.dumps({"run": str(tmp_path / "run"), "parts": {"kind": "pack", "sets": sets}}))
    hollow(parent)
    passes = []
    write_subsets = subset.write_subsets
    monkeypatch.setattr(subset, "write_subsets", lambda *given: passes.append(given) or write_subsets(*given))
    assert main(["run", str(recipe)]) == 0
    assert len(passes) == 1
    campaign = load(recipe, [])
    folder = campaign.directory(campaign.stage("parts"))
    assert {name: load_index(folder / name).samples for name in sets} == {"p3": 3, "p9": 9, "p20": 20}


# ------------------------------------------------------------------------------------------ what it stands for


def test_digest_depends_on_the_samples_and_not_on_the_rule_that_chose_them(tmp_path, parent):
    """Two seeds may choose equally many samples of each shard: without the rows their digests would be equal."""
    digests = Counter()
    for seed in range(4):
        digests[make_subset(parent, tmp_path / f"s{seed}", Rule(shots=1, seed=seed)).digest] += 1
    assert len(digests) == 4
    assert parent.digest not in digests
    by_rule = make_subset(parent, tmp_path / "rule", Rule(keep=(0,)))
    (tmp_path / "list.txt").write_text("".join(f"s{n:02d}\n" for n, own in enumerate(LABELS) if own == 0))
    by_list = make_subset(parent, tmp_path / "list", Rule(only=str(tmp_path / "list.txt")))
    assert by_rule.digest == by_list.digest
    # A subset of a subset uses the same tars; its recorded rules can be typed again.
    twice = make_subset(by_rule, tmp_path / "twice", Rule(shots=2, seed=0))
    assert held(twice) == held(make_subset(parent, tmp_path / "once", Rule(keep=(0,), shots=2, seed=0)))
    assert twice.origin.digest == by_rule.digest
    assert twice.origin.rule == {"shots": 2, "seed": 0}
    assert f"subset {tmp_path}/rule/rule.index.json --shots=2 --seed=0 --output" in twice.command


def test_altered_rows_and_an_altered_rule_are_seen(tmp_path, parent):
    folder = tmp_path / "s"
    make_subset(parent, folder, Rule(shots=1, seed=0))
    path = folder / "s.index.json"
    text = path.read_text()
    for before, after in (('"seed": 0', '"seed": 1'), ('"samples": 4,', '"samples": 5,')):
        assert before in text
        path.write_text(text.replace(before, after))
        with pytest.raises(DataError, match="run `python -m jobs subset` again"):
            load_index(folder)
    path.write_text(text)
    for table in folder.glob("*.npy"):
        shutil.copy(parent.tables / table.name, table)
    with pytest.raises(DataError, match=r"altered or replaced(?s:.*)jobs subset"):
        held(load_index(folder))


def test_a_shard_that_two_subsets_have_is_dropped_from_both_as_the_error_says(tmp_path, parent):
    """Both subsets use the same tars: a tar's name cannot distinguish them, and both lose a lost shard."""
    sets = [make_subset(parent, tmp_path / name, Rule(part=part)) for name, part in (("a", ":60%"), ("b", "40%:"))]
    lost = Path(parent.location(1))
    lost.unlink()
    with pytest.raises(DataError, match=r"1 of 4 shards cannot(?s:.*)'data\.drop=\[train-000001\.tar\]'"):
        check_sizes(sets, option="data.drop")
    left = exclude(sets, ["train-000001.tar"])
    check_sizes(left)
    for before, after in zip(sets, left, strict=True):
        kept = [shard.samples * (shard.name != lost.name) for shard in before.shards]
        assert list(after.shard_samples) == kept != list(before.shard_samples)


# ------------------------------------------------------------------------------------------------ location


def test_both_folders_may_move_together_and_missing_files_are_named(tmp_path, parent):
    make_subset(parent, tmp_path / "shards" / "few", Rule(shots=1, seed=0))
    shutil.move(tmp_path / "shards", tmp_path / "elsewhere")
    moved = load_index(tmp_path / "elsewhere" / "few")
    check_sizes([moved])
    assert len(held(moved)) == 4
    shutil.move(tmp_path / "elsewhere" / "few", tmp_path / "few")
    with pytest.raises(DataError, match=r"train-000001\.tar: No such file(?s:.*)move a subset and its parent together"):
        check_sizes([load_index(tmp_path / "few")])
    (tmp_path / "elsewhere" / "train" / "train-000001.tar").unlink()
    with pytest.raises(DataError, match=r"1 of 4 shards cannot be used: .*train-000001\.tar: No such file"):
        make_subset(load_index(tmp_path / "elsewhere" / "train"), tmp_path / "new", Rule(shots=1, seed=0))


def test_subset_of_remote_tars_names_their_url(tmp_path, parent, monkeypatch):
    at = "https://host.example/train"
    remote = build_index(parent.directory, output=tmp_path / "remote", name="train", at=at, names=NAMES, classes=5)

    def opened(self, place, shard):
        assert place == f"{at}/{shard.name}"
        return open(Path(parent.directory, shard.name), "rb")

    monkeypatch.setattr("data.remote.cache.Cache.opened", opened)
    index = make_subset(remote, tmp_path / "few", Rule(shots=1, seed=0))
    assert index.remote
    assert index.location(0) == f"{at}/{index.shards[0].name}"
    assert held(index) == chosen(parent, tmp_path / "local", shots=1, seed=0)


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({}, "the subset has no rule"),
        ({"shots": 3}, "shots needs a seed"),
        ({"seed": 3, "keep": [1]}, "neither shots nor part"),
        ({"shots": 0, "seed": 0}, "expected 1 or more"),
    ],
)
def test_empty_rule_is_refused(rule, reason):
    with pytest.raises(ConfigError, match=reason):
        Rule(**rule)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ("s03\ns99\n", r"1 of the 2 listed samples are not in .*: s99"),
        ("train-000001.tar\ts03\n", "train-000001.tar s03"),
        ("train-000009.tar\ts03\n", "0 shards .* match train-000009.tar"),
        ("", "the file is empty"),
    ],
)
def test_list_of_missing_samples_is_refused(tmp_path, parent, lines, reason):
    (tmp_path / "list.txt").write_text(lines)
    for side in ("only", "but"):
        with pytest.raises(DataError, match=reason):
            make_subset(parent, tmp_path / "s", Rule(**{side: str(tmp_path / "list.txt")}))
    with pytest.raises(DataError, match="'wolf', but this source has no such class"):
        make_subset(parent, tmp_path / "s", Rule(keep=("wolf",)))
    with pytest.raises(DataError, match="selects none of the 25 samples"):
        make_subset(parent, tmp_path / "s", Rule(keep=("eel",)))


def test_leaks_document_names_only_the_samples_of_this_set(tmp_path, parent):
    other = pack([Sample("s04", picture(40, 16), (0,))], tmp_path / "other", classes=5)
    document = {
        "schema": 2,
        "train": [{"path": "a", "digest": other.digest}, {"path": "b", "digest": parent.digest}],
        "test": [{"path": "c", "digest": "0" * 64}],
        "pairs": [
            pair("train-000000.tar", "s04", 0),
            pair("train-000001.tar", "s07", 1),
            pair("train-000000.tar", "s01", 1),
        ],
    }
    path = tmp_path / "leaks.json"
    path.write_text(seal(document))
    assert chosen(parent, tmp_path / "s", but=str(path)) == [n for n in range(25) if n not in (1, 7)]
    # A subset ignores pairs outside it. A subset of a subset cannot be recognized as one of the same data set.
    few = make_subset(parent, tmp_path / "few", Rule(part=":7"))
    assert chosen(few, tmp_path / "t", but=str(path)) == [0, 2, 3, 4, 5, 6]
    fewer = make_subset(few, tmp_path / "fewer", Rule(part=":3"))
    with pytest.raises(DataError, match=f"the digest of this one is {fewer.digest[:12]}"):
        make_subset(fewer, tmp_path / "u", Rule(but=str(path)))
    # Pairs with samples unknown to the set are rejected, and so are documents altered after sealing.
    path.write_text(seal(document | {"pairs": [pair("train-000000.tar", "s24", 1)]}))
    with pytest.raises(DataError, match=r"1 of the 1 listed samples are not in .*s24"):
        make_subset(parent, tmp_path / "v", Rule(but=str(path)))
    for text, reason in (
        (json.dumps(document), "it does not end with"),
        (seal(document | {"schema": 9}), "schema 9"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=reason):
            make_subset(parent, tmp_path / "v", Rule(but=str(path)))


def pair(shard: str, key: str, train_set: int) -> dict:
    return {"train": [shard, key], "test": ["t.tar", "t"], "kind": "exact", "distance": 0.0, "train_set": train_set}


def test_no_set_loses_its_tables_to_a_subset(tmp_path, parent):
    for folder in (parent.tables, tmp_path / "shards" / "train"):
        with pytest.raises(DataError, match="the subset would overwrite the tables"):
            make_subset(parent, folder, Rule(shots=1, seed=0), name="few")
    # The same folder is reused, and tables that only the old subset had are deleted.
    make_subset(parent, tmp_path / "s", Rule(part=":"))
    make_subset(parent, tmp_path / "s", Rule(part=":1"))
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["s.index.json", "train-000000.npy"]


@pytest.mark.parametrize("torn", ["cut", "altered"])
def test_command_in_the_error_recreates_a_damaged_subset(tmp_path, parent, torn):
    path = tmp_path / "s" / "s.index.json"
    make_subset(parent, path.parent, Rule(part=":"))
    text = path.read_text()
    path.write_text(text[:200] if torn == "cut" else text.replace('"samples": 25', '"samples": 24'))
    with pytest.raises(DataError, match=r"`python -m jobs subset`"):
        load_index(path)
    # A subset with another name would overwrite the tables here. It is refused while the index is unreadable.
    with pytest.raises(DataError, match=r"s\.index\.json"):
        make_subset(parent, path.parent, Rule(part=":1"), name="t")
    assert held(make_subset(parent, path.parent, Rule(part=":1"))) == [0]
    assert sorted(file.name for file in path.parent.iterdir()) == ["s.index.json", "train-000000.npy"]


# -------------------------------------------------------------------------------------- recipe


def test_pack_stage_selects_samples_from_another_stages_set(tmp_path, capsys):
    for number, label in enumerate(LABELS):
        path = tmp_path / "photos" / NAMES[label] / f"s{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(10 * number, 16))
    but = tmp_path / "but.txt"
    but.write_text("ant/s01\n")

    def recipe(seed: int) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(f"""
run: {tmp_path}/run
shards: {{kind: pack, shard_samples: 7, sets: {{train: {{path: {tmp_path}/photos}}}}}}
few:
  kind: pack
  sets:
    train-2shot: {{source: subset, path: "@shards/train", shots: 2, seed: {seed}}}
    rest: {{source: subset, path: "@shards/train", but: {but}}}
""")
        return path

    assert main(["run", str(recipe(0))]) == 0
    capsys.readouterr()
    campaign = load(recipe(0), [])
    few = campaign.stage("few")
    index = load_index(campaign.path_of("@few/train-2shot"))
    assert index.class_counts == (2, 2, 2, 2)
    assert index.names == NAMES[:4]
    assert load_index(campaign.path_of("@few/rest")).samples == 24
    assert main(["run", str(recipe(0))]) == 0
    assert "few: skipped" in (said := capsys.readouterr().out) or "finished" in said
    # The key depends on the seed and on the content of the list.
    assert load(recipe(1), []).stage("few").key != few.key
    but.write_text("ant/s05\n")
    assert load(recipe(0), []).stage("few").key not in (few.key, load(recipe(1), []).stage("few").key)
    # A missing tar of the set is reported before the subset is read.
    but.write_text("ant/s01\n")
    Path(index.location(0)).unlink()
    assert main(["run", str(recipe(0))]) == 65
    assert "train-000000.tar: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ("{source: subset, path: p}", "the subset has no rule"),
        ("{source: folder, path: p, shots: 3}", "shots select samples of a subset, but source is folder"),
        (
            "{source: subset, path: p, shots: 3, seed: 0, names: n}",
            "has the class ids and names of its parent data set",
        ),
    ],
)
def test_recipe_with_an_impossible_subset_is_refused(tmp_path, section, reason):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"run: {tmp_path}/run\nshards: {{kind: pack, sets: {{train: {section}}}}}\n")
    with pytest.raises(ConfigError, match=reason):
        load(path, [])


@pytest.mark.parametrize("position", [0, 1])
def test_corrupt_label_is_detected_when_only_labels_are_read(tmp_path, position, monkeypatch):
    """A shard's sha256 is compared once per node; a subset compares the indexed digests of labels."""
    monkeypatch.setenv("PATCHLINE_CACHE", str(tmp_path / "node"))
    made = write_set(islice(digits(True, image_size=16), 50), tmp_path / "set", shard_samples=20)
    rule = Rule(shots=2, seed=3)
    few = make_subset(made, tmp_path / "few", rule)
    row = made.table(position)[7]
    flip(Path(made.location(position)), int(row["label"]))
    assert make_subset(made, tmp_path / "again", rule).digest == few.digest
    with pytest.raises(DataError, match=f"sample '{row['key'].decode()}' differs from the index(?s:.*)restore it"):
        list(ShardReader(made, verify=False).labels(position))
    # The shard is no longer marked as verified: now it is refused as a whole.
    with pytest.raises(DataError, match="its sha256 differs from the index"):
        list(ShardReader(made).labels(position))
