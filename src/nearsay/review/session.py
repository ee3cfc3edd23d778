"""The state of a review, without a network: the labels to show and the decisions about them."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from nearsay.label_issues.corrections import COUNTING, Corrections, Entry
from nearsay.review.examples import Examples, Pictures

# A client that got no answer sends its decision again, so the latest answers are kept.
_KEPT_ANSWERS = 1000
_LONGEST_KEY = 100


class Refused(ValueError):
    """A request for a decision is not valid."""


class Conflict(RuntimeError):
    """Another client has decided about this example meanwhile; `standing` holds the result."""

    def __init__(self, message: str, standing: dict[str, Any]) -> None:
        super().__init__(message)
        self.standing = standing


class Tally(NamedTuple):
    """How many labels were decided."""

    now: int  # in this session
    total: int  # in all sessions
    path: Path  # the file of the decisions


class Session:
    """Answers the requests of the page with JSON values; threads may share a session."""

    def __init__(
        self,
        examples: Examples,
        corrections: Corrections,
        pictures: Pictures,
        *,
        name: str,
        notes: Sequence[str] = (),
        extra: Mapping[str, Sequence[str | None]] | None = None,
        limit: int | None = None,
    ) -> None:
        self.examples, self.corrections, self.pictures = examples, corrections, pictures
        self.name, self.notes = name, tuple(notes)
        self.details = {**examples.details, **(extra or {})}
        self._lock = threading.Lock()
        # The decisions of each example that count, the latest last.
        self._stacks: dict[int, list[Entry]] = {}
        self._skipped: set[int] = set()
        self._revisions: dict[int, int] = {}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        # The examples of this session in the order of their decisions.
        self._session: list[int] = []
        for entry in corrections.entries:
            self._fold(entry)
        order = examples.order()
        shown = order if limit is None else order[:limit]
        # Decided examples are shown even beyond the limit.
        decided = [index for index in order[len(shown) :] if index in self._revisions]
        self.order = [*shown, *decided]

    def state(self) -> dict[str, Any]:
        """All that the list of examples needs, in columns in the order of the review."""
        examples, order = self.examples, self.order
        with self._lock:
            return {
                "run": self.name,
                "corrections": str(self.corrections.path),
                "classes": list(examples.classes),
                "notes": list(self.notes),
                "has_pictures": self.pictures.inputs is not None,
                "num_examples": len(examples),
                "index": order,
                "given": [examples.given[index] for index in order],
                "suggested": [examples.suggested[index] for index in order],
                "score": [examples.scores[index] for index in order],
                "is_issue": [examples.is_issue[index] for index in order],
                "is_unreadable": [examples.statuses[index] == "unreadable" for index in order],
                "standings": [self._standing(index) for index in self._revisions],
                "session": list(self._session),
                "version": len(self.corrections.entries),
            }

    def example(self, index: int) -> dict[str, Any]:
        """All details of one example; KeyError if there is no such number."""
        examples = self.examples
        if not 0 <= index < len(examples):
            raise KeyError(index)
        details = {name: cells[index] for name, cells in self.details.items()}
        return {
            "index": index,
            "given": examples.given[index],
            "suggested": examples.suggested[index],
            "probability": examples.probabilities[index],
            "score": examples.scores[index],
            "is_issue": examples.is_issue[index],
            "status": examples.statuses[index],
            "path": examples.paths[index],
            "details": {name: cell for name, cell in details.items() if cell is not None},
            "neighbors": [asdict(near) for near in examples.neighbors(index)],
        }

    def changes(self, since: int) -> dict[str, Any]:
        """The examples that any client decided about after version `since`."""
        with self._lock:
            entries = self.corrections.entries
            changed = dict.fromkeys(entry.index for entry in entries[max(since, 0) :])
            standings = [self._standing(index) for index in changed]
            return {"version": len(entries), "standings": standings}

    def decide(self, request: object) -> dict[str, Any]:
        """Store a decision and return the new standing; the same request again changes nothing.

        A request has `key`, which identifies it; `index`; `decision`; `label`, a class number, if
        the decision is "other"; and `seen`, the revision of the example that the client knows.
        Raises Refused, Conflict, or an error of `Corrections.append`; then nothing is stored.
        """
        if not isinstance(request, dict):
            raise Refused(f"a decision must be an object, got {str(request)[:40]!r}")
        key = request.get("key")
        if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY:
            raise Refused(f"key must have 1 to {_LONGEST_KEY} characters, got {str(key)[:40]!r}")
        with self._lock:
            if key in self._answers:
                return self._answers[key]
            index, seen = (_whole_number(request, name) for name in ("index", "seen"))
            if index >= len(self.examples):
                raise Refused(f"index must be below {len(self.examples)}, got {index}")
            if seen != self._revisions.get(index, 0):
                standing = self._standing(index)
                raise Conflict("another window has decided about this example", standing)
            self._apply(index, request.get("decision"), request.get("label"))
            answer = {**self._standing(index), "version": len(self.corrections.entries)}
            self._answers[key] = answer
            if len(self._answers) > _KEPT_ANSWERS:
                self._answers.popitem(last=False)
            return answer

    def tally(self) -> Tally:
        """How many labels are decided now."""
        with self._lock:
            now = {index for index in self._session if self._stacks.get(index)}
            return Tally(len(now), sum(map(bool, self._stacks.values())), self.corrections.path)

    def _apply(self, index: int, decision: object, label: object) -> None:
        stack = self._stacks.get(index, [])
        if decision == "undo":
            self._undo(index, stack)
            return
        entry = self._entry(index, decision, label)
        # Skipping changes no decision, so there is nothing to store and nothing to undo.
        if entry.decision == "skip" and stack:
            return
        self.corrections.append(entry)
        self._fold(entry)
        self._session.append(index)

    def _entry(self, index: int, decision: object, label: object) -> Entry:
        given, suggested = self.examples.given[index], self.examples.suggested[index]
        if decision == "other":
            num_classes = len(self.examples.classes)
            is_number = isinstance(label, int) and not isinstance(label, bool)
            if not is_number or label not in range(num_classes):
                raise Refused(
                    f"label must be a class number below {num_classes}, got {str(label)[:40]!r}"
                )
            number = cast(int, label)
            if number == given:
                return Entry(index, number, "keep")
            return Entry(index, number, "accept" if number == suggested else "other")
        labels = {"accept": suggested, "keep": given, "drop": -1, "skip": given}
        if not isinstance(decision, str) or decision not in labels:
            choices = ", ".join(labels)
            raise Refused(f"decision must be {choices}, other or undo, got {str(decision)[:40]!r}")
        if decision == "accept" and suggested < 0:
            raise Refused(f"example {index} has no suggestion to accept. Choose a label.")
        return Entry(index, labels[decision], decision)

    def _undo(self, index: int, stack: list[Entry]) -> None:
        """Return to the decision before the last one, or to none."""
        if not stack and index not in self._skipped:
            raise Refused(f"example {index} has no decision, so there is nothing to undo")
        # A row "undo" cancels every row of the example, so the older decisions are written again.
        entries = [Entry(index, self.examples.given[index], "undo"), *stack[:-1]]
        self.corrections.append(*entries)
        for entry in entries:
            self._fold(entry)
        if index in self._session:
            last = len(self._session) - 1 - self._session[::-1].index(index)
            del self._session[last]

    def _fold(self, entry: Entry) -> None:
        """Update the state of an example by one row of the file."""
        index = entry.index
        self._revisions[index] = self._revisions.get(index, 0) + 1
        if entry.decision in COUNTING:
            self._stacks.setdefault(index, []).append(entry)
            self._skipped.discard(index)
        elif entry.decision == "undo":
            self._stacks.pop(index, None)
            self._skipped.discard(index)
        elif not self._stacks.get(index):
            self._skipped.add(index)

    def _standing(self, index: int) -> dict[str, Any]:
        """The present decision about an example; "" for none."""
        decision, label = "", self.examples.given[index]
        if stack := self._stacks.get(index):
            decision, label = stack[-1].decision, stack[-1].label
        elif index in self._skipped:
            decision = "skip"
        revision = self._revisions.get(index, 0)
        return {"index": index, "decision": decision, "label": label, "revision": revision}


def _whole_number(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Refused(f"{name} must be a whole number from 0, got {str(value)[:40]!r}")
    return value
