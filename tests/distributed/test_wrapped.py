"""Two processes under DDP and FSDP equal one: neighbors are searched among the rows of both."""

from torch.testing import assert_close

from distributed.group import results
from distributed.wrapped import step


def test_two_processes_have_the_loss_and_the_gradients_of_one():
    one, other = results(2, "wrapped")
    alone = step()
    assert_close(one["gradients"], alone["gradients"])
    assert_close(other["gradients"], alone["gradients"])
    assert_close(one["judged"], alone["judged"])
    for name in ("loss", "terms", "sharded"):
        assert_close((one[name] + other[name]) / 2, alone[name])
