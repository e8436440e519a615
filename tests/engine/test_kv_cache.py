from __future__ import annotations

import pytest

from trioleg.engine.kv_cache import BlockPool


def test_all_blocks_are_given_out_once_and_come_back() -> None:
    pool = BlockPool(5, block_size=4)
    taken = pool.allocate(5)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2, 3, 4]
    pool.free(taken)
    assert pool.num_free == 5


def test_too_many_takes_nothing() -> None:
    pool = BlockPool(5)
    assert pool.allocate(6) is None
    assert pool.num_free == 5


@pytest.mark.parametrize("num_blocks", [1, 3, 7, 5825, 100_003])
def test_free_blocks_follow_from_usage(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    for _ in range(min(num_blocks, 40)):
        pool.allocate(1)
        assert round((1 - pool.usage) * num_blocks) == pool.num_free


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert BlockPool(1, block_size=16).blocks_for(tokens) == blocks


def test_no_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)
