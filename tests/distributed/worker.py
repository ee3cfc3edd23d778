"""One process of a group: `python -m distributed.worker FOLDER RANK NUM_RANKS`."""

import gc
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from distributed import norms, wrapped
from distributed.collectives import call_all
from distributed.looks import look_all
from distributed.scenarios import SCENARIOS, train


def main(folder: Path, rank: int, num_ranks: int) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), num_ranks)
    timeout = timedelta(seconds=30)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout
    )
    doing = "the collectives"
    try:
        results = {"collectives": call_all(rank)}
        if num_ranks == 2:
            doing = "the norms"
            results |= norms.run_all(rank, num_ranks)
            doing = "the wrappers of torch"
            with warnings.catch_warnings():  # of torch, whose own wrappers these are
                warnings.simplefilter("ignore")
                results["wrapped"] = wrapped.step(rank, num_ranks)
        doing = "the looks"
        results["looks"] = look_all(folder, rank)
        for doing, scenario in SCENARIOS.items():
            results[doing] = train(scenario, rank, num_ranks)
    except Exception:
        (folder / f"{rank}.error").write_text(
            f"rank {rank} during {doing}:\n{traceback.format_exc()}"
        )
        raise
    torch.save(results, folder / f"{rank}.unfinished")
    (folder / f"{rank}.unfinished").rename(folder / f"{rank}.pt")
    gc.collect()  # a model that outlives its group can abort the process
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
