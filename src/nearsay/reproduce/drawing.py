"""The figures of the paper, drawn from what finished runs have left."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nearsay import metrics
from nearsay.batch import Labels, Predictions
from nearsay.files import load_sealed
from nearsay.report import figures
from nearsay.report.figures import LABELS, SIMILARITIES, Axis, Drawing, Heading, Panel
from nearsay.report.folders import read_run
from nearsay.report.groups import spread
from nearsay.report.markup import Section, figure
from nearsay.reproduce import ablation
from nearsay.reproduce.cells import Cell, Data, entitled
from nearsay.reproduce.pages import write_page
from nearsay.reproduce.plans import PANELS
from nearsay.reproduce.runs import Runs
from nearsay.training.checkpoints import write_whole
from nearsay.training.run_folder import read_labels

Shares = dict[tuple[str, str], list[float]]  # by kind and half, see Panel

_CONFIDENCE_BINS, _SIMILARITY_BINS = 20, 80
_NUM_PAIRS = 50_000  # of one label, and as many of different ones, in each run
_STAND_IN = (
    "These are runs of small stand-ins, and say nothing of the data that the paper learns from."
)
_CHOSEN = (
    "A ring is the value with the highest mean, of equals the first, which the next panels use."
)
_NOT_CHOSEN = "No value is marked as the best before all of its panel and noise rate are run."
_BARS = "Bars are standard deviations of the sample."
_SHARES = {
    "confidence": "Share of the right and of the wrong training labels, by the confidence of the trained network in "
    "them.",
    "similarity": "Share of pairs of training examples, by the cosine similarity of their features after training: up "
    "from zero those of which both labels are right, down those of which one is wrong or both.",
}


def write_panels(name: str, cells: Sequence[Cell], runs: Runs, out: Path, data: Data) -> list[Path]:
    """Write the figure of confidences or similarities as `name.svg`, `.png` and `.html`; returns their paths."""
    shares = confidence_shares if name == "confidence" else similarity_shares
    columns = {column.title: column for column in PANELS[name].columns}
    panels, drawn, left_out = [], [], []
    for row, column in dict.fromkeys((cell.row, cell.column) for cell in cells):
        finished = runs.finished(cell for cell in cells if (cell.row, cell.column) == (row, column))
        found = [shares(runs.path(cell)) for cell in finished]
        title = columns[column].panel(data)
        if found:
            panels.append(
                Panel(
                    row, title, {kind: _mean([each[kind] for each in found]) for kind in found[0]}
                )
            )
            drawn.append(columns[column])
        else:
            left_out.append(f"{row}, {title}")
    if not panels:
        raise ValueError(
            f"no run of {name} is finished, so there is nothing to draw; choose another only, or none"
        )
    told = [
        _source({each.group: each.stand_in.recipe for each in drawn}, data),
        _told(cells, runs, "panel"),
    ]
    heading = Heading(entitled(PANELS[name].title, data), [_SHARES[name], " ".join(told)])
    if name == "confidence":
        drawing = figures.confidences(panels, heading=heading)
    else:
        lowest, panels = _without_empty_half(panels)
        drawing = figures.similarities(panels, lowest=lowest, heading=heading)
    missing = [f"Not run: {'; '.join(left_out)}."] if left_out else []
    return _write(name, drawing, heading, missing, out, data)


def write_ablation(
    trials: int, cells: Sequence[Cell], runs: Runs, out: Path, data: Data
) -> list[Path]:
    """Write the figure of the ablation as `ablation.svg`, `.png` and `.html`; returns their paths."""
    found = ablation.points(data, trials, runs.validation, runs.is_settled)
    points = []
    for point in found:
        shares = (runs.validation(cell) for cell in runs.finished(point.cells))
        if (spot := spread(100 * share for share in shares if share is not None)) is not None:
            line = f"{100 * point.rate:.0f} % noise"
            points.append(
                figures.Point(
                    point.stage, line, point.value, spot.mean, spot.deviation, point.is_chosen
                )
            )
    if not points:
        raise ValueError(
            "no run of ablation is finished, so there is nothing to draw; choose another only, or none"
        )
    axes = [axis for axis in _axes(data) if any(point.axis == axis.name for point in points)]
    what = "Accuracy after the last epoch on training examples that were held out, by their true labels."
    told = [_source({"CIFAR-10": "toy"}, data), _told(cells, runs, "point")]
    bars = [_BARS] if any(point.deviation is not None for point in points) else []
    heading = Heading(
        entitled(ablation.TITLE, data),
        [
            what,
            _CHOSEN if any(point.is_chosen for point in found) else _NOT_CHOSEN,
            " ".join([*told, *bars]),
        ],
    )
    drawing = figures.curves(
        points, axes, title="accuracy on held-out examples (%)", heading=heading
    )
    more = [
        "The last k is all of the batch (k = m). The paper finds alpha = 0.9 best wherever there is noise, k about 10, "
        "and e = 0 from 40 % noise on; it prints no table of its curves."
    ]
    if data == "toy":
        more.append(
            f"The paper's runs have {ablation.EPOCHS} epochs; e is here at the same shares of a shorter run."
        )
    return _write("ablation", drawing, heading, more, out, data)


def _axes(data: Data) -> list[Axis]:
    epochs = ablation.num_epochs(data)
    return [
        Axis("alpha", ("alpha", "with k = m and e = 0")),
        Axis(
            "k",
            (
                f"k, number of neighbors ({ablation.BATCH}: all, k = m)",
                "with the best alpha and e = 0",
            ),
            is_log=True,
        ),
        Axis("e", (f"e, start of NCR (epochs, of {epochs})", "with the best alpha and k")),
    ]


def confidence_shares(folder: Path) -> Shares:
    """What share in percent of the right and of the wrong labels falls into each bin of confidence."""
    run = read_run(folder)
    is_wrong = run.is_wrong()
    if is_wrong is None:
        raise ValueError(
            f"{folder} does not know which labels are wrong; this figure needs data that does"
        )
    is_known = ~run.trust.isnan()
    return {
        (kind, ""): _percent(
            torch.histc(run.trust[chosen & is_known].float(), _CONFIDENCE_BINS, 0, 1)
        )
        for kind, chosen in zip(LABELS, (~is_wrong, is_wrong), strict=True)
    }


def similarity_shares(folder: Path) -> Shares:
    """What share in percent of each kind of pairs falls into each bin of cosine similarity from −1 to 1."""
    features, labels = _trained_on(folder)
    counts = metrics.similarity_histogram(
        features, labels, bins=_SIMILARITY_BINS, num_pairs=_NUM_PAIRS
    ).counts  # (2, 2, bins)
    return {
        kind: _percent(each) for kind, each in zip(SIMILARITIES, counts.flatten(0, 1), strict=True)
    }


def _trained_on(folder: Path) -> tuple[Tensor, Labels]:
    """Features (n, D) and labels of the examples that were trained on."""
    path = folder / "predictions" / "train.safetensors"
    try:
        tensors = load_sealed(path)
        with np.load(folder / "labels.npz", allow_pickle=False) as arrays:
            rows = torch.isin(tensors["indices"], torch.from_numpy(arrays["train"]))
    except Exception as error:  # what is no such file can raise anything
        raise ValueError(
            f"{path} or labels.npz beside it cannot be used ({error}); train the run again"
        ) from error
    predictions = Predictions(*(tensors[name][rows] for name in Predictions._fields))
    return predictions.features, metrics.aligned(read_labels(folder), predictions)


def _without_empty_half(panels: Sequence[Panel]) -> tuple[float, list[Panel]]:
    """From 0 instead of −1 where no similarity is negative, as after a ReLU."""
    half = _SIMILARITY_BINS // 2
    if any(any(shares[:half]) for panel in panels for shares in panel.shares.values()):
        return -1.0, list(panels)
    return 0.0, [
        panel._replace(shares={kind: shares[half:] for kind, shares in panel.shares.items()})
        for panel in panels
    ]


def _source(stand_ins: dict[str, str], data: Data) -> str:
    """The data sets behind a figure, with what stands in for each."""
    if data != "toy":
        return f"Data: {', '.join(stand_ins)}."
    pairs = (f"{recipe} data for {group}" for group, recipe in stand_ins.items())
    return f"{'Stand-in' if len(stand_ins) == 1 else 'Stand-ins'}: {', '.join(pairs)}."


def _told(cells: Sequence[Cell], runs: Runs, place: str) -> str:
    """How many runs are behind a panel or point, and their seeds."""
    finished = runs.finished(cells)
    counts = sorted(
        set(Counter((cell.recipe, cell.arguments, cell.overrides) for cell in finished).values())
    )
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    seeds = sorted({cell.seed for cell in finished})
    named = ", ".join(map(str, seeds))
    return f"Runs: n = {number} per {place}, {'seed' if len(seeds) == 1 else 'seeds'} {named}."


def _percent(counts: Tensor) -> list[float]:
    """Counts as shares in percent of their sum, all 0 where there are none."""
    shares: list[float] = (100 * counts.double() / counts.sum().clamp(min=1)).tolist()
    return shares


def _mean(shares: Sequence[Sequence[float]]) -> list[float]:
    """Over trials, which count alike."""
    return [sum(each) / len(each) for each in zip(*shares, strict=True)]


def _write(
    name: str, drawing: Drawing, heading: Heading, more: Sequence[str], out: Path, data: Data
) -> list[Path]:
    """The three files; the page says more below the figure than a picture can."""
    out.mkdir(parents=True, exist_ok=True)
    paths = {ending: out / f"{name}.{ending}" for ending in ("png", "svg", "html")}
    write_whole(paths["png"], drawing.png)
    write_whole(paths["svg"], drawing.svg.encode())
    is_toy = data == "toy"
    caption = " ".join([*([_STAND_IN] if is_toy else []), *heading.remarks, *more])
    section = Section(
        "Figure from stand-ins" if is_toy else "Figure",
        figure(drawing.html, caption, label=heading.title),
    )
    write_page(paths["html"], heading.title, [section])
    return list(paths.values())
