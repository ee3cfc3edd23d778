"""The work itself, without a network: which labels are to be looked at, what is known of each, and what was decided."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from nearsay.label_issues.corrections import COUNTING, Corrections, Entry
from nearsay.review.examples import Examples
from nearsay.review.pictures import Pictures

_KEPT_ANSWERS = 1000  # of decisions that a client may send again, not knowing whether they arrived
_LONGEST_KEY = 100


class Refused(ValueError):
    """A decision that cannot be meant."""


class Conflict(RuntimeError):
    """Somebody else has decided about this example since the client looked; `standing` is what."""

    def __init__(self, message: str, standing: dict[str, Any]) -> None:
        super().__init__(message)
        self.standing = standing


class Tally(NamedTuple):
    """How much was decided."""

    now: int  # labels that were decided in this session
    total: int  # with those of earlier sessions
    path: Path  # where they are


class Desk:
    """What a page can ask for; every answer is a value of JSON, whose type is Any. Threads may share it."""

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
        self._stacks: dict[int, list[Entry]] = {}  # what counted, the last on top
        self._skipped: set[int] = set()
        self._revisions: dict[int, int] = {}
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._session: list[
            int
        ] = []  # examples in the order in which they were decided about in this session
        for entry in corrections.entries:
            self._fold(entry)
        order = examples.order()
        shown = order if limit is None else order[:limit]
        self.order = [*shown, *(index for index in order[len(shown) :] if index in self._revisions)]

    def state(self) -> dict[str, Any]:
        """All that the list of examples needs, in columns that follow the order of looking."""
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
        """What is known of one example; KeyError if there is none of that number."""
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
        """What was decided about since then, by whomever."""
        with self._lock:
            entries = self.corrections.entries
            changed = dict.fromkeys(entry.index for entry in entries[max(since, 0) :])
            return {
                "version": len(entries),
                "standings": [self._standing(index) for index in changed],
            }

    def decide(self, asked: object) -> dict[str, Any]:
        """Write a decision down and return how the example stands; the same request again changes nothing.

        A request has `key`, which names it; `index`; `decision`; `label`, a number, where the decision is other; and
        `seen`, the revision of the example that the client had before it. Raises Refused, Conflict, or what
        `Corrections.append` raises; then nothing was written.
        """
        if not isinstance(asked, dict):
            raise Refused(f"{str(asked)[:40]!r} is no decision; send an object")
        key = asked.get("key")
        if not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY:
            raise Refused(f"key={str(key)[:40]!r} must be a text of 1 to {_LONGEST_KEY} characters")
        with self._lock:
            if key in self._answers:
                return self._answers[key]
            index, seen = (self._number(asked, name) for name in ("index", "seen"))
            if index >= len(self.examples):
                raise Refused(f"index={index} is none of the {len(self.examples)} examples")
            if seen != self._revisions.get(index, 0):
                raise Conflict(
                    "another window has decided about this example", self._standing(index)
                )
            self._apply(index, asked.get("decision"), asked.get("label"))
            answer = {**self._standing(index), "version": len(self.corrections.entries)}
            self._answers[key] = answer
            if len(self._answers) > _KEPT_ANSWERS:
                self._answers.popitem(last=False)
            return answer

    def tally(self) -> Tally:
        """How much was decided until now."""
        with self._lock:
            now = {index for index in self._session if self._stacks.get(index)}
            return Tally(len(now), sum(map(bool, self._stacks.values())), self.corrections.path)

    def _apply(self, index: int, decision: object, label: object) -> None:
        given, suggested = self.examples.given[index], self.examples.suggested[index]
        stack = self._stacks.get(index, [])
        if decision == "undo":
            self._undo(index, stack)
            return
        if decision == "accept" and suggested < 0:
            raise Refused(f"example {index} has no suggestion to accept; choose a label")
        if decision == "other":
            if (
                isinstance(label, bool)
                or not isinstance(label, int)
                or not 0 <= label < len(self.examples.classes)
            ):
                raise Refused(
                    f"label={str(label)[:40]!r} must be a number below {len(self.examples.classes)}"
                )
            decision = "keep" if label == given else "accept" if label == suggested else "other"
        else:
            chosen = {"accept": suggested, "keep": given, "drop": -1, "skip": given}
            if not isinstance(decision, str) or decision not in chosen:
                raise Refused(
                    f"decision={str(decision)[:40]!r} must be accept, keep, other, drop, skip or undo"
                )
            label = chosen[decision]
            if decision == "skip" and stack:
                return  # what was decided stands, so that there is nothing to write, and nothing to undo
        entry = Entry(index, label, decision)
        self.corrections.append(entry)
        self._fold(entry)
        self._session.append(index)

    def _undo(self, index: int, stack: list[Entry]) -> None:
        """Go back to what counted before, or to nothing; the file takes all back, and says again what is left."""
        if not stack and index not in self._skipped:
            raise Refused(f"nothing is decided about example {index}, so there is nothing to undo")
        entries = [Entry(index, self.examples.given[index], "undo"), *stack[:-1]]
        self.corrections.append(*entries)
        for entry in entries:
            self._fold(entry)
        if index in self._session:
            del self._session[len(self._session) - 1 - self._session[::-1].index(index)]

    def _fold(self, entry: Entry) -> None:
        """What a row of the file means to its example."""
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
        """How an example stands: a decision that counts, skip, or none."""
        stack = self._stacks.get(index)
        decision = stack[-1].decision if stack else "skip" if index in self._skipped else ""
        label = stack[-1].label if stack else self.examples.given[index]
        return {
            "index": index,
            "decision": decision,
            "label": label,
            "revision": self._revisions.get(index, 0),
        }

    @staticmethod
    def _number(asked: Mapping[str, Any], name: str) -> int:
        value = asked.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise Refused(f"{name}={str(value)[:40]!r} must be a whole number from 0")
        return value
