"""NCR in the Trainer of Hugging Face, for networks that classify images or texts."""

from typing import Any

import torch
from torch import Tensor, nn

from nearsay.batch import Objective
from nearsay.integrations import import_library
from nearsay.losses.base import as_objective
from nearsay.losses.criterion import NCRLoss, remembers_examples
from nearsay.losses.ncr import NCR

__all__ = ["NCRTrainer"]

_transformers = import_library("transformers", "transformers")


class NCRTrainer(_transformers.Trainer):  # type: ignore[misc, name-defined]
    """`transformers.Trainer` with the loss of this package.

    The features are what enters the last linear layer with an output for each label. The terms of
    the loss are logged beside it. The loss of an evaluation is cross-entropy. A column `indices` of
    the data, which needs `remove_unused_columns=False`, holds the number of each example.

    Args:
        args: positional arguments of `Trainer`.
        objective: the loss; None means `NCR()`. It must keep no state except in a `Bank` of the
            kind "queue".
        head: the classifier layer, if it is not the last linear layer with an output per label.
        choices: keyword arguments of `Trainer`, except `model_init` and `compute_loss_func`.
    """

    # The loss is a mean over one batch: the Trainer divides it by the number of accumulated ones.
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        *args: Any,
        objective: Objective | None = None,
        head: nn.Linear | None = None,
        **choices: Any,
    ) -> None:
        for name in ("model_init", "compute_loss_func"):
            if choices.get(name) is not None:
                raise ValueError(f"{name} must not be given. Use model= and objective=.")
        super().__init__(*args, **choices)
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor must be 0, got {self.args.label_smoothing_factor}. "
                "Use objective=NCR(base=CrossEntropy(smoothing=...))."
            )
        # The loss is not the one that the network would compute.
        self.model_accepts_loss_kwargs = False
        objective = NCR() if objective is None else as_objective(objective)
        # A bank that is a queue is soon full again after a checkpoint.
        is_lost = any(not name.startswith("bank.") for name in objective.init_state(1, 1, 1))
        if is_lost or remembers_examples(objective):
            raise ValueError(
                "objective must keep no state except in bank=Bank(size=...): "
                "checkpoints of the Trainer would lose it."
            )
        head = find_head(self.model) if head is None else head
        self.ncr_loss = NCRLoss(objective=objective, head=head)
        # The sum of each term, and of how many losses, because NCR may start later than the rest.
        self._sums: dict[str, tuple[Tensor, int]] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a batch. The network itself gets no labels."""
        if "labels" not in inputs:
            raise ValueError(
                f"labels must be a column of the data, got {', '.join(inputs)}. Use "
                "remove_unused_columns=False if the forward method takes no labels."
            )
        if self.ncr_loss.state and "indices" not in inputs and torch.is_grad_enabled():
            raise ValueError(
                "indices must be a column of the data if there is a bank, got "
                f"{', '.join(inputs)}. Use remove_unused_columns=False to keep it."
            )
        network_inputs = {**inputs}
        for name in ("labels", "indices"):
            network_inputs.pop(name, None)
        outputs = model(**network_inputs)
        self.ncr_loss.set_epoch(self.state.epoch or 0.0)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        loss = self.ncr_loss(logits, inputs["labels"], inputs.get("indices"))
        if torch.is_grad_enabled():
            for name, value in self.ncr_loss.terms.items():
                total, num = self._sums.get(name, (0, 0))
                self._sums[name] = total + value, num + 1
        if not isinstance(outputs, dict):
            # The Trainer looks here for the loss of a network that has seen labels.
            outputs = (loss, *outputs)
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **choices: Any) -> None:
        """Log the terms of the loss as well, averaged since they were last logged."""
        if "loss" in logs and self._sums:
            means = torch.stack([total.float() / num for total, num in self._sums.values()])
            means = self.accelerator.reduce(means, reduction="mean")
            logs.update(zip(self._sums, means.tolist(), strict=True))
            self._sums = {}
        super().log(logs, *args, **choices)


def find_head(model: nn.Module) -> nn.Linear:
    """The last linear layer that has an output for each label."""
    config: Any = getattr(model, "config", None)
    num_labels = getattr(config, "num_labels", None)
    problem = getattr(config, "problem_type", None)
    if problem in ("regression", "multi_label_classification") or num_labels == 1:
        raise ValueError(
            "problem_type must be 'single_label_classification' with 2 labels or more, "
            f"got {problem!r} with {num_labels}."
        )
    heads = []
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.out_features == num_labels:
            heads.append(layer)
    if not heads:
        raise ValueError(
            f"head must be given, because {type(model).__name__} has no linear layer with "
            f"{num_labels} outputs."
        )
    return heads[-1]
