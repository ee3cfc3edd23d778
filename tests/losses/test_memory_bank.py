import pytest
import torch
from torch.testing import assert_close

from nearsay import ELR, NCR, Bank, Batch, Outputs, ncr, one_hot


def rows(num_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    return Outputs(
        torch.randn(num_rows, 5, generator=generator), torch.randn(num_rows, 4, generator=generator)
    )


def batch_of(indices, views=1):
    targets = one_hot(indices.clamp(min=0) % 4, 4)
    return Batch(inputs=torch.zeros(len(indices), 1), targets=targets, indices=indices, views=views)


def test_a_queue_keeps_the_latest_rows_and_forgets_the_oldest():
    bank = Bank(size=7)
    memory = bank.init_state(100, 4, 5)
    pointers = {name: tensor.data_ptr() for name, tensor in memory.items()}
    for step in range(3):
        bank.write(memory, rows(3, step), torch.arange(3 * step, 3 * step + 3))
    assert memory["indices"].tolist() == [7, 8, 2, 3, 4, 5, 6, -1]
    assert_close(memory["features"][:2], rows(3, 2).features[1:])
    assert_close(memory["logits"][2], rows(3, 0).logits[2])
    assert int(memory["cursor"]) == 2
    # Written in place.
    assert {name: tensor.data_ptr() for name, tensor in memory.items()} == pointers


def test_a_bank_of_examples_keeps_the_latest_row_of_each():
    bank = Bank(kind="examples")
    memory = bank.init_state(10, 4, 5)
    bank.write(memory, rows(3, 0), torch.tensor([4, 9, 2]))
    bank.write(memory, rows(3, 1), torch.tensor([9, 0, 4]))
    assert memory["indices"].tolist() == [0, -1, 2, -1, 4, -1, -1, -1, -1, 9, -1]
    assert_close(memory["features"][9], rows(3, 1).features[0])
    assert_close(memory["features"][2], rows(3, 0).features[2])


@pytest.mark.parametrize("kind", ["queue", "examples"])
def test_padding_later_views_and_copies_are_not_kept(kind):
    bank = Bank(kind=kind, size=8)
    memory = bank.init_state(10, 4, 5)
    outputs = rows(6, 0)
    outputs.features[1] = torch.nan
    bank.write(memory, outputs, torch.tensor([3, -1, 5, 3, 5, 6]))
    kept = memory["indices"]
    assert sorted(kept[kept >= 0].tolist()) == [3, 5, 6]
    assert int(kept[-1]) == -1
    for index, row in ((3, 0), (5, 2), (6, 5)):
        assert_close(memory["features"][kept == index][0], outputs.features[row])


@pytest.mark.parametrize("kind", ["queue", "examples"])
def test_the_bank_is_searched_without_the_examples_at_hand(kind):
    bank = Bank(kind=kind, size=8)
    memory = bank.init_state(10, 4, 5)
    bank.write(memory, rows(4, 0), torch.tensor([1, 3, 5, 7]))
    _, _, indices = bank.search(memory, torch.tensor([5, -1, 2, 1]))
    assert sorted(indices[indices >= 0].tolist()) == [3, 7]
    assert sorted(memory["indices"][memory["indices"] >= 0].tolist()) == [1, 3, 5, 7]


@pytest.mark.parametrize("bank", [Bank(size=64), Bank(kind="examples")], ids=lambda bank: bank.kind)
def test_a_small_batch_finds_the_neighbors_of_a_large_one(bank):
    """With a frozen network, two halves of a batch have the values of the whole batch."""
    outputs, indices = rows(40, 0), torch.arange(40)
    objective = NCR(alpha=1.0, k=5, bank=bank)
    memory = objective.init_state(40, 4, 5)
    bank_memory = {name.removeprefix("bank."): tensor for name, tensor in memory.items()}
    bank.write(bank_memory, outputs, indices)
    whole = ncr(outputs.logits, outputs.features, indices, k=5, reduction="none")
    for start in (0, 20):
        part = slice(start, start + 20)
        leaves = Outputs(
            outputs.features[part].clone().requires_grad_(),
            outputs.logits[part].clone().requires_grad_(),
        )
        loss = objective(
            leaves, batch_of(indices[part]), torch.tensor(0.0), memory, "ncr/cross_entropy"
        ).total
        assert_close(loss, whole[part].mean())
        assert all((gradient != 0).any() for gradient in torch.autograd.grad(loss, leaves))


def test_the_bank_fills_before_the_term_begins():
    outputs, indices = rows(20, 0), torch.arange(20)
    objective = NCR(start_epoch=5.0, k=5, bank=Bank(size=30))
    memory = objective.init_state(40, 4, 5)
    objective(outputs, batch_of(indices), torch.tensor(0.0), memory, objective.phase(0.0, memory))
    assert memory["bank.indices"][:20].tolist() == list(range(20))


def test_writing_does_not_disturb_a_backward_pass_to_come():
    outputs = rows(20, 0)
    leaves = Outputs(*(tensor.clone().requires_grad_() for tensor in outputs))
    objective = NCR(alpha=1.0, k=5, bank=Bank(size=30))
    memory = objective.init_state(40, 4, 5)
    objective(
        rows(20, 1), batch_of(torch.arange(20, 40)), torch.tensor(0.0), memory, "ncr/cross_entropy"
    )
    pool = objective.bank.search(
        {n.removeprefix("bank."): t.clone() for n, t in memory.items()}, torch.arange(20)
    )
    loss = objective(
        leaves, batch_of(torch.arange(20)), torch.tensor(0.0), memory, "ncr/cross_entropy"
    ).total
    actual = torch.autograd.grad(loss, leaves)
    expected = torch.autograd.grad(
        ncr(
            leaves.logits, leaves.features, torch.arange(20), k=5, pool=pool, implementation="plain"
        ),
        leaves,
    )
    assert_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_a_batch_larger_than_the_queue_and_an_unknown_index_are_named():
    bank = Bank(size=3)
    objective = NCR(k=2, base=ELR(), bank=bank)
    memory = objective.init_state(10, 4, 5)
    before = {name: tensor.clone() for name, tensor in memory.items()}
    with pytest.raises(ValueError, match=r"^size .* 4 "):
        objective(rows(4, 0), batch_of(torch.arange(4)), torch.tensor(0.0), memory, "ncr/elr")
    assert_close(memory, before)  # refused before anything was written
    objective(rows(3, 0), batch_of(torch.arange(3)), torch.tensor(0.0), memory, "ncr/elr")
    assert sorted(memory["bank.indices"][:3].tolist()) == [0, 1, 2]  # as many as it holds are held
    for wrong in ({}, NCR(bank=Bank(size=4)).init_state(10, 4, 5)):
        with pytest.raises(ValueError, match=r"^state"):
            objective(rows(2, 0), batch_of(torch.arange(2)), torch.tensor(0.0), wrong, "ncr/elr")
    for sizes, words in (((10, 4, 6), "features"), ((10, 3, 5), "logits")):
        other, batch = objective.init_state(*sizes), batch_of(torch.arange(2))
        with pytest.raises(ValueError, match=words):
            objective(rows(2, 0), batch, torch.tensor(0.0), other, "base/elr")
    with pytest.raises(ValueError, match="start_epoch"):
        NCR(start_epoch="auto").phase(0.0, {})
    bank = Bank(kind="examples")
    with pytest.raises(ValueError, match=r"ind(ex|ices)\b.*10"):
        bank.write(bank.init_state(10, 4, 5), rows(2, 0), torch.tensor([3, 10]))


@pytest.mark.parametrize("bank", [Bank(size=16), Bank(kind="examples")], ids=["queue", "examples"])
@pytest.mark.parametrize("start_epoch", [0, 5])
def test_an_index_that_can_be_nobody_is_refused_before_it_is_kept(bank, start_epoch):
    objective = NCR(k=2, start_epoch=start_epoch, bank=bank)
    memory = objective.init_state(10, 4, 5)
    before = {name: tensor.clone() for name, tensor in memory.items()}
    batch, phase = batch_of(torch.arange(8) - 5), objective.phase(0.0, memory)
    with pytest.raises(ValueError, match=r"ind(ex|ices)\b.*-5"):
        objective(rows(8, 0), batch, torch.tensor(0.0), memory, phase)
    assert_close(memory, before)


@pytest.mark.parametrize("kind", ["queue", "examples"])
def test_a_memory_that_lacks_a_part_is_refused(kind):
    objective, batch = NCR(k=2, bank=Bank(kind=kind)), batch_of(torch.arange(2))
    for name in ("features", "logits", "indices", "cursor"):
        memory = objective.init_state(10, 4, 5)
        del memory[f"bank.{name}"]
        with pytest.raises(ValueError, match=r"^state"):
            objective(rows(2, 0), batch, torch.tensor(0.0), memory, "base/cross_entropy")
    for field, value in (("kind", "list"), ("size", 0), ("size", 2.5)):
        with pytest.raises(ValueError, match=field):
            Bank(**{field: value})


def test_what_is_not_finite_does_not_stay_in_memory():
    objective = NCR(alpha=0.5, k=3, base=ELR(), bank=Bank(size=30))
    memory = objective.init_state(40, 4, 5)
    bad = rows(20, 0)
    bad.logits[3, 1] = torch.nan
    bad.features[7, 2] = torch.inf
    batch = batch_of(torch.arange(20))
    assert not objective(bad, batch, torch.tensor(0.0), memory, "ncr/elr").total.isfinite()
    assert all(tensor.isfinite().all() for tensor in memory.values())
    assert sorted(set(range(20)) - set(memory["bank.indices"].tolist())) == [3, 7]
    good = objective(
        rows(20, 1), batch_of(torch.arange(20, 40)), torch.tensor(0.0), memory, "ncr/elr"
    )
    assert good.total.isfinite()
