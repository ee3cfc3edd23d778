"""NCR in the Trainer of Hugging Face, for networks that classify images or texts."""

from typing import Any

import torch
from torch import Tensor, nn

from nearsay.batch import Objective
from nearsay.integrations.libraries import import_library
from nearsay.losses import NCR
from nearsay.losses.criterion import NCRCriterion, check_objective, remembers_examples

__all__ = ["NCRCriterion", "NCRTrainer"]

_transformers = import_library("transformers", "transformers")


class NCRTrainer(_transformers.Trainer):  # type: ignore[misc, name-defined]  # transformers may be missing
    """`Trainer` with an NCR objective; features are what enters the last linear layer, or the `head` that is given.

    The terms of the loss are logged beside it. A column `indices` says who an example is; it takes
    `remove_unused_columns=False` to get here. The loss of an evaluation is cross-entropy.
    """

    loss_is_scaled_for_ga = (
        False  # a mean over one batch: the Trainer divides it by the number of accumulated ones
    )

    def __init__(
        self,
        *args: Any,
        objective: Objective | None = None,
        head: nn.Linear | None = None,
        **choices: Any,
    ) -> None:
        if choices.get("model_init") is not None or choices.get("compute_loss_func") is not None:
            raise ValueError(
                "model_init and compute_loss_func do not go with NCRTrainer; give model= and objective="
            )
        super().__init__(*args, **choices)
        if self.args.label_smoothing_factor:
            raise ValueError(
                f"label_smoothing_factor={self.args.label_smoothing_factor} has no effect here; give "
                "objective=NCR(base=CrossEntropy(smoothing=...)) instead"
            )
        self.model_accepts_loss_kwargs = False  # the loss is not the network's own
        objective = NCR() if objective is None else objective
        state = check_objective(objective).init_state(1, 1, 1)
        if remembers_examples(objective) or any(not name.startswith("bank.") for name in state):
            raise ValueError(  # a queue is soon full again
                "this objective keeps a memory that checkpoints of the Trainer would lose; use one without, or with no "
                "more than bank=Bank(size=4096)"
            )
        self.criterion = NCRCriterion(find_head(self.model) if head is None else head, objective)
        self._sums: dict[
            str, tuple[Tensor, int]
        ] = {}  # of each term, and of how many losses: NCR may start later

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss of a batch, whose labels the network does not see."""
        if "labels" not in inputs:
            raise ValueError(
                f"a batch of {', '.join(inputs)} has no labels; call the column labels, and give "
                "remove_unused_columns=False where the network's forward takes no labels"
            )
        if self.criterion.state and "indices" not in inputs and torch.is_grad_enabled():
            raise ValueError(
                f"a batch of {', '.join(inputs)} has no indices, by which a bank knows its rows; give the data a "
                "column indices, and remove_unused_columns=False, without which the Trainer drops it"
            )
        seen = {name: value for name, value in inputs.items() if name not in ("labels", "indices")}
        outputs = model(**seen)
        self.criterion.set_epoch(self.state.epoch or 0.0)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        loss = self.criterion(logits, inputs["labels"], inputs.get("indices"))
        if torch.is_grad_enabled():
            for name, value in self.criterion.terms.items():
                total, num = self._sums.get(name, (0, 0))
                self._sums[name] = total + value, num + 1
        if not isinstance(outputs, dict):
            outputs = (
                loss,
                *outputs,
            )  # where the Trainer looks for the loss of a network that has seen labels
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **choices: Any) -> None:
        """Add the terms of the loss, averaged since they were last logged, to what is said of training."""
        if "loss" in logs and self._sums:
            means = torch.stack([total.float() / num for total, num in self._sums.values()])
            means = self.accelerator.reduce(means, reduction="mean")
            logs.update(zip(self._sums, means.tolist(), strict=True))
            self._sums = {}
        super().log(logs, *args, **choices)


def find_head(model: nn.Module) -> nn.Linear:
    """The last linear layer that has an output for each label."""
    config: Any = getattr(model, "config", None)  # Any: transformers may be missing
    num_labels = getattr(config, "num_labels", None)
    if (
        getattr(config, "problem_type", None) in ("regression", "multi_label_classification")
        or num_labels == 1
    ):
        raise ValueError(
            "NCR compares distributions over classes; it takes problem_type='single_label_classification'"
        )
    heads = [
        each
        for each in model.modules()
        if isinstance(each, nn.Linear) and each.out_features == num_labels
    ]
    if not heads:
        raise ValueError(
            f"{type(model).__name__} has no linear layer with {num_labels} outputs; name one by head="
        )
    return heads[-1]
