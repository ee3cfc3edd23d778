"""Make docs/images/report.png anew: scans of digits in class folders, a training, an audit, and the top of its page.

`python docs/images/make.py FOLDER` in the root of the clone, with the extra `report`, playwright and chromium; FOLDER
is new and keeps the scans and the run. A minute on two CPU cores. Its numbers depend on the machine.
"""

import random
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image, ImageOps
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NUM, WRONG, SIDES = 1400, 0.24, (48, 96)
TRAIN = ("train", "folder", "size=32", "epochs=25", "--set", "backbone.width=16", "--device", "cpu")
WINDOW = {"width": 1200, "height": 1030}
COLORS = 256  # of the picture; fewer lose the orange of the labels that are struck out


def scan(folder: Path) -> None:
    """Digits as gray files of many sizes, PNG and JPEG, a part of them in a wrong class folder."""
    chance, digits = random.Random(0), load_digits()
    for name in NAMES:
        (folder / name).mkdir(parents=True)
    for number, (pixels, label) in enumerate(
        zip(digits.images[:NUM], digits.target[:NUM], strict=True)
    ):
        given = (
            chance.choice([each for each in range(10) if each != label])
            if chance.random() < WRONG
            else label
        )
        image = ImageOps.invert(Image.fromarray((pixels * 255 / 16).astype("uint8")))
        width = chance.randint(*SIDES)
        size = width, round(width * chance.uniform(0.9, 1.1))
        ending = chance.choice(("png", "jpg"))
        image.resize(size, Image.Resampling.BICUBIC).save(
            folder / NAMES[given] / f"scan-{number:04d}.{ending}"
        )


def nearsay(*words: str) -> None:
    """Run a command of nearsay, or end with its message."""
    if subprocess.run([sys.executable, "-m", "nearsay", *words], check=False).returncode:
        sys.exit(f"nearsay {' '.join(words)} failed")


def photograph(page: Path, picture: Path) -> None:
    """The top of a page as a small PNG."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as tool:
        browser = tool.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        tab = browser.new_page(viewport=WINDOW, color_scheme="light")
        tab.goto(page.resolve().as_uri())
        tab.screenshot(path=picture)
        browser.close()
    with Image.open(picture) as image:
        few = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(picture, optimize=True)


def main() -> None:
    """All of it."""
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/images/make.py FOLDER")
    folder = Path(sys.argv[1])
    if folder.exists():
        sys.exit(f"{folder} is there already; name a new folder")
    run = folder / "digits"
    scan(folder / "scans")
    nearsay(*TRAIN, f"path={folder / 'scans'}", "--out", str(run))
    nearsay("audit", str(run))
    photograph(run / "report.html", Path(__file__).with_name("report.png"))


if __name__ == "__main__":
    main()
