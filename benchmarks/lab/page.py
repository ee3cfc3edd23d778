"""Write docs/results.md and benchmarks/records/queue.json from the records of finished runs.

    python benchmarks/lab/page.py           # write both files
    python benchmarks/lab/page.py --check   # write nothing; exit with 65 if a file is outdated

All numbers come from the records. Only the texts of found.md and choices.md are written by hand.
"""

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that `lab` is found when this file is run

from lab import questions
from lab.cells import CHANGED, NOTHING, Numbers, check_doubles, difference, fill, table
from lab.published import CLEANLAB, FIELD, LEAST_DETECTION, PAPER, TARGETS, rows_of
from lab.record import Record, changed_since, check_queued, device_seconds, read_records, unchanged
from lab.run_queue import (
    BY_KEY,
    COLUMNS,
    COLUMNS100,
    DATA_SETS,
    EPOCHS,
    FILE,
    METHODS,
    OWN,
    PLACES,
    Column,
    Protocol,
    Tier,
    Wanted,
    cell,
    queue,
    write_queue,
)
from nearsay.errors import BAD_DATA, exit_code, explain
from nearsay.training.checkpoints import write_whole

RECORDS = Path(__file__).parents[1] / "records"
PAGE = Path(__file__).parents[2] / "docs" / "results.md"
PROBES = "probes"  # a folder beside the records
FOUND, CHOICES = "found.md", "choices.md"  # written by hand, but for the numbers of records
_TIERS: dict[Tier, str] = {
    "A": "short, one seed: five methods under four kinds of noise",
    "B": "paper's length, three seeds: the headline cells",
    "C": "short, one seed: all other cells, and the questions below",
    "D": "short, one seed: CIFAR-100",
}
_PRINTED = "250 epochs in batches of 256, learning rate 0.1 on a cosine"
_LENGTHS: dict[Protocol, str] = {
    "short": (
        "100 epochs instead of 250; warm-up, averaging and the start of NCR beside ELR are shorter "
        "with it. The paper's numbers, some of which are what is to be reached, are after 250"
    ),
    "paper": f"{_PRINTED}, weight decay 5e-4, as the paper prints",
}


def make_page(folder: Path) -> str:
    """The page as Markdown; ValueError if a file of `folder` cannot be used."""
    wanted, records = queue(), read_records(folder)
    for record in records.values():
        check_queued(record, wanted)
    check_doubles(records, folder)
    changed = {name: found for name, record in records.items() if (found := changed_since(record))}
    everything = Numbers(records=records, changed=frozenset(changed))
    blocks = [
        "# Results",
        "Made by `python benchmarks/lab/page.py` from the files in "
        "[benchmarks/records](../benchmarks/records), one for each run, and not to be edited. A "
        'cell without a run reads "not run".',
        *_rules(records),
        *_progress(wanted, records.keys() - changed.keys()),
        "## What was found, and what fell short",
        _written(folder / FOUND, everything),
    ]
    for protocol in EPOCHS:
        numbers = Numbers(records=_of(protocol, records), changed=frozenset(changed))
        blocks += [*_protocol(protocol, numbers, wanted), *questions.variations(numbers, wanted)]
    blocks += [*_probes(folder), *_changed(changed), f"## How `{OWN}` came to be as it is"]
    blocks += [
        "[method.md](method.md#neighborvote) explains the words.",
        _written(folder / CHOICES, everything),
    ]
    return "\n\n".join([*blocks, *_machines(records), *_all_runs(records, wanted)]) + "\n"


def _written(path: Path, numbers: Numbers) -> str:
    try:
        text = path.read_text("utf-8").strip() if path.exists() else "Not written yet."
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read: {error}; write it again as a text in UTF-8"
        ) from error
    try:
        return fill(text, numbers)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _of(protocol: Protocol, records: dict[str, Record]) -> dict[str, Record]:
    return {name: each for name, each in records.items() if each["protocol"] == protocol}


def _rules(records: dict[str, Record]) -> list[str]:
    hardware = sorted({record["hardware"] for record in records.values()})
    where = f"on {' and '.join(hardware)}" if hardware else "of the machine that ran them"
    return [
        "- *The paper* is Iscen et al., Learning with Neighbor Consistency for Noisy Labels, CVPR "
        "2022; [methods.md](methods.md) says what each method is.\n"
        "- AUROC: how often a wrong label is found more suspicious than a right one. AP: average "
        "precision, near 1 if the wrong labels stand before all others.\n"
        "- An accuracy of ours is that of the final epoch on the clean test set, in percent: of "
        "one run, or the mean ± standard deviation (n − 1) over n seeds. Of the tables, only the "
        "lists of runs have the best epoch. For numbers of others, the column *from* names the "
        "epoch where it is known.\n"
        "- All 50 000 images are trained on and none is held out, as the recipe's protocols have "
        "it, except where a setting is chosen; the public ELR code holds out 5 000, and so may "
        "the paper.\n"
        "- Symmetric noise redraws that share of the labels over all classes, so that at 40 % "
        "about 36 % are wrong; asymmetric noise maps 40 % of five classes to similar ones, so "
        "that 20 % are wrong (18.4 % in the public ELR code, which the paper ran and which maps "
        "some back). 10N are the human labels of CIFAR-10N. Noise is drawn once and shared: by "
        "both networks of a pair, and by all methods with the same seed.\n"
        "- On CIFAR-100, asymmetric noise maps 40 % of every class to the next one of its block "
        "of five, as the public ELR code does, so that 40 % are wrong. 100N are the human labels "
        "of CIFAR-100N, of which 40 % are wrong. ELR has the β and λ that its authors use there.\n"
        "- No method knows the noise rate, and each has one setting for all columns, but for "
        "ELR's own β and λ for asymmetric noise. `elr+` and `ncr+elr+` are two PreActResNet-18, "
        "judged by the mean of both; all others are one ResNet-18.\n"
        f"- Minutes are those of a whole run {where}, with compilation, evaluation after each "
        "epoch and predictions; where several shared a device, each second of it is divided among "
        "them, and images/s are marked."
    ]


def _progress(wanted: Sequence[Wanted], done: Set[str]) -> list[str]:
    rows = []
    for tier, title in _TIERS.items():
        mine = [each for each in wanted if each.tier == tier]
        left = [each for each in mine if each.name not in done]
        minutes = sum(each.seconds for each in left) / 60
        rows.append(
            [
                tier,
                title,
                str(len(mine)),
                str(len(mine) - len(left)),
                f"{minutes:.0f}" if left else "0",
            ]
        )
    header = ("tier", "what", "runs", "done", "minutes left, guessed for an H200")
    return [
        "## What is done",
        table(header, rows, num_left=2),
        "`python benchmarks/lab/worker.py run --cifar10 DIR --cifar10n FILE --cifar100 DIR "
        "--cifar100n FILE` runs what is left of [queue.json](../benchmarks/records/queue.json); "
        "started more than once, the processes share the work.",
    ]


def _protocol(protocol: Protocol, numbers: Numbers, wanted: Sequence[Wanted]) -> list[str]:
    """All tables of one protocol."""
    names = {each.name for each in wanted}
    shown = [
        (column, method)
        for column in (*COLUMNS, *COLUMNS100)
        for method in METHODS
        if (each := cell(column, method, protocol=protocol)).name in names or numbers.of(each)
    ]
    methods = [method for method in METHODS if any(method == other for _, other in shown)]
    blocks = [f"## Protocol `{protocol}`", f"{_LENGTHS[protocol]}."]
    has_run = {column.key for column, _ in shown}
    for recipe, data in DATA_SETS.items():
        prefix = "" if recipe == "cifar10" else f"{data.name}, "
        groups = {
            f"{prefix}synthetic noise": data.synthetic,
            f"human labels: {data.human_name}": data.human,
        }
        for title, group in groups.items():
            columns = [column for column in group if column.key in has_run]
            if columns:
                blocks.append(f"### {title[0].upper()}{title[1:]}")
                blocks += [
                    _accuracies(protocol, numbers, methods, columns),
                    _how(protocol, columns),
                ]
    columns, columns100 = (
        [column for column in group if column.key in has_run] for group in (COLUMNS, COLUMNS100)
    )
    blocks += _targets("### How far the targets are", protocol, numbers, methods, columns)
    blocks += _targets(
        "### How far the targets are: CIFAR-100", protocol, numbers, methods, columns100
    )
    blocks += _detection(protocol, numbers, methods, columns)
    blocks += _detection_of_cifar100(protocol, numbers, methods, columns100)
    return [*blocks, *(questions.sections(numbers) if protocol == "short" else [])]


def _accuracies(
    protocol: Protocol, numbers: Numbers, methods: Sequence[str], columns: Sequence[Column]
) -> str:
    rows = []
    for method in methods:
        cells = [cell(column, method, protocol=protocol) for column in columns]
        rows.append([f"`{method}`", "ours", *map(numbers.shown, cells), numbers.minutes(cells)])
    keys = tuple(column.key for column in columns)
    for quoted in rows_of((*PAPER, *FIELD), keys):
        rows.append(
            [quoted.name, quoted.source, *(quoted.texts.get(key, NOTHING) for key in keys), NOTHING]
        )
    header = ("method", "from", *(column.title for column in columns), "min per run")
    return table(header, rows, num_left=2)


def _how(protocol: Protocol, columns: Sequence[Column]) -> str:
    """The command of each row and column."""
    files = " ".join(
        cell(columns[0], "METHOD").words(PLACES)[: len(cell(columns[0], "METHOD").needs()) + 1]
    )
    kinds = "; ".join(f"{column.title}: `{' '.join(column.arguments)}`" for column in columns)
    return (
        f"The command of a row: `nearsay train {files} method=METHOD NOISE protocol={protocol} "
        "seed=SEED --set machine.compile=true`, with the name of the row for METHOD and for "
        f"NOISE, by column, {kinds}."
    )


def _targets(
    title: str,
    protocol: Protocol,
    numbers: Numbers,
    methods: Sequence[str],
    columns: Sequence[Column],
) -> list[str]:
    rows = []
    for method in [each for each in TARGETS if each in methods]:
        wanted = TARGETS[method]
        cells = [cell(column, method, protocol=protocol) for column in columns]
        ours = [numbers.accuracy(each) for each in cells]
        rows += [
            [
                f"`{method}`",
                "to reach",
                *(f"{wanted[column.key]:.1f}" for column in columns),
                NOTHING,
            ],
            ["", "reached", *map(numbers.shown, cells), numbers.minutes(cells)],
            [
                "",
                "difference",
                *(
                    difference(each, wanted[column.key])
                    for column, each in zip(columns, ours, strict=True)
                ),
                "",
            ],
        ]
    header = ("method", "", *(column.title for column in columns), "min per run")
    return [title, table(header, rows, num_left=2)] if rows and columns else []


def _detection(
    protocol: Protocol, numbers: Numbers, methods: Sequence[str], columns: Sequence[Column]
) -> list[str]:
    """How well the confidence in the given label of one run finds the labels that are wrong."""
    keys = [column.key for column in columns if column.key in CLEANLAB]
    if not keys:
        return []
    rows = []
    for method, by in itertools.product(methods, ("detection", "audit")):
        cells = [cell(BY_KEY[key], method, protocol=protocol) for key in keys]
        if by == "audit" and not any(numbers.detection(each, "auroc", by=by) for each in cells):
            continue
        texts = []
        for key, each in zip(keys, cells, strict=True):
            gap = difference(numbers.detection(each, "auroc", by=by), CLEANLAB[key], 3).replace(
                "0.", "."
            )
            auroc, precision = (
                numbers.detected(each, kind, by=by) for kind in ("auroc", "average_precision")
            )
            texts += [auroc, gap, precision]
        name = f"`{method}`" if by == "detection" else f"`{method}`, `nearsay audit`"
        rows.append([name, *texts, numbers.minutes(cells, by=by)])
    for name, numbers_of in (
        ("cleanlab, published", CLEANLAB),
        ("at least wanted", LEAST_DETECTION),
    ):
        quoted = [
            text
            for key in keys
            for text in (f"{numbers_of[key]:.3f}".removeprefix("0"), "", NOTHING)
        ]
        rows.append([name, *quoted, NOTHING])
    titles = [BY_KEY[key].title.removeprefix("10N ") for key in keys]
    heads = [f"{title} {kind}" for title in titles for kind in ("AUROC", "to cleanlab", "AP")]
    return [
        "### Finding the wrong labels of CIFAR-10N",
        "By the confidence of the final network in the given label of each training image, from "
        "one run that trained on these labels; over all images, with the original labels of "
        "CIFAR-10 as the truth. Rows of `nearsay audit` are of the same run, by the score that "
        "the audit makes of its probabilities, neighbors and training; their minutes are of the "
        "run and its audit, where that was timed. Those of cleanlab are of five trainings of a "
        "ResNet-18 that was pretrained on ImageNet, the better of its self-confidence and margin.",
        table(("method", *heads, "min per run"), rows),
    ]


def _detection_of_cifar100(
    protocol: Protocol, numbers: Numbers, methods: Sequence[str], columns: Sequence[Column]
) -> list[str]:
    """AUROC by confidence and by the audit, of what has run."""
    rows = []
    for method, by in itertools.product(methods, ("detection", "audit")):
        cells = [cell(column, method, protocol=protocol) for column in columns]
        if any(numbers.detection(each, "auroc", by=by) for each in cells):
            name = f"`{method}`" if by == "detection" else f"`{method}`, `nearsay audit`"
            texts = [numbers.detected(each, "auroc", by=by) for each in cells]
            rows.append([name, *texts, numbers.minutes(cells, by=by)])
    if not rows:
        return []
    header = ("method", *(column.title for column in columns), "min per run")
    return [
        "### Finding the wrong labels of CIFAR-100",
        "AUROC, by the same two scores.",
        table(header, rows),
    ]


def _probes(folder: Path) -> list[str]:
    """Runs of `probes/`, which choose settings and belong to no table."""
    probes = read_records(folder / PROBES)
    rows = []
    for name, record in probes.items():
        validation, test = record["accuracy"].get("validation"), record["accuracy"]["test"]
        held_out = NOTHING if validation is None else f"{100 * validation['final']:.1f}"
        texts = [held_out, f"{100 * test['final']:.1f}", f"{device_seconds(record) / 60:.1f}"]
        rows.append([f"`{name}`", *texts, record["commit"]])
    if not rows:
        return []
    told = (
        "Runs that choose a setting on held-out examples, one seed each. No table above has them."
    )
    header = ("run", "held out", "test", "min", "commit")
    commands = "\n".join(f"    {each['command']}" for each in probes.values())
    return ["## Probes", told, table(header, rows), commands]


def _changed(changed: dict[str, list[str]]) -> list[str]:
    if not changed:
        return []
    lines = [f"- `{name}`: {'; '.join(found[:5])}" for name, found in changed.items()]
    return [
        "## Settings that have changed since",
        f"Numbers with {CHANGED} are of runs of an earlier recipe; its settings stand first.",
        "\n".join(lines),
    ]


def _machines(records: dict[str, Record]) -> list[str]:
    kinds = Counter(
        (
            each["hardware"],
            each["versions"].get("torch", ""),
            each["versions"].get("python", ""),
            each["commit"],
        )
        for each in records.values()
    )
    if not kinds:
        return ["## Machines and versions", "No run is recorded yet."]
    rows = [[*(text or NOTHING for text in kind), str(num)] for kind, num in sorted(kinds.items())]
    header = ("hardware", "torch", "Python", "commit of nearsay", "runs")
    return ["## Machines and versions", table(header, rows, num_left=4)]


def _all_runs(records: dict[str, Record], wanted: Sequence[Wanted]) -> list[str]:
    """Every run that is recorded, those of the queue first."""
    order = {each.name: place for place, each in enumerate(wanted)}
    blocks = ["## All runs"]
    for protocol in EPOCHS:
        mine = sorted(
            _of(protocol, records).values(),
            key=lambda each: (order.get(each["name"], len(order)), each["name"]),
        )
        if not mine:
            continue
        header = (
            "run",
            "final",
            "best",
            "last 10",
            "held out",
            "AUROC",
            "AP",
            "wrong labels",
            "min",
            "images/s",
            "GiB",
        )
        blocks += [
            f"### Protocol `{protocol}`, run by run",
            table((*header, "commit"), map(_run, mine)),
        ]
        blocks += ["\n".join(f"    {each['command']}" for each in mine)]
    if len(blocks) == 1:
        return [*blocks, "No run is recorded yet."]
    told = (
        "Accuracies on the test set after the final epoch, after the best one and in the mean of "
        "the last ten, that on held-out examples; AUROC and AP of the confidence in the given "
        "labels; the share of labels that are wrong; memory of the device at most. The command of "
        "each run stands below its table, in the same order."
    )
    return [blocks[0], told, *blocks[1:]]


def _run(record: Record) -> list[str]:
    test, held_out = record["accuracy"]["test"], record["accuracy"].get("validation")
    found, rate = record["detection"] or {}, record["labels"].get("effective_rate")
    return [
        f"`{record['name']}`",
        *(f"{100 * test[kind]:.2f}" for kind in ("final", "best", "last_10")),
        NOTHING if held_out is None else f"{100 * held_out['final']:.2f}",
        *(
            NOTHING if found.get(kind) is None else f"{found[kind]:.3f}".removeprefix("0")
            for kind in ("auroc", "average_precision")
        ),
        NOTHING if rate is None else f"{100 * rate:.1f} %",
        f"{device_seconds(record) / 60:.1f}",
        _speed(record),
        f"{record['peak_memory_bytes'] / 2**30:.1f}",
        record["commit"] or NOTHING,
    ]


def _speed(record: Record) -> str:
    number = f"{record['images_per_second']:,.0f}".replace(",", " ")
    return f"{number} shared" if "device_seconds" in record else number


def write_results(folder: Path, page: Path) -> list[Path]:
    """Write the page of the records in `folder`, and the queue; returns the files that changed."""
    stale = _stale(folder, page)
    for path, content in stale.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    return list(stale)


def stale_files(folder: Path, page: Path) -> list[Path]:
    """The files that are outdated; ValueError if `folder` holds no record."""
    return list(_stale(folder, page))


def _stale(folder: Path, page: Path) -> dict[Path, bytes]:
    """The new content of the files that differ."""
    if not any(folder.glob("*.json")):  # an empty page must not replace the page that is there
        raise ValueError(
            f"{folder} holds no record of a run. Give the folder that `worker.py take` writes into."
        )
    contents = {
        page: make_page(folder),
        folder / FILE: write_queue(queue(), unchanged(read_records(folder))),
    }
    wanted = {path: text.encode() for path, text in contents.items()}
    return {
        path: content
        for path, content in wanted.items()
        if not path.is_file() or path.read_bytes() != content
    }


def main(words: Sequence[str] | None = None) -> int:
    """Write or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help="folder with a file for each run"
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is not up to date"
    )
    arguments = parser.parse_args(words)
    try:
        act = stale_files if arguments.check else write_results
        changed = act(arguments.records, arguments.out)
    except (OSError, ValueError) as error:
        print(f"error: {explain(error, exit_code(error))}", file=sys.stderr)
        return exit_code(error)
    told = " and ".join(map(str, changed))
    if arguments.check and changed:
        print(f"{told} must be written again. Run python benchmarks/lab/page.py.")
        return BAD_DATA
    print(f"Wrote {told}." if changed else f"{arguments.out} is up to date.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
