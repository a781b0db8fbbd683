import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.data import batch_share, batch_slice, epoch_shares
from lockstep.errors import SplitError

world_sizes = st.integers(1, 64)


@given(world_sizes, st.integers(0, 1000))
def test_batch_share_is_even_and_the_first_ranks_take_one_more(world_size: int, more: int) -> None:
    shares = [batch_share(world_size + more, rank, world_size) for rank in range(world_size)]
    assert sum(shares) == world_size + more
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


@given(world_sizes, st.integers(0, 1000))
def test_batch_slices_are_the_batch_in_rank_order(world_size: int, more: int) -> None:
    batch = list(range(world_size + more))
    slices = (batch_slice(len(batch), rank, world_size) for rank in range(world_size))
    assert [sample for where in slices for sample in batch[where]] == batch


def test_batch_share_smaller_than_the_world_is_a_split_error() -> None:
    with pytest.raises(SplitError, match="batch of 3 can't be split over a world size of 4"):
        batch_share(3, 0, 4)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (0, -1)])
def test_batch_share_of_no_such_rank_is_a_split_error(rank: int, world_size: int) -> None:
    with pytest.raises(SplitError, match=f"no rank {rank} in a world of {world_size}"):
        batch_share(128, rank, world_size)


@given(world_sizes, st.integers(0, 100), st.integers(0, 5000))
@example(world_size=4, more=1, num_samples=14)  # a sample for each rank in the last batch
def test_epoch_shares_give_every_rank_as_many_batches(
    world_size: int, more: int, num_samples: int
) -> None:
    batch_size = world_size + more
    if 0 < num_samples % batch_size < world_size:
        with pytest.raises(SplitError, match="for the last batch"):
            epoch_shares(num_samples, batch_size, world_size)
        return
    parts = epoch_shares(num_samples, batch_size, world_size)
    shares = [batch_share(batch_size, rank, world_size) for rank in range(world_size)]
    steps = {-(-part // share) for part, share in zip(parts, shares, strict=True)}
    assert sum(parts) == num_samples
    assert steps == {-(-num_samples // batch_size)}


@pytest.mark.parametrize("batch_size", [0, -1, 1])
def test_epoch_shares_of_a_batch_smaller_than_the_world_is_a_split_error(batch_size: int) -> None:
    with pytest.raises(SplitError, match=f"batch of {batch_size} can't be split"):
        epoch_shares(100, batch_size, 2)
