"""How fast training runs: images per second against the practical floor, against itself without NCR, and a usual loop.

One process, interleaved windows. The floor is the time that cuDNN needs for the convolutions of the network alone, one
after another, plus the time to move the bytes that normalization and ReLU must read and write at the speed of a copy.
The usual loop is shaped as the public code of ELR: torchvision's transforms in 8 workers (Pillow alone where there is
no torchvision), float32 with torch's defaults (TF32 convolutions, no search for algorithms), a table on the device
indexed by lists of the host, nine numbers brought to the host in every step and the images of some. It is run twice:
with our batch, and with ELR's own of 128.
"""

import argparse
import json
import statistics
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn

from nearsay.batch import Labels, Split
from nearsay.data.loader import Order, Rows
from nearsay.errors import first_line
from nearsay.experiment import Experiment
from nearsay.losses import NCR, CrossEntropy
from nearsay.models import ResNet
from nearsay.optim import SGD, Cosine
from nearsay.training.step import Setting, Step, make_learners
from nearsay.transforms import CIFAR10_COLORS, Augment, Flip, PadCrop


@dataclass(frozen=True, kw_only=True)
class Random:
    """Images of CIFAR's shape with nothing on them."""

    num: int = 50_000

    def open(self, split):
        """All of them."""
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(
            0, 256, (self.num, 3, 32, 32), dtype=torch.uint8, generator=generator
        )
        labels = torch.randint(0, 10, (self.num,), generator=generator)
        return Split(images, Labels(labels, labels, tuple("abcdefghij")))


class Ours:
    """An experiment, ready to make steps."""

    def __init__(self, experiment, device, *, captures, compiles):
        images, labels = experiment.data.open("train")
        self.device, self.phase = device, experiment.objective.phase(0.0, {})
        learners = make_learners(experiment, len(images), 10, images[0], device)
        self.order = Order(torch.arange(len(images)), batch_size=experiment.batch_size, seed=0)
        self.order.to(device)
        setting = Setting(
            source=images.to(device),
            given=(labels.given.to(device),) * experiment.networks,
            label_weights=torch.ones(10, device=device),
            batches_per_epoch=self.order.batches_per_pass,
            batches_per_pass=self.order.batches_per_pass,
            is_cut=False,
            device=device,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            captures=captures,
            compiles=compiles,
        )
        self.step = Step(experiment, setting, learners)
        self.done = 0

    def run(self, num_steps):
        """Seconds for so many steps."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(num_steps):
            self.step(Rows(self.order.batch(self.done), None), self.phase)
            self.done += 1
        assert self.step.is_fine.item()
        return time.perf_counter() - start


class Usual(torch.utils.data.Dataset):
    """Images as Pillow has them, cropped, flipped and normalized in a worker."""

    def __init__(self, images, labels):
        self.images, self.labels = images.permute(0, 2, 3, 1).numpy(), labels
        self.transform = usual_transforms() or by_pillow

    def __len__(self):
        """As many as there are."""
        return len(self.images)

    def __getitem__(self, index):
        """One of them, augmented."""
        return self.transform(Image.fromarray(self.images[index])), self.labels[index], index


def usual_transforms():
    """What the public code does to an image, or None where torchvision cannot be had."""
    try:
        from torchvision import transforms  # noqa: PLC0415  # an extra, and slow to import
    except (
        ImportError,
        RuntimeError,
    ):  # a torchvision that does not fit this torch raises the latter
        return None
    return transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(CIFAR10_COLORS.mean, CIFAR10_COLORS.std),
        ]
    )


def by_pillow(image):
    """The same with Pillow and numpy."""
    left, top = np.random.randint(0, 9, 2)
    image = ImageOps.expand(image, 4).crop((left, top, left + 32, top + 32))
    if np.random.rand() < 0.5:
        image = ImageOps.mirror(image)
    values = torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255)
    mean, std = (
        torch.tensor(part).view(3, 1, 1) for part in (CIFAR10_COLORS.mean, CIFAR10_COLORS.std)
    )
    return (values - mean) / std


def usual_loop(experiment, device, num_steps, workers, size):
    """Images per second of the usual loop with cross-entropy."""
    images, labels = experiment.data.open("train")
    network = experiment.backbone.build(10, num_inputs=3).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    loader = torch.utils.data.DataLoader(
        Usual(images, labels.given),
        size,
        shuffle=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
    )
    targets, done, start = torch.zeros(len(images), 10, device=device), 0, 0.0
    # Steps before the clock starts.
    warm = 10 if device.type == "cuda" else 1
    for inputs, given, indices in loader:
        if done == warm:
            wait(device)
            start = time.perf_counter()
        inputs, given, who = inputs.to(device), given.to(device), indices.tolist()
        logits = network(inputs).logits
        beliefs = logits.softmax(1).clamp(1e-4, 1 - 1e-4)
        fresh = beliefs.detach()
        targets[who] = 0.7 * targets[who] + 0.3 * fresh / fresh.sum(1, keepdim=True)
        regularizer = (1 - (targets[who] * beliefs).sum(1)).log().mean()
        loss = nn.functional.cross_entropy(logits, given) + 3 * regularizer
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for _ in range(3):
            loss.item()
        ranked = logits.topk(5).indices
        for place in (0, 0, 1, 2, 3, 4):
            (ranked[:, place] == given).sum().item()
        # A picture of the batch for the log.
        if done % int(size**0.5) == 0:
            shown = inputs.cpu()
            shown = (shown - shown.min()) / (shown.max() - shown.min())
        done += 1
        if done == num_steps + warm:
            break
    wait(device)
    return (done - warm) * size / (time.perf_counter() - start)


def floor(experiment, device, repeats):
    """Images per second if only convolutions and the bytes of normalization took time."""
    network = experiment.backbone.build(10, num_inputs=3).to(
        device, memory_format=torch.channels_last
    )
    size, dtype = experiment.batch_size, torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes, traffic = [], [0]

    def note(module, inputs, output):
        if isinstance(module, nn.Conv2d):
            shapes.append((module, tuple(inputs[0].shape), tuple(output.shape)))
        else:  # forward reads twice and writes once; backward reads two twice and writes one
            traffic[0] += 8 * output.numel() * dtype.itemsize

    handles = [
        module.register_forward_hook(note)
        for module in network.modules()
        if isinstance(module, nn.Conv2d | nn.BatchNorm2d)
    ]
    with torch.no_grad():
        network(
            torch.zeros(size, 3, 32, 32, device=device).contiguous(
                memory_format=torch.channels_last
            )
        )
    for handle in handles:
        handle.remove()
    seconds = sum(time_convolution(*shape, device, dtype, repeats) for shape in shapes)
    seconds += traffic[0] / bandwidth(device, repeats)
    return size / seconds


def time_convolution(module, before, after, device, dtype, repeats):
    """Seconds for forward and backward of one convolution."""
    inputs = torch.randn(before, device=device, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )
    slope = torch.randn(after, device=device, dtype=dtype).contiguous(
        memory_format=torch.channels_last
    )
    weight = module.weight.detach().to(dtype).contiguous(memory_format=torch.channels_last)
    # The images want no gradient.
    needs_inputs = before[1] != 3

    def work():
        args = (module.stride, module.padding, module.dilation, False, [0, 0], 1)
        torch.ops.aten.convolution(inputs, weight, None, *args)
        torch.ops.aten.convolution_backward(
            slope, inputs, weight, None, *args, [needs_inputs, True, False]
        )

    return timed(work, device, repeats)


def bandwidth(device, repeats):
    """Bytes per second of a large copy, reading and writing counted."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source), device, repeats)


def timed(work, device, repeats):
    """Seconds of one call; on a GPU replayed from a graph, so that launching costs nothing."""
    if device.type != "cuda":
        work()
        return min(_seconds(work, device) for _ in range(repeats))
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            work()
    return min(_seconds(graph.replay, device) for _ in range(repeats)) / 10


def _seconds(work, device):
    wait(device)
    start = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - start


def wait(device):
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def kinds(*, is_cuda, compiles):
    """The ways to make a step, by name: on a CPU there is the plain one alone."""
    found = {"eager": {"captures": False, "compiles": False}}
    if is_cuda:
        found["graph"] = {"captures": True, "compiles": False}
    if is_cuda and compiles:
        found["graph and compile"] = {"captures": True, "compiles": True}
    return found


def commit():
    """The commit of the code, where there is one; not that of the folder in which the command was given."""
    words, here = ["git", "rev-parse", "--short", "HEAD"], Path(__file__).parent
    with suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(
            words, capture_output=True, text=True, check=True, cwd=here
        ).stdout.strip()
    return ""


def main():
    """Print the table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=64, help="of the ResNet-18")
    parser.add_argument("--steps", type=int, default=150, help="in a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8, help="of the usual loop")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for name, least in {"batch": 4, "width": 1, "steps": 1, "windows": 1, "workers": 0}.items():
        if getattr(arguments, name) < least:
            parser.error(f"--{name} {getattr(arguments, name)} must be at least {least}")
    try:
        device = torch.zeros(1, device=arguments.device).device
    except (AssertionError, RuntimeError) as error:  # torch built without CUDA says the former
        parser.error(
            f"--device {arguments.device} cannot be used here ({first_line(error)}); take cpu"
        )
    if arguments.out:
        # Before anything is measured.
        try:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--out {arguments.out} cannot be written ({error.strerror})")
    is_cuda = device.type == "cuda"
    torch.backends.cudnn.benchmark = is_cuda
    experiment = Experiment(
        data=Random(num=50_000 if is_cuda else 4 * arguments.batch),
        backbone=ResNet(width=arguments.width),
        objective=CrossEntropy(),
        augment=Augment(transforms=(PadCrop(), Flip())),
        normalize=CIFAR10_COLORS,
        optimizer=SGD(lr=0.01),
        schedule=Cosine(warmup=0),
        batch_size=arguments.batch,
    )
    methods = {"cross-entropy": CrossEntropy(), "NCR": NCR(alpha=0.9, k=10)}
    best = floor(experiment, device, 5)
    print(f"practical floor           {best:9.0f} images/s", flush=True)
    result = {
        "hardware": torch.cuda.get_device_name(device) if is_cuda else "CPU, one process",
        "torch": torch.__version__,
        "commit": commit(),
        "batch": arguments.batch,
        "network": f"ResNet-18, width {arguments.width}, 32×32",
        "floor": round(best),
        "rows": [],
    }
    for kind, choices in kinds(is_cuda=is_cuda, compiles=not arguments.no_compile).items():
        ours = {
            name: Ours(replace(experiment, objective=each), device, **choices)
            for name, each in methods.items()
        }
        begin = time.perf_counter()
        for each in ours.values():
            each.run(min(12, arguments.steps))
        start_up = time.perf_counter() - begin
        windows = {name: [] for name in ours}
        for _ in range(arguments.windows):
            for name, each in ours.items():
                windows[name].append(arguments.steps * arguments.batch / each.run(arguments.steps))
        slower = [
            plain / ncr - 1
            for plain, ncr in zip(windows["cross-entropy"], windows["NCR"], strict=True)
        ]
        row = {
            "kind": kind,
            "start_up_seconds": round(start_up, 1),
            "images_per_second": {
                name: round(statistics.median(each)) for name, each in windows.items()
            },
            "spread": {
                name: [round(min(each)), round(max(each))] for name, each in windows.items()
            },
            "ncr_slower": round(statistics.median(slower), 4),
            "ncr_slower_spread": [round(min(slower), 4), round(max(slower), 4)],
            "of_floor": round(statistics.median(windows["NCR"]) / best, 3),
        }
        result["rows"].append(row)
        for name, each in windows.items():
            print(
                f"{kind:18s} {name:14s} {statistics.median(each):9.0f} images/s ({min(each):.0f} to {max(each):.0f}), "
                f"{statistics.median(each) / best:.2f} of the floor",
                flush=True,
            )
        print(f"{kind:18s} NCR takes {100 * row['ncr_slower']:+.1f} % more time", flush=True)
        del ours
    torch.backends.cudnn.benchmark = False
    fastest = max(row["images_per_second"]["NCR"] for row in result["rows"])
    result["usual_loop"] = []
    for size in (arguments.batch, arguments.batch // 2):
        usual = usual_loop(experiment, device, arguments.steps, arguments.workers, size)
        times = round(fastest / usual, 2)
        result["usual_loop"].append(
            {"batch": size, "images_per_second": round(usual), "ours_is_faster": times}
        )
        print(
            f"usual loop, batch {size:4d}     {usual:9.0f} images/s; ours with NCR is {times} times as fast",
            flush=True,
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"Wrote {arguments.out}")


if __name__ == "__main__":
    main()
