"""The order is a pure function of the step, with every sample once per epoch, for any topology."""

import struct
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data.order
from data.draws import key_of, permute
from data.order import Ledger, Mixture, Order

pytestmark = pytest.mark.quick

shards = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)
batches = st.integers(1, 48)
lane_count = st.integers(1, 16)  # also more than slots, samples or shards
blocks = st.integers(1, 50)


def ids(order: Order, steps: int) -> np.ndarray:
    return np.concatenate([np.stack(order.batch(step), 1) for step in range(steps)])


@settings(max_examples=150, deadline=None)
@given(shards, lane_count, batches, blocks, st.integers(0, 5))
def test_every_sample_is_used_exactly_once_an_epoch(sizes, lanes, batch, block, seed):
    order = Order(sizes, seed=seed, batch_size=batch, lanes=lanes, shuffle_block=block)
    seen = ids(order, -(-3 * sum(sizes) // batch))[: 3 * sum(sizes)]
    every = {(shard, sample) for shard, n in enumerate(sizes) for sample in range(n)}
    for epoch in range(3):
        part = seen[epoch * sum(sizes) : (epoch + 1) * sum(sizes)]
        assert (part[:, 0] == epoch).all()
        assert len(part) == len(every)
        assert set(map(tuple, part[:, 1:].tolist())) == every


@settings(max_examples=100, deadline=None)
@given(shards, lane_count, batches, blocks)
def test_a_dropped_tail_leaves_out_less_than_a_batch(sizes, lanes, batch, block):
    if sum(sizes) < batch:
        with pytest.raises(ValueError, match="do not fill a batch of"):
            Order(sizes, seed=0, batch_size=batch, lanes=lanes, tail="drop")
        return
    order = Order(sizes, seed=0, batch_size=batch, lanes=lanes, shuffle_block=block, tail="drop")
    steps_per_epoch = sum(sizes) // batch
    for epoch in range(2):
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        seen = np.concatenate([np.stack(order.batch(step), 1) for step in steps])
        assert (seen[:, 0] == epoch).all()
        assert len(np.unique(seen, axis=0)) == len(seen)
        assert sum(sizes) - len(seen) < batch


@settings(max_examples=60, deadline=None)
@given(shards, lane_count, batches, blocks, st.integers(0, 200))
def test_any_step_is_computed_without_replay(sizes, lanes, batch, block, step):
    fresh = Order(sizes, seed=3, batch_size=batch, lanes=lanes, shuffle_block=block)
    used = Order(sizes, seed=3, batch_size=batch, lanes=lanes, shuffle_block=block)
    for earlier in range(max(0, step - 5), step):
        used.batch(earlier)
    assert np.array_equal(fresh.batch(step), used.batch(step))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**40))
def test_a_keyed_permutation_is_a_permutation(size, key):
    permuted = permute(np.arange(size), np.full(size, size), np.repeat(key_of(key), size))
    assert sorted(permuted) == list(range(size))


def words(numbers) -> str:
    return " ".join(str(number) for number in numbers)


def test_example_in_the_module_docstring_is_correct():
    order = Order([3, 4, 2], seed=0, batch_size=4, lanes=2, shuffle_block=3)
    story = data.order.__doc__.partition("shards of 3, 4 and 2 samples")[2].replace(",", "")
    permuted_shards, starts = order._epoch_shards(0)
    visited = words(permuted_shards)
    assert f"visits the shards in the order {visited}; they start at the positions {words(starts)}\n" in story
    for step in (0, 1):
        _, positions = order._positions(step)
        _, shard, sample = order.batch(step)
        held = [f"({a} {b})" for a, b in zip(shard, sample, strict=True)]
        assert f"step {step} takes the positions {words(positions[:2])} | {words(positions[2:])} which hold" in story
        assert f"(shard sample) {words(held[:2])} | {words(held[2:])}\n" in story
    _, positions = order._positions(2)
    epoch, shard, sample = order.batch(2)
    assert (
        f"step 2 takes the position {positions[0]} which holds ({shard[0]} {sample[0]}); all 9 samples are used"
        in story
    )
    assert epoch.tolist() == [0, 1, 1, 1]


def test_epochs_and_seeds_are_shuffled_differently():
    order = Order([50] * 20, seed=0, batch_size=50)
    other = Order([50] * 20, seed=1, batch_size=50)
    first = ids(order, 20)[:, 1:]
    second = ids(order, 40)[1000:, 1:]
    assert (first == second).all(1).mean() < 0.02
    assert (first == ids(other, 20)[:, 1:]).all(1).mean() < 0.02


def test_a_step_far_into_300_million_samples_needs_neither_replay_nor_memory():
    order = Order([10_000] * 30_000, seed=0, batch_size=4096)
    far = order.batch(700_000)
    assert len(np.unique(np.stack(far), axis=1).T) == 4096
    assert far[0][0] == 700_000 * 4096 // 300_000_000
    held = sum(array.nbytes for arrays in order._shard_orders.values() for array in arrays) + order.shard_samples.nbytes
    assert held < 2_000_000


def test_a_worker_s_slots_touch_few_shards():
    order = Order([1000] * 640, seed=0, batch_size=1024, lanes=64, shuffle_block=1000)
    _, shard, _ = order.batch(100)
    assert len(set(shard[:128])) <= 8 * 2  # an eighth of the slots is an eighth of the lanes


def test_a_replacement_is_the_next_sample_of_the_lane_and_another_one():
    order = Order([30, 0, 30, 3], seed=0, batch_size=8, lanes=4)
    for slot in range(8):
        chain = [order.replacement(2, slot, attempt) for attempt in range(order.samples)]
        assert chain[0] == tuple(column[slot] for column in order.batch(2))
        assert len(set(chain)) == order.samples
    assert order.replacement(2, 0, 1)[1:] == tuple(column[1] for column in order.batch(2))[1:]


def test_arguments_that_define_no_order_are_refused():
    for options, message in (
        ({"lanes": 0}, "lanes is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"shuffle_block": 0}, "shuffle_block is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Order([10], **{"seed": 0, "batch_size": 12, **options})
    with pytest.raises(ValueError, match="pack a data set first"):
        Order([0, 0], seed=0, batch_size=4)


def test_equal_ledgers_mean_equal_data():
    order = Order([13, 8], seed=0, batch_size=4)

    def ledger(steps, seed=0):
        rolling = Ledger.start("digest", seed)
        for step in steps:
            rolling = rolling.update(step, *order.batch(step))
        return rolling.hex

    assert ledger(range(5)) == ledger(range(5))
    assert len({ledger(range(5)), ledger(range(4)), ledger([0, 1, 2, 4, 3]), ledger(range(5), seed=1)}) == 4


def test_a_ledger_is_the_sha256_of_little_endian_numbers():
    ids = Order([13, 8], seed=0, batch_size=4).batch(7)
    before = sha256(b"digest 0").digest()
    numbers = struct.pack("<q12q", 7, *ids.epoch.tolist(), *ids.shard.tolist(), *ids.sample.tolist())
    assert Ledger.start("digest", 0).update(7, *ids).hex == sha256(before + numbers).hexdigest()


def test_mixture_fills_its_shares_of_every_batch_and_reads_each_set_once_per_epoch():
    sizes = [10, 7, 5, 0, 9]
    mixture = Mixture(sizes, groups=[2, 3], weights=[3, 1], seed=0, batch_size=10)
    assert mixture.shares == [8, 2]
    batches = [np.stack(mixture.batch(step), 1) for step in range(40)]
    second = [2, 7]  # spread over the batch: every half has one
    assert all(np.flatnonzero(batch[:, 1] >= 2).tolist() == second for batch in batches)
    for part, shards in ((np.delete(np.arange(10), second), (0, 1)), (second, (2, 4))):
        seen = np.concatenate([batch[part] for batch in batches])
        total = sum(sizes[shard] for shard in shards)
        every = {(shard, n) for shard in shards for n in range(sizes[shard])}
        for epoch in range(len(seen) // total):
            assert set(map(tuple, seen[seen[:, 0] == epoch][:, 1:].tolist())) == every
            assert (seen[:, 0] == epoch).sum() == total
    assert mixture.replacement(3, 7, 0) == tuple(batches[3][7])
    assert mixture.replacement(3, 7, 1)[1] >= 2


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(shards, st.floats(0.05, 20)), min_size=1, max_size=4), batches, st.integers(0, 40))
def test_any_mixture_has_exact_shares_and_every_sample_once_in_each_set_s_epoch(sets, batch, step):
    sizes = []
    groups = []
    weights = []
    for sizes_of_set, weight in sets:
        sizes += sizes_of_set
        groups.append(len(sizes_of_set))
        weights.append(weight)
    try:
        mixture = Mixture(sizes, groups=groups, weights=weights, seed=0, batch_size=batch)
    except ValueError as error:
        assert min(weights) / sum(weights) * batch < 1
        assert "gets no samples in a batch" in str(error)
        return
    exact = np.array(weights) / sum(weights) * batch
    assert sum(mixture.shares) == batch
    assert (abs(np.array(mixture.shares) - exact) < 1).all()
    seen = np.concatenate([np.stack(mixture.batch(n), 1) for n in range(step, step + 8)])
    assert len(np.unique(seen, axis=0)) == len(seen)
    assert (seen[:, 2] < np.array(sizes)[seen[:, 1]]).all()
    group = np.searchsorted(mixture.starts, seen[:, 1], side="right") - 1
    first = group[:batch]
    assert (group.reshape(8, batch) == first).all()
    assert np.bincount(first).tolist() == mixture.shares
    for half in (first[: batch // 2], first[batch // 2 :]):  # a worker's slots have every set's share, to within one
        for number, share in enumerate(mixture.shares):
            assert abs((half == number).sum() - share * len(half) / batch) <= len(sets)


def test_a_set_too_light_for_the_batch_is_refused():
    with pytest.raises(ValueError, match="one data set gets no samples"):
        Mixture([5, 5], groups=[1, 1], weights=[100, 1], seed=0, batch_size=8)


@pytest.mark.parametrize(("groups", "weights"), [([1], [1]), ([1, 1], [1]), ([1, 1], [1, 0])])
def test_groups_that_leave_out_a_shard_or_a_weight_are_refused(groups, weights):
    with pytest.raises(ValueError, match="must cover 2 shards, and each group needs a positive weight"):
        Mixture([5, 5], groups=groups, weights=weights, seed=0, batch_size=8)


def test_each_set_of_a_mixture_follows_its_own_order_and_replaces_from_it():
    """Recomputes the order with Python's integers: a seed for each set, and each slot's number within its set."""

    def mixed(x: int) -> int:
        mask = 2**64 - 1
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    sizes = [9, 4, 9, 4, 6]
    for seed, groups, weights, batch in (
        (7, [2, 2, 1], [5, 2, 1], 8),
        (1, [2, 2, 1], [1, 1, 1], 9),
        (123_456_789, [2, 3], [1, 7], 8),
    ):
        mixture = Mixture(sizes, groups=groups, weights=weights, seed=seed, batch_size=batch)
        orders = []
        first = 0
        for group, shard_count in enumerate(groups):
            key = 0
            for part in (seed, first):
                key = mixed((key * 0x9E3779B97F4A7C15 + part + 0x632BE59BD9B4E019) % 2**64)
            share = round(batch * weights[group] / sum(weights))
            of_group = sizes[first : first + shard_count]
            orders.append((first, Order(of_group, seed=key >> 2, batch_size=share)))
            first += shard_count
        for step in (0, 3, 11):
            batch_ids = np.stack(mixture.batch(step), 1)
            taken = [0] * len(groups)  # slots of each set so far
            for slot, (_, shard, _) in enumerate(batch_ids.tolist()):
                group = max(number for number, (start, _) in enumerate(orders) if start <= shard)
                start, order = orders[group]
                own = np.stack(order.batch(step), 1)[taken[group]]
                assert batch_ids[slot].tolist() == [own[0], own[1] + start, own[2]]
                for attempt in (0, 1, 5):
                    epoch, own_shard, sample = order.replacement(step, taken[group], attempt)
                    assert mixture.replacement(step, slot, attempt) == (epoch, own_shard + start, sample)
                taken[group] += 1
            assert taken == [order.batch_size for _, order in orders]
    # Sets of equal sizes are shuffled differently, and so is one set with another seed.
    drawn = set()
    for seed in (7, 8):
        equal = Mixture([90, 90], groups=[1, 1], weights=[1, 1], seed=seed, batch_size=8)
        _, shard, sample = equal.batch(0)
        drawn |= {tuple(sample[shard == number].tolist()) for number in (0, 1)}
    assert len(drawn) == 4
