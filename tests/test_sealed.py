import random
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch.testing import assert_close

from nearsay.sealed import load_sealed, pack_sealed

TENSORS = {
    "weight": torch.arange(12.0).view(3, 4).T,
    "half": torch.tensor([1.5, -2.0]).to(torch.bfloat16),
    "count": torch.tensor(7),
    "mask": torch.tensor([True, False, True]),
    "none": torch.empty(0, 5),
}
WHOLE = {name: tensor.contiguous() for name, tensor in TENSORS.items()}


def test_tensors_come_back_as_they_were(tmp_path):
    (tmp_path / "t").write_bytes(pack_sealed(WHOLE))
    assert_close(load_sealed(tmp_path / "t"), WHOLE, rtol=0, atol=0)
    assert_close(
        load_sealed(tmp_path / "t", ("count",)), {"count": torch.tensor(7)}, rtol=0, atol=0
    )
    assert_close(safetensors.torch.load_file(tmp_path / "t"), WHOLE, rtol=0, atol=0)


def test_a_file_without_a_seal_is_taken_as_it_is(tmp_path):
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file(WHOLE, tmp_path / "t", metadata)
        assert_close(load_sealed(tmp_path / "t"), WHOLE, rtol=0, atol=0)


def test_no_flipped_bit_is_taken_for_a_value(tmp_path):
    sound, draw, told = pack_sealed(WHOLE), random.Random(0), []
    for place in range(len(sound)):
        content = bytearray(sound)
        content[place] ^= 1 << draw.randrange(8)
        (tmp_path / "t").write_bytes(content)
        try:
            found = load_sealed(tmp_path / "t")
        except SafetensorError as error:
            told.append(str(error))
        else:  # of the seal its name alone
            assert_close(found, WHOLE, rtol=0, atol=0)
    assert len(told) > 0.95 * len(sound)
    assert "it is damaged in weight" in told


def test_a_damaged_seal_is_told_where_a_part_is_read(tmp_path):
    content = pack_sealed(WHOLE)
    (tmp_path / "t").write_bytes(content.replace(b'\\"half\\"', b'\\"hair\\"'))
    with pytest.raises(SafetensorError, match="it is damaged"):
        load_sealed(tmp_path / "t", ("count",))


def test_every_process_writes_the_same_bytes():
    command = "import torch, sys; from nearsay.sealed import pack_sealed as p; "
    command += "sys.stdout.buffer.write(p({n: torch.ones(3) for n in 'cadb'}))"
    first, second = (
        subprocess.run([sys.executable, "-c", command], capture_output=True).stdout
        for _ in range(2)
    )
    assert first == second != b""
