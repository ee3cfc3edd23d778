"""An objective as the loss function of any loop: it takes logits and labels, and catches the features by a hook."""

from collections.abc import Callable
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from nearsay import distributed
from nearsay.batch import Batch, Objective, Outputs, check_outputs, one_hot
from nearsay.losses import NCR
from nearsay.losses.cross_entropy import cross_entropy, real_rows
from nearsay.validation import check_number, check_tensors, check_whole


class NCRCriterion(nn.Module):
    """`criterion(logits, labels)` after `logits = network(inputs)`; features are what entered `head` on the way.

    `head` is the last linear layer of the network. A loss belongs to the last pass through it. Without gradients, as
    in a validation, the loss is cross-entropy alone, which does not depend on who else is in the batch, nor on other
    processes.

    A bank or a base with a memory keeps it in buffers, and needs indices in every call; `num_examples` is how many
    there are, where each is remembered.
    """

    terms: dict[
        str, Tensor
    ]  # what the last loss was made of, for a log; of several processes, the mean over them

    def __init__(
        self, head: nn.Linear, objective: Objective | None = None, *, num_examples: int = 0
    ) -> None:
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise ValueError(
                f"head of type {type(head).__name__} must be the torch.nn.Linear that makes the logits"
            )
        self.objective, self.terms = check_objective(NCR() if objective is None else objective), {}
        if not check_whole("num_examples", num_examples, 0) and remembers_examples(self.objective):
            raise ValueError(
                "this objective remembers every example; give num_examples=, how many there are"
            )
        state = self.objective.init_state(num_examples, head.out_features, head.in_features)
        self._names = {name: name.replace(".", "_") for name in state}  # torch allows no dots
        for name, tensor in state.items():
            self.register_buffer(self._names[name], tensor.to(head.weight.device))
        self._phase: str | None = None  # until the epoch is told
        place = "cpu" if head.weight.is_meta else head.weight.device  # or the epoch would be lost
        self._now = torch.zeros((), device=place)
        self._features: Tensor | None = None
        self._output: Tensor | None = None
        self._is_second_pass = False  # since the last loss
        self._used: WeakValueDictionary[int, Tensor] = (
            WeakValueDictionary()
        )  # logits of earlier losses, by their id
        self._hook = head.register_forward_hook(self._catch, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        """Without the features of a pass that no loss was asked of, which cannot be copied."""
        state = {**self.__dict__, "_features": None, "_output": None, "_is_second_pass": False}
        del state["_used"]  # nor can weak references
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_used": WeakValueDictionary()})  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the memory, but keep its digits: in a network of 16 bits, counts and averages would stand still."""
        state = self.state
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, kept in self._names.items():
            moved = self.get_buffer(kept)
            if moved.dtype.itemsize < state[name].dtype.itemsize:
                setattr(self, kept, state[name].to(moved.device))
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        """What the objective keeps between steps; empty for almost all."""
        return {name: self.get_buffer(kept) for name, kept in self._names.items()}

    def set_epoch(self, epoch: float) -> None:
        """Say at the start of an epoch which it is, from 0, as samplers are told; `start_epoch` depends on it."""
        try:
            epoch = check_number("epoch", float(epoch), 0)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"epoch={epoch!r} must be a number of at least 0, as the first epoch is"
            ) from error
        # A number would be a constant of a compiled step, which then is compiled again in every epoch; and a captured
        # step goes on reading the memory of this very tensor.
        self._now.fill_(epoch)
        self._phase = self.objective.phase(epoch, self.state)

    def forward(self, logits: Tensor, labels: Tensor, indices: Tensor | None = None) -> Tensor:
        """The loss of (B, C) logits; labels are (B,) class numbers, negative for unlabeled, or (B, C) distributions.

        `indices` (B,) say who a row is, −1 for padding; without them every row is somebody else.
        """
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"logits of type {type(logits).__name__} must be a torch.Tensor; take it out of what the network "
                "returns, as in outputs.logits"
            )
        check_tensors(labels=labels, **({} if indices is None else {"indices": indices}))
        targets = (
            labels
            if labels.is_floating_point()
            else one_hot(labels.long().clamp(min=-1), logits.shape[1])
        )
        indices, is_known = _indices(logits, indices), indices is not None
        if not torch.is_grad_enabled():
            return _judged(
                Outputs(logits, logits), Batch(inputs=logits, targets=targets, indices=indices)
            )
        if not is_known and any(not name.startswith("start.") for name in self._names):
            raise ValueError(
                "this objective remembers examples; pass their numbers as indices, from 0"
            )
        outputs = Outputs(self._take(logits), logits)
        batch = Batch(inputs=logits, targets=targets, indices=indices)
        phase, state = self._current_phase(), self.state
        if self._now.device != logits.device:
            self._now = self._now.to(logits.device)
        total, self.terms = self.objective(outputs, batch, self._now, state, phase)
        return total

    def _catch(
        self, _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        if torch.is_grad_enabled():
            self._is_second_pass = self._features is not None
            self._features, self._output = inputs[0] if inputs else named["input"], output

    def _take(self, logits: Tensor) -> Tensor:
        features, output = self._features, self._output
        is_doubtful = self._is_used(logits) or self._is_second_pass
        self._features = self._output = None  # used once, so that old ones cannot be taken for new
        if features is None or output is None:
            raise ValueError(
                "nothing has passed the head with gradients since the last loss; call the network of this very head "
                "once before each loss, copy network and loss together, make the loss before a compiled network first "
                "runs, and checkpoint activations with use_reentrant=False"
            )
        if features.ndim != 2 or len(features) != len(logits):
            raise ValueError(
                f"features {tuple(features.shape)} entered the head for {len(logits)} rows of logits; there must be "
                "one vector a row: use a network that pools before its head, one pass for all rows of a loss, and a "
                "process for each GPU (torchrun)"
            )
        if (
            is_doubtful
            and output is not logits
            and not torch.equal(output.to(logits.dtype), logits)
        ):
            raise ValueError(
                "the head was passed more than once, and these logits are not what it made last, so their features are "
                "not known; make each loss right after its pass, put all its rows into one pass, or other passes under "
                "torch.no_grad()"
            )
        return features

    def _is_used(self, logits: Tensor) -> bool:
        """Whether a loss was asked before of this very tensor, or of what it is a view of; remember it from now on."""
        if torch.compiler.is_compiling():  # a compiled step makes the logits that it takes
            return False
        whole = logits if logits._base is None else logits._base
        is_used = self._used.get(id(whole)) is whole
        self._used[id(whole)] = whole
        return is_used

    def _current_phase(self) -> str:
        if self._phase is not None:
            return self._phase
        for name, value in _clocks(self.objective):
            raise ValueError(
                f"{name}={value!r} needs criterion.set_epoch(epoch) at the start of epochs"
            )
        return self.objective.phase(0.0, self.state)


def check_objective(objective: object) -> Objective:
    """The objective, if it is one."""
    if isinstance(objective, type) or not callable(getattr(objective, "init_state", None)):
        raise ValueError(f"objective={objective!r} must be an objective, such as NCR(k=10)")
    return objective  # type: ignore[return-value]


def remembers_examples(objective: Objective) -> bool:
    """Whether its memory grows with the number of examples."""
    few, more = (
        {name: part.shape for name, part in objective.init_state(num, 1, 1).items()}
        for num in (0, 1)
    )
    return few != more


def _clocks(objective: Any) -> list[tuple[str, float | str]]:  # Any: a base may be anybody's
    """What depends on the epoch, by name, in the objective and its bases."""
    if objective is None:
        return []
    values = [(name, getattr(objective, name, 0.0)) for name in ("start_epoch", "ramp")]
    return [each for each in values if each[1] != 0] + _clocks(getattr(objective, "base", None))


def _judged(outputs: Outputs, batch: Batch) -> Tensor:
    """The mean cross-entropy over the labels of this process."""
    check_outputs(outputs, batch)
    logits, targets = real_rows(outputs, batch)
    return cross_entropy(logits, targets).sum() / targets.sum().clamp(
        min=torch.finfo(targets.dtype).tiny
    )


def _indices(logits: Tensor, indices: Tensor | None) -> Tensor:
    """(B,) int64; without any, every row of every process is one of its own."""
    if indices is not None:
        return indices.to(logits.device)
    return distributed.rank() * len(logits) + torch.arange(len(logits), device=logits.device)
