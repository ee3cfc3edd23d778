"""NCRLoss: a loss of this package as the `torch.nn.Module` of any training loop."""

from collections.abc import Callable
from typing import Any, Literal, Self
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from nearsay import distributed
from nearsay.batch import Batch, Objective, Outputs, check_outputs, one_hot
from nearsay.losses.base import Formula, as_objective, real_rows
from nearsay.losses.cross_entropy import CrossEntropy, cross_entropy
from nearsay.losses.memory_bank import Bank
from nearsay.losses.ncr import NCR, Variant
from nearsay.validation import check_number, check_tensors, check_that, check_whole

# Frozen, so it may be shared.
_CROSS_ENTROPY = CrossEntropy()


class NCRLoss(nn.Module):
    """Neighbor Consistency Regularization, or any other loss of this package, as one module.

    There are two ways to call it. Without `head`, give the features, which are the inputs of the
    last linear layer: `loss(logits, features, labels, indices)`. With `head`, a hook takes them
    from what enters that layer: `loss(logits, labels, indices)`. Then each loss belongs to the last
    pass with gradients through the head.

    Without gradients, as in validation, the loss is plain cross-entropy: it depends neither on the
    other rows of the batch nor on other processes. With gradients and several processes, neighbors
    are searched among the rows of all processes.

    State (a bank, the averages of ELR) is kept in buffers, so it is part of `state_dict()`. It is
    made here if its sizes are known, otherwise by the first call or by `load_state_dict`.

    Args:
        k: number of neighbors; None means all rows.
        alpha: weight of the neighbors against the labels, from 0 (base alone) to 1 (no labels).
        temperature: divides the logits in the NCR term, from 0.01 to 100.
        start_epoch: first epoch with the NCR term, or "auto". Needs `set_epoch`.
        base: the loss of the labels, such as `CrossEntropy(smoothing=0.1)` or `ELR()`, or a
            function of (logits, targets) that returns one loss per row.
        variant: "paper" or "released", the formula of the authors' code.
        bank: a `Bank` of earlier rows to search for neighbors. Needs indices.
        mask_partners: rows that share an image through mixup are not neighbors. Needs a `Batch`.
        reject: share of the rows, those with the most distant neighbors, that lose their label if
            their neighbors are undecided as well.
        objective: another loss instead of NCR, such as `ELR()` or `GJS()`, or a function of
            (logits, targets) that returns one loss per row. Leave out the arguments of NCR above.
        num_examples: number of training examples. Needed by losses with a row per example, such as
            `ELR()` or `Bank(kind="examples")`.
        num_classes: number of classes, to make the state at once. Needs `num_features` as well.
        num_features: length of a feature vector.
        head: the last linear layer of the network, such as `model.fc`, to take the features from.

    Call arguments:
        logits: (B, C), the outputs of the network.
        features: (B, D), only without `head`.
        labels: (B,) class numbers, negative for unlabeled; or (B, C) distributions, such as those
            of mixup; or a `Batch`, which can also hold views, mixup partners and a teacher.
        indices: (B,) int64, the number of the example in each row; −1 is padding. Without indices,
            every row is a different example.

    Attributes:
        terms: the parts of the last loss, detached, for a log. Average them over processes.
        state: what the loss keeps between steps, by name; empty for most losses.
        objective: the loss as a value.

    >>> import torch
    >>> from nearsay.losses import NCRLoss
    >>> _ = torch.manual_seed(0)
    >>> body, classifier = torch.nn.Linear(6, 4), torch.nn.Linear(4, 3)
    >>> inputs, labels = torch.randn(8, 6), torch.randint(3, (8,))
    >>> loss = NCRLoss(k=3, alpha=0.9)
    >>> features = body(inputs)
    >>> total = loss(classifier(features), features, labels)
    >>> total.backward()
    >>> sorted(loss.terms)
    ['cross_entropy', 'isolated', 'ncr']

    The same for a network that returns logits only:

    >>> model = torch.nn.Sequential(body, classifier)
    >>> loss = NCRLoss(k=3, alpha=0.9, head=model[1])
    >>> bool(loss(model(inputs), labels) == total)
    True
    """

    terms: dict[str, Tensor]

    def __init__(
        self,
        *,
        k: int | None = 10,
        alpha: float = 0.9,
        temperature: float = 2.0,
        start_epoch: float | Literal["auto"] = 0.0,
        base: Objective | Formula = _CROSS_ENTROPY,
        variant: Variant = "paper",
        bank: Bank | None = None,
        mask_partners: bool = False,
        reject: float = 0.0,
        objective: Objective | Formula | None = None,
        num_examples: int = 0,
        num_classes: int | None = None,
        num_features: int | None = None,
        head: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        ncr = NCR(
            k=k,
            alpha=alpha,
            temperature=temperature,
            start_epoch=start_epoch,
            base=as_objective(base, name="base"),
            variant=variant,
            bank=bank,
            mask_partners=mask_partners,
            reject=reject,
        )
        self.objective = _chosen(ncr, objective)
        self.num_examples = check_whole("num_examples", num_examples, 0)
        if not num_examples and remembers_examples(self.objective):
            raise ValueError(
                "num_examples must be the number of training examples, got 0. "
                "This loss keeps a row per example."
            )
        self.terms = {}
        # The names of the state and those of its buffers, which may hold no dots.
        self._names: dict[str, str] = {}
        self._is_made = False
        self._has_head = head is not None
        sizes = _sizes(head, num_classes, num_features)
        device = torch.device("cpu") if head is None else head.weight.device
        if sizes is not None or not _needs_sizes(self.objective):
            self._make_state(*(sizes or (1, 1)), device)
        # The phase stays unknown until set_epoch.
        self._phase: str | None = None
        # The device meta would lose the epoch.
        self._epoch = torch.zeros((), device="cpu" if device.type == "meta" else device)
        self._features: Tensor | None = None
        self._output: Tensor | None = None
        # Whether the head was passed twice since the last loss.
        self._is_second_pass = False
        # The logits of earlier losses, by their id.
        self._used: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        if head is not None:
            self._hook = head.register_forward_hook(self._catch, with_kwargs=True)

    def __getstate__(self) -> dict[str, Any]:
        # Neither features that no loss has used yet nor weak references can be copied.
        state = {**self.__dict__, "_features": None, "_output": None, "_is_second_pass": False}
        del state["_used"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {**state, "_used": WeakValueDictionary()}
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the state, but do not round it: 16 bits cannot hold its counts and averages."""
        state = self.state
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in self._names.items():
            moved = self.get_buffer(buffer)
            if moved.dtype.itemsize < state[name].dtype.itemsize:
                setattr(self, buffer, state[name].to(moved.device))
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Make the state in the sizes of what is loaded, if it is not made yet."""
        if not self._is_made:
            keys = {name: prefix + _buffer_name(name) for name in self._smallest_state()}
            if {*keys.values()} <= state_dict.keys():
                self._register({name: state_dict[key].clone() for name, key in keys.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """The loss as a value, for print(model)."""
        return repr(self.objective)

    @property
    def state(self) -> dict[str, Tensor]:
        """What the loss keeps between steps, by name; empty for most losses."""
        return {name: self.get_buffer(buffer) for name, buffer in self._names.items()}

    def set_epoch(self, epoch: float) -> None:
        """Set the epoch, from 0, at its start. `start_epoch` and ramps depend on it.

        Args:
            epoch: a number of at least 0. It may be a fraction, such as 1.5.

        >>> from nearsay.losses import NCRLoss
        >>> loss = NCRLoss(start_epoch=2)
        >>> for epoch in range(3):
        ...     loss.set_epoch(epoch)
        """
        try:
            epoch = check_number("epoch", float(epoch), 0)
        except (TypeError, ValueError) as error:
            raise ValueError(f"epoch must be a number of at least 0, got {epoch!r}.") from error
        # A Python number would be a constant of a compiled step, which would be compiled again in
        # every epoch. A captured step goes on reading this very tensor.
        self._epoch.fill_(epoch)
        self._phase = self.objective.phase(epoch, self._smallest_state())

    def forward(self, logits: Tensor, *rows: Any, **named: Any) -> Tensor:
        """The loss of a batch: (logits, features, labels, indices), no features with a head."""
        if not isinstance(logits, Tensor):
            raise ValueError(
                f"logits must be a torch.Tensor, got {type(logits).__name__}. "
                "Take them out of what the network returns, as in outputs.logits."
            )
        features, labels, indices = self._arguments(*rows, **named)
        batch = _batch(logits, labels, indices)
        if not torch.is_grad_enabled():
            return _plain_cross_entropy(logits, batch)
        is_known = indices is not None or isinstance(labels, Batch)
        if not is_known and any(not name.startswith("start.") for name in self._smallest_state()):
            raise ValueError(
                "indices must be given, because this loss keeps a row per example or a bank. "
                "They are the numbers of the examples, from 0."
            )
        outputs = Outputs(self._take(logits) if self._has_head else features, logits)
        if not self._is_made:
            check_outputs(outputs, batch)
            self._make_state(logits.shape[1], outputs.features.shape[1], logits.device)
        phase = self._current_phase()
        if self._epoch.device != logits.device:
            self._epoch = self._epoch.to(logits.device)
        total, self.terms = self.objective(outputs, batch, self._epoch, self.state, phase)
        return total

    def _arguments(self, *rows: Any, **named: Any) -> tuple[Any, Any, Any]:
        """Features, labels and indices of a call, by place or by name."""
        names = ("labels", "indices") if self._has_head else ("features", "labels", "indices")
        arguments = {**dict(zip(names, rows, strict=False)), **named}
        # An argument too many, given twice, of an unknown name, or missing.
        is_clear = len(arguments) == len(rows) + len(named) and {*arguments} <= {*names}
        if not is_clear or not {*names[:-1]} <= {*arguments}:
            raise TypeError(f"NCRLoss must be called with (logits, {', '.join(names)}=None).")
        features, labels = arguments.get("features"), arguments["labels"]
        if not self._has_head:
            check_tensors(features=features)
        return features, labels, arguments.get("indices")

    def _smallest_state(self) -> dict[str, Tensor]:
        """The state; before it is made, one with the same names."""
        return self.state if self._is_made else self.objective.init_state(self.num_examples, 1, 1)

    def _make_state(self, num_classes: int, num_features: int, device: torch.device | str) -> None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "num_classes and num_features must be given if the step is compiled, "
                "because this loss has state."
            )
        state = self.objective.init_state(self.num_examples, num_classes, num_features)
        self._register({name: tensor.to(device) for name, tensor in state.items()})

    def _register(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            self._names[name] = _buffer_name(name)
            self.register_buffer(_buffer_name(name), tensor)
        self._is_made = True

    def _catch(
        self, _: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
    ) -> None:
        """The hook of the head: keep what entered it and what left it."""
        if torch.is_grad_enabled():
            self._is_second_pass = self._features is not None
            self._features, self._output = inputs[0] if inputs else named["input"], output

    def _take(self, logits: Tensor) -> Tensor:
        """The features of these logits, which are used once."""
        features, output = self._features, self._output
        is_doubtful = self._is_used(logits) or self._is_second_pass
        # Forgotten at once, so that old features are never combined with new logits.
        self._features = self._output = None
        if features is None or output is None:
            raise ValueError(
                "head must be passed with gradients before each loss. Copy network and loss "
                "together, make the loss before compiling, and checkpoint with use_reentrant=False."
            )
        if features.ndim != 2 or len(features) != len(logits):
            raise ValueError(
                f"features must be ({len(logits)}, D) where they enter the head, got "
                f"{tuple(features.shape)}. Pool before the head, use one pass per loss, "
                "and one process per GPU (torchrun)."
            )
        # Values are compared in doubt only, because that waits for the device.
        is_doubtful = is_doubtful and output is not logits
        if is_doubtful and not torch.equal(output.to(logits.dtype), logits):
            raise ValueError(
                "logits must be those of the last pass through the head. Put all rows into one "
                "pass, or run other passes under torch.no_grad()."
            )
        return features

    def _is_used(self, logits: Tensor) -> bool:
        """Whether this very tensor, or what it is a view of, was in a loss before."""
        # A compiled step makes the logits that it takes.
        if torch.compiler.is_compiling():
            return False
        whole = logits if logits._base is None else logits._base
        is_used = self._used.get(id(whole)) is whole
        self._used[id(whole)] = whole
        return is_used

    def _current_phase(self) -> str:
        if self._phase is not None:
            return self._phase
        for name, value in _fields_of_time(self.objective):
            raise ValueError(
                f"{name}={value!r} must be used with loss.set_epoch(epoch) at the start of epochs."
            )
        return self.objective.phase(0.0, self.state)


def _chosen(ncr: NCR, objective: Objective | Formula | None) -> Objective:
    if objective is None:
        return ncr
    if ncr != NCR():
        raise ValueError(
            "objective must be given without the arguments of NCR. "
            "Use objective=NCR(k=..., alpha=...) or leave objective out."
        )
    return as_objective(objective)


def remembers_examples(objective: Objective) -> bool:
    """Whether the state of a loss grows with the number of examples."""
    return _shapes(objective, 0, 1, 1) != _shapes(objective, 1, 1, 1)


def _needs_sizes(objective: Objective) -> bool:
    return _shapes(objective, 1, 1, 1) != _shapes(objective, 1, 2, 2)


def _shapes(objective: Objective, *sizes: int) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in objective.init_state(*sizes).items()}


def _buffer_name(name: str) -> str:
    return name.replace(".", "_")


def _sizes(
    head: nn.Linear | None, num_classes: int | None, num_features: int | None
) -> tuple[int, int] | None:
    """The numbers of classes and features, if they are known before the first call."""
    if head is None:
        if num_classes is None or num_features is None:
            return None
        return check_whole("num_classes", num_classes, 1), check_whole(
            "num_features", num_features, 1
        )
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"head must be the torch.nn.Linear that makes the logits, got {type(head).__name__}."
        )
    if (num_classes, num_features) != (None, None):
        raise ValueError(
            "num_classes and num_features must not be given with head, which tells them."
        )
    return head.out_features, head.in_features


def _fields_of_time(objective: Any) -> list[tuple[str, float | str]]:
    """The fields of a loss and its bases that depend on the epoch, by name, if they are in use."""
    if objective is None:
        return []
    fields = [(name, getattr(objective, name, 0.0)) for name in ("start_epoch", "ramp")]
    in_use = [field for field in fields if field[1] != 0]
    return in_use + _fields_of_time(getattr(objective, "base", None))


def _batch(logits: Tensor, labels: Any, indices: Tensor | None) -> Batch:
    """The batch of a call."""
    if isinstance(labels, Batch):
        if indices is not None:
            raise ValueError("indices must not be given with a Batch, which has them.")
        return labels
    check_tensors(labels=labels)
    if indices is None:
        # Every row of every process is an example of its own.
        first = distributed.rank() * len(logits)
        indices = first + torch.arange(len(logits), device=logits.device)
    check_tensors(indices=indices)
    _check_labels(labels, logits)
    targets = labels
    if not labels.is_floating_point():
        targets = one_hot(labels.long().clamp(min=-1), logits.shape[1])
    return Batch(inputs=logits, targets=targets, indices=indices.to(logits.device))


def _check_labels(labels: Tensor, logits: Tensor) -> None:
    """Refuse labels that do not fit the logits by the name that the caller knows."""
    check_that(logits.ndim == 2, "logits", "two-dimensional", tuple(logits.shape))
    rows, num_classes = logits.shape
    shape = tuple(labels.shape)
    if labels.is_floating_point():
        is_right = shape == (rows, num_classes)
        condition = f"class numbers ({rows},) or distributions ({rows}, {num_classes})"
        text = f"floats {shape}" if len(shape) == 1 else f"{shape}"
        hint = "Use labels.long()." if len(shape) == 1 else ""
    else:
        is_right = shape == (rows,)
        condition = f"class numbers ({rows},)"
        text = f"{shape}"
        hint = "Use labels.float() for distributions." if shape == (rows, num_classes) else ""
    if not is_right:
        raise ValueError(f"labels must be {condition}, got {text}.{hint and f' {hint}'}")


def _plain_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy over the labels of this process."""
    outputs = Outputs(logits, logits)
    check_outputs(outputs, batch)
    logits, targets = real_rows(outputs, batch)
    weight = targets.sum().clamp(min=torch.finfo(targets.dtype).tiny)
    return cross_entropy(logits, targets).sum() / weight
