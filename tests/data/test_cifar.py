"""Stand-ins with the exact layout of the originals, written here; the real files have other
contents and other md5.
"""

import gzip
import hashlib
import http.server
import io
import os
import pickle
import re
import struct
import tarfile
import threading
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from nearsay.data import cifar
from nearsay.data.cifar import ORIGINALS, Cifar10, Cifar100, fetch
from nearsay.errors import NoSplit


def python2(value):
    """What cPickle of Python 2 writes at protocol 2, without the memo."""
    if isinstance(value, dict):
        return b"}(" + b"".join(python2(key) + python2(item) for key, item in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(python2, value)) + b"e"
    if isinstance(value, str):
        return b"U" + bytes([len(value)]) + value.encode()
    if isinstance(value, int):
        return b"K" + bytes([value]) if 0 <= value < 256 else b"J" + struct.pack("<i", value)
    return array_opcodes(value.shape, value.tobytes(), str(value.dtype.str))


def array_opcodes(shape, content, kind, fortran=b"\x89"):
    sides = b"".join(b"J" + struct.pack("<i", side) for side in shape)
    sides += b"\x86" if len(shape) == 2 else b"\x85"
    made = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\1b\x87R"
    kinds = b"cnumpy\ndtype\nU\2" + kind[1:].encode() + b"K\0K\1\x87R(K\3U\1" + kind[:1].encode()
    kinds += b"NNN" + 2 * (b"J" + struct.pack("<i", -1)) + b"K\0tb"
    data = fortran + b"T" + struct.pack("<i", len(content)) + content
    return made + b"(K\1" + sides + kinds + data + b"tb"


def written(value):
    return b"\x80\2" + python2(value) + b"."


class StandIn:
    """A small copy of a data set as published: a folder whose md5 are those that the loader
    expects.
    """

    def __init__(self, name, root, monkeypatch):
        self.name, self.monkeypatch, original = name, monkeypatch, ORIGINALS[name]
        self.folder = root / original.folder
        self.folder.mkdir(parents=True)
        is_ten = name == "cifar10"
        self.num_classes, kind = (10, "") if is_ten else (100, "fine_")
        draw = np.random.default_rng(7)
        self.pixels, self.labels = {}, {}
        for split, files in original.splits.items():
            num = 4 * len(files)
            self.pixels[split] = draw.integers(0, 256, (num, 3, 32, 32), dtype=np.uint8)
            self.labels[split] = draw.integers(0, self.num_classes, num).tolist()
            for part, file in enumerate(files):
                rows = slice(4 * part, 4 * part + 4)
                record = {"batch_label": f"part {part}", f"{kind}labels": self.labels[split][rows]}
                record["data"] = self.pixels[split][rows].reshape(4, 3072)
                record["filenames"] = ["one.png", "two.png", "three.png", "four.png"]
                self.write(file, written(record))
        title = "kind" if is_ten else "fine kind"
        self.classes = tuple(f"{title} {number}" for number in range(self.num_classes))
        meta = {"num_vis": 3072, f"{kind}label_names": list(self.classes)}
        self.write(
            original.meta, written(meta | ({} if is_ten else {"coarse_label_names": ["no"]}))
        )

    def write(self, file, content):
        (self.folder / file).write_bytes(content)
        self.change(md5=ORIGINALS[self.name].md5 | {file: hashlib.md5(content).hexdigest()})

    def change(self, **fields):
        self.monkeypatch.setitem(ORIGINALS, self.name, ORIGINALS[self.name]._replace(**fields))

    def open(self, split="train", **fields):
        kind = Cifar10 if self.name == "cifar10" else Cifar100
        return kind(path=self.folder, **fields).open(split)


@pytest.fixture(params=["cifar10", "cifar100"])
def data(request, tmp_path, monkeypatch):
    return StandIn(request.param, tmp_path / "data", monkeypatch)


@pytest.fixture
def ten(tmp_path, monkeypatch):
    return StandIn("cifar10", tmp_path / "data", monkeypatch)


def refusal(call, *arguments, kind=ValueError, **fields):
    with pytest.raises(kind) as caught:
        call(*arguments, **fields)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 700
    return text


def test_images_labels_and_classes_come_out_in_order(data):
    for split in ("train", "test"):
        inputs, labels = data.open(split)
        assert inputs.dtype == torch.uint8
        assert inputs.is_contiguous()
        assert torch.equal(inputs, torch.from_numpy(data.pixels[split]))
        assert labels.given.tolist() == labels.clean.tolist() == data.labels[split]
        assert labels.given is not labels.clean
        assert labels.classes == data.classes


def test_the_path_may_be_the_folder_or_the_one_above(ten):
    for path in (ten.folder, ten.folder.parent, str(ten.folder.parent)):
        inputs = Cifar10(path=path).open("test").inputs
        assert torch.equal(inputs, torch.from_numpy(ten.pixels["test"]))


def test_only_images_of_the_classes_that_are_asked_for_are_there(ten):
    kept = ("kind 7", "kind 0", "kind 3", "kind 4")
    for split in ("train", "test"):
        names = [f"kind {number}" for number in ten.labels[split]]
        rows = [row for row, name in enumerate(names) if name in kept]
        inputs, labels = ten.open(split, classes=kept)
        assert 0 < len(rows) < len(names)
        assert torch.equal(inputs, torch.from_numpy(ten.pixels[split])[rows])
        assert labels.classes == kept
        assert [kept[number] for number in labels.given.tolist()] == [names[row] for row in rows]
        assert torch.equal(labels.clean, labels.given)
        assert labels.given.data_ptr() != labels.clean.data_ptr()


def test_classes_that_are_not_there_are_refused(ten):
    for classes in ((), ("kind 1", "kind 1"), ("kind 1", "cat")):
        assert "classes" in refusal(ten.open, classes=classes)
    fields = {"labels": "human.npz", "column": "worse", "classes": ("kind 1",)}
    assert "classes" in refusal(Cifar10, path=ten.folder, **fields)


def test_an_array_in_the_order_of_fortran_is_understood(ten):
    pixels = ten.pixels["test"].reshape(4, 3072)
    record = written({"labels": ten.labels["test"]})[:-2]  # without the end of the dictionary
    array = array_opcodes(pixels.shape, pixels.tobytes(order="F"), "|u1", fortran=b"\x88")
    ten.write("test_batch", record + python2("data") + array + b"u.")
    assert torch.equal(ten.open("test").inputs, torch.from_numpy(ten.pixels["test"]))


def test_other_splits_are_refused(ten):
    assert "split" in refusal(ten.open, "validation", kind=NoSplit)


def test_every_file_that_is_read_is_compared_with_the_original(data):
    for file, md5 in ORIGINALS[data.name].md5.items():
        content = (data.folder / file).read_bytes()
        hostile = Hostile(data.folder / "ran").pickle()
        for wrong in (content[:-1], content + b"x", b"", hostile):
            (data.folder / file).write_bytes(wrong)
            text = refusal(data.open, "test" if file.startswith("test") else "train")
            for words in (file, hashlib.md5(wrong).hexdigest(), md5):
                assert words in text
        (data.folder / file).write_bytes(content)
    assert not (data.folder / "ran").exists()
    assert data.open("train")


def test_a_file_much_too_large_is_not_read_to_its_end(ten, monkeypatch):
    monkeypatch.setattr(cifar, "_LARGEST_FILE", 1000)
    assert "test_batch" in refusal(ten.open, "test")


def test_what_is_missing_is_named(data, tmp_path):
    original = ORIGINALS[data.name]
    (data.folder / original.splits["train"][0]).unlink()
    assert str(data.folder / original.splits["train"][0]) in refusal(data.open, "train")
    data.folder = tmp_path / "nowhere"
    assert f"data get {data.name} --to {data.folder}" in refusal(data.open, "train")


class Hostile:
    def __init__(self, sentinel, call=os.mkdir):
        self.asks = call, (str(sentinel),)

    def __reduce__(self):
        return self.asks

    def pickle(self, protocol=2):
        return pickle.dumps(self, protocol)


@pytest.mark.parametrize("file", ["test_batch", "batches.meta"])
def test_nothing_that_a_pickle_asks_for_is_called(ten, tmp_path, file):
    argument = f"__import__('os').mkdir('{tmp_path / 'ran'}')".encode()
    names = ["builtins exec", "__builtin__ eval", "posix system", "numpy load", "_codecs encode"]
    names += ["numpy.core.multiarray scalar", "numpy.core.multiarray _reconstruct.__globals__"]
    for name in names:
        asks = b"\x80\2c" + name.replace(" ", "\n").encode() + b"\n"
        ten.write(file, asks + b"U" + bytes([len(argument)]) + argument + b"\x85R.")
        text = refusal(ten.open, "test")
        assert file in text
        assert name.replace(" ", ".") in text
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        ten.write(file, Hostile(tmp_path / "ran").pickle(protocol))
        assert "mkdir" in refusal(ten.open, "test")
    assert not (tmp_path / "ran").exists()


LABELS = b"U\6labels](K\1K\2e"
START, PIXELS = b"\x80\2}(" + LABELS + b"U\4data", np.zeros((2, 3072), np.uint8)
BAD_PICKLES = {
    "empty": b"",
    "cut short": written({"labels": [1, 2]})[:-3],
    "a list": written([1, 2]),
    "no data": written({"labels": [1, 2]}),
    "data that are text": written({"labels": [1, 2], "data": "pixels"}),
    "an array that was never filled": START + b"cnumpy\nndarray\n)Ru.",
    "other types": written({"labels": [1, 2], "data": PIXELS.astype(np.int64)}),
    "floats": written({"labels": [1, 2], "data": PIXELS.astype(np.float32)}),
    "fewer labels": written({"labels": [1], "data": PIXELS}),
    "labels that are names": written({"labels": ["a", "b"], "data": PIXELS}),
    "another shape": written({"labels": [1, 2], "data": PIXELS[:, 1:]}),
    "a large shape": START + array_opcodes((2**30, 3072), b"x", "|u1") + b"u.",
    "objects": START + array_opcodes((2, 3072), b"x" * 6144, "|O8") + b"u.",
    "a persistent id": b"\x80\2U\1xQ.",
    "a long text": b"\x80\2T" + struct.pack("<i", 2**31 - 1) + b"x.",
    "a huge frame": b"\x80\4\x95" + struct.pack("<Q", 2**62) + b"x.",
    "a far place in the memo": b"\x80\2K\1r" + struct.pack("<I", 2**25) + b".",
}


@pytest.mark.parametrize("content", BAD_PICKLES.values(), ids=BAD_PICKLES.keys())
def test_bad_pickles_are_refused_and_reserve_no_memory(ten, content):
    ten.write("test_batch", content)
    tracemalloc.start()
    try:
        assert "test_batch" in refusal(ten.open, "test")
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


PUBLIC = {"worse": "worse_label", "random2": "random_label2"}
PUBLIC |= {"clean": "clean_label", "noisy": "noisy_label"}


def human(data, column="worse"):
    clean = np.array(data.labels["train"])
    return {"clean": clean, column: (clean + np.arange(len(clean)) % 3) % data.num_classes}


def saved(path, arrays, kind):
    public = {PUBLIC[name]: values for name, values in arrays.items()}
    if kind.endswith("npz"):
        np.savez(path.with_suffix(".npz"), **arrays if kind == "npz" else public)
        return path.with_suffix(".npz")
    if "tensor" in kind:
        public = {name: torch.from_numpy(values) for name, values in public.items()}
    is_new, path = "old" not in kind, path.with_suffix(".pt")
    torch.save(public | {"note": "not one"}, path, _use_new_zipfile_serialization=is_new)
    return path


KINDS = ["npz", "public npz", "pt of tensors", "pt of arrays", "old pt of tensors"]
KINDS += ["old pt of arrays"]


def given_of(data, path, column="worse"):
    return data.open(labels=path, column=column).labels.given.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("column", "number"), [("worse", np.int64), ("random2", np.uint8)])
def test_human_labels_are_given_in_training_and_never_in_the_test(
    ten, tmp_path, kind, column, number
):
    arrays = {name: values.astype(number) for name, values in human(ten, column).items()}
    path = saved(tmp_path / "human", arrays, kind)
    for name in (column, PUBLIC[column]):
        labels = ten.open(labels=path, column=name).labels
        assert labels.given.dtype == torch.int64
        assert labels.given.tolist() == arrays[column].tolist()
        assert labels.clean.tolist() == ten.labels["train"]
    labels = ten.open("test", labels=str(path), column=column).labels
    assert labels.given.tolist() == labels.clean.tolist() == ten.labels["test"]


def test_arrays_of_an_older_numpy_or_of_another_byte_order_are_read(ten, tmp_path):
    expected = human(ten)["worse"].tolist()
    path = saved(tmp_path / "human", human(ten), "old pt of arrays")
    path.write_bytes(path.read_bytes().replace(b"numpy._core.multiarray", b"numpy.core.multiarray"))
    assert b"numpy.core.multiarray" in path.read_bytes()
    assert given_of(ten, path) == expected
    arrays = {name: values.astype(">i4") for name, values in human(ten).items()}
    for kind in ("npz", "pt of arrays"):
        assert given_of(ten, saved(tmp_path / "human", arrays, kind)) == expected


def test_the_only_column_of_a_hundred_classes_need_not_be_named(tmp_path, monkeypatch):
    hundred = StandIn("cifar100", tmp_path / "data", monkeypatch)
    arrays = human(hundred, "noisy")
    path = saved(tmp_path / "human", arrays, "pt of arrays")
    for column in (None, "noisy_label"):
        assert given_of(hundred, path, column) == arrays["noisy"].tolist()


def test_a_column_or_file_that_is_not_there_is_refused(ten):
    for labels, column, words in (
        ("a.npz", None, "column"),
        ("a.npz", "worst", "'worst'"),
        ("a.npz", "clean", "'clean'"),
        (None, "worse", "column"),
        ("a.npz", "worse", "'a.npz'"),
        ("a.pt", "worse", "'a.pt'"),
        (__file__, "worse", "labels"),
        (os.sep, "worse", "labels"),
    ):
        assert words in refusal(ten.open, "train", labels=labels, column=column)


@pytest.mark.parametrize("kind", ["npz", "pt of tensors", "pt of arrays"])
def test_labels_of_other_data_are_refused(ten, tmp_path, kind):
    def attempt(**changes):
        arrays = human(ten) | changes
        arrays = {name: values for name, values in arrays.items() if values is not None}
        path = saved(tmp_path / "human", arrays, kind)
        return refusal(ten.open, "train", labels=path, column="worse")

    clean, worse = human(ten).values()
    swapped = np.roll(clean, 1)
    assert str((swapped != clean).sum()) in attempt(clean=swapped)
    for wrong in (worse[:, None], worse * 0 + 10, worse * 0 - 1, None):
        assert re.search("^worse in .*human", attempt(worse=wrong))
    assert "human" in attempt(worse=worse / 1)
    for wrong in (clean[1:], None):
        assert re.search("^clean in .*human", attempt(clean=wrong))


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("call", [os.mkdir, os.system, eval, np.load, torch.load])
def test_nothing_that_a_pt_asks_for_is_called(ten, tmp_path, call, is_new):
    sentinel, path = tmp_path / "ran", tmp_path / "human.pt"
    code = {os.system: f"mkdir {sentinel}", eval: f"__import__('os').mkdir('{sentinel}')"}
    values = human(ten) | {"more": Hostile(code.get(call, sentinel), call)}
    torch.save(values, path, _use_new_zipfile_serialization=is_new)
    text = refusal(ten.open, "train", labels=path, column="worse")
    assert re.search(rf"human.pt .*\b{call.__name__}\b", text)
    assert "weights_only" not in text
    assert not sentinel.exists()


def test_what_the_program_trusts_elsewhere_is_not_trusted_here(ten, tmp_path):
    trusted = [os.path.basename, np.ndarray, np.dtype]
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals(trusted)
    path = tmp_path / "human.pt"
    try:
        torch.save(human(ten) | {"more": Hostile("a", os.path.basename)}, path)
        assert "basename" in refusal(ten.open, "train", labels=path, column="worse")
        assert given_of(ten, saved(path, human(ten), "pt of arrays"))
        assert set(torch.serialization.get_safe_globals()) == {*before, *trusted}
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


@pytest.mark.parametrize(
    "value", ["text", [1, 2], None, 3.5, torch.zeros(20, dtype=torch.bfloat16)]
)
def test_a_pt_of_other_things_is_refused(ten, tmp_path, value):
    path = tmp_path / "human.pt"
    for content in (human(ten) | {"worse": value}, value):
        torch.save(content, path)
        assert "human.pt" in refusal(ten.open, "train", labels=path, column="worse")


def test_an_npz_with_objects_is_refused_unopened(ten, tmp_path):
    path, hostile = tmp_path / "human.npz", Hostile(tmp_path / "ran")
    np.savez(path, **human(ten), more=np.array([hostile], dtype=object))
    assert "human.npz" in refusal(ten.open, "train", labels=path, column="worse")
    path.write_bytes(hostile.pickle())
    assert "human.npz" in refusal(ten.open, "train", labels=path, column="worse")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("ending", ["npz", "pt"])
def test_labels_that_unpack_to_too_much_are_refused_unread(ten, tmp_path, ending):
    path = tmp_path / f"human.{ending}"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("worse.npy", "w") as file,
    ):
        for _ in range(65):
            file.write(bytes(2**20))
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        text = refusal(ten.open, "train", labels=path, column="worse")
        assert str(65 * 2**20) in text
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_labels_cut_short_are_refused(ten, tmp_path, kind):
    path = saved(tmp_path / "human", human(ten), kind)
    content = path.read_bytes()
    for share in (0, 0.3, 0.6, 0.95):
        path.write_bytes(content[: int(share * len(content))])
        assert path.name in refusal(ten.open, "train", labels=path, column="worse")


def packed(data, *, without=(), more=()):
    """The archive of a stand-in, whose md5 becomes that of the original; `more` is (TarInfo,
    content) pairs.
    """
    original, buffer = ORIGINALS[data.name], io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        tar.add(data.folder, original.folder, recursive=False)
        for file in original.md5:
            if file not in without:
                tar.add(data.folder / file, f"{original.folder}/{file}")
        for name in original.leftovers:
            more = [*more, (tarfile.TarInfo(f"{original.folder}/{name}"), b"a note")]
        for info, content in more:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return addressed(data, buffer.getvalue())


def addressed(data, content):
    path = data.folder.parent / "archive.tar.gz"
    path.write_bytes(content)
    data.change(archive_md5=hashlib.md5(content).hexdigest())
    return path.as_uri()


def test_an_archive_is_fetched_verified_and_read(data, tmp_path):
    address, target, original = packed(data), tmp_path / "new" / "place", ORIGINALS[data.name]
    folder = fetch(data.name, target, address)
    assert folder == target / original.folder
    assert {path.name for path in folder.iterdir()} == original.md5.keys()  # leftovers are left
    assert [path.name for path in target.iterdir()] == [folder.name]
    data.folder = target
    assert torch.equal(data.open("train").inputs, torch.from_numpy(data.pixels["train"]))
    # What is there is not fetched again, but verified.
    assert fetch(data.name, target, "http://nowhere.invalid/") == folder
    file = folder / original.splits["test"][0]
    for damage in (lambda: file.write_bytes(b"x"), file.unlink):
        damage()
        assert str(file) in refusal(fetch, data.name, target, "http://nowhere.invalid/")


def member(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


FOLDER = "cifar-10-batches-py"
BAD_MEMBERS = {
    "above": member("../escaped"),
    "above by a known name": member(f"{FOLDER}/../{FOLDER}/test_batch"),
    "absolute": member("/tmp/nearsay-escaped"),
    "a link": member(f"{FOLDER}/test_batch", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": member(f"{FOLDER}/test_batch", tarfile.LNKTYPE, "/etc/passwd"),
    "a link for the folder": member(FOLDER, tarfile.SYMTYPE, "/tmp"),
    "a file for the folder": member(FOLDER),
    "a folder for a file": member(f"{FOLDER}/test_batch", tarfile.DIRTYPE),
    "a device": member(f"{FOLDER}/test_batch", tarfile.CHRTYPE),
    "one more file": member(f"{FOLDER}/more.py"),
    "a file of another data set": member("cifar-100-python/train"),
}


@pytest.mark.parametrize("info", BAD_MEMBERS.values(), ids=BAD_MEMBERS.keys())
def test_archives_with_anything_else_are_refused_before_anything_is_written(ten, tmp_path, info):
    target = tmp_path / "target"
    address = packed(ten, without=["test_batch"], more=[(info, b"")])
    text = refusal(fetch, "cifar10", target, address)
    assert repr(info.name) in text
    assert list(target.iterdir()) == []
    assert not [path for path in tmp_path.rglob("*") if "escaped" in path.name]
    assert not os.path.exists("/tmp/nearsay-escaped")


def test_archives_with_the_right_names_and_wrong_contents_are_refused(ten, tmp_path):
    target, wrong = tmp_path / "target", member(f"{FOLDER}/test_batch")
    for choices in ({"more": [(wrong, b"other")]}, {"without": ["test_batch"]}):
        assert "test_batch" in refusal(fetch, "cifar10", target, packed(ten, **choices))
    assert list(target.iterdir()) == []


def test_archives_that_are_none_are_refused(ten, tmp_path):
    address = packed(ten)
    content = (ten.folder.parent / "archive.tar.gz").read_bytes()
    half = content[: len(content) // 2]
    broken = half + bytes(len(content) - len(half))
    for wrong in (half, broken, b"", b"<html>", gzip.compress(b"no tar" * 1000)):
        assert addressed(ten, wrong) == address
        text = refusal(fetch, "cifar10", tmp_path / "target", address)
        # Half of a broken archive may be unpacked.
        assert "archive of CIFAR-10" in text or "md5" in text
    assert list((tmp_path / "target").iterdir()) == []


def test_an_archive_of_another_md5_is_not_even_opened(ten, tmp_path, monkeypatch):
    address, actual, other = packed(ten), ORIGINALS["cifar10"].archive_md5, "c58f30108f718f92"
    ten.change(archive_md5=other)
    monkeypatch.delattr(tarfile, "open")
    text = refusal(fetch, "cifar10", tmp_path / "target", address)
    assert all(words in text for words in (address, actual, other))
    assert list((tmp_path / "target").iterdir()) == []


def test_a_download_without_end_is_given_up(ten, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "_LARGEST_FILE", 2**21)
    endless = tmp_path / "endless"
    endless.touch()
    os.truncate(endless, 2**40)
    text = refusal(fetch, "cifar10", tmp_path / "target", endless.as_uri())
    assert f"{3 * 2**20} bytes" in text


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/short":  # promises more than it sends
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"x" * 1000)
        elif self.path == "/garbage":
            self.wfile.write(b"this is not HTTP\r\n\r\n")
        else:
            self.send_error(404)


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_trouble_of_the_network_is_one_sentence(server, tmp_path):
    target = tmp_path / "target"
    for page in ("missing", "garbage", "short"):
        kind = (ValueError, OSError) if page == "short" else OSError
        address = f"{server}/{page}"
        assert address in refusal(fetch, "cifar10", target, address, kind=kind)
    for address in ("http://127.0.0.1:9/a", "file:///nowhere/a", "nonsense", "http://[bad/", "x:y"):
        assert address in refusal(fetch, "cifar100", target, address, kind=OSError)
    assert list(target.iterdir()) == []
    assert "name" in refusal(fetch, "cifar", target)
