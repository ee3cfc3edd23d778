"""Two processes under DDP and FSDP equal one: neighbors are searched among the rows of both."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from integrations.ddp_worker import step
from torch.testing import assert_close


def test_two_processes_have_the_loss_and_the_gradients_of_one(tmp_path):
    command = [sys.executable, "-m", "integrations.ddp_worker", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=90)[0] for process in processes]
    # A process counts by its file, not by its exit code: gloo sometimes aborts at the end.
    assert all((tmp_path / f"{rank}.pt").exists() for rank in range(2)), told
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    alone = step()
    assert_close(one["gradients"], alone["gradients"])
    assert_close(other["gradients"], alone["gradients"])
    assert_close(one["judged"], alone["judged"])
    assert_close((one["loss"] + other["loss"]) / 2, alone["loss"])
    assert_close((one["terms"] + other["terms"]) / 2, alone["terms"])
    assert_close((one["sharded"] + other["sharded"]) / 2, alone["sharded"])
