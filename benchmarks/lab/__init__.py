"""The laboratory: which runs are wanted, the records of those that are done, and the page of both.

| file | what it holds |
|---|---|
| `run_queue.py` | every run that is wanted, in the order in which they are run |
| `worker.py` | runs what is left of the queue: `python benchmarks/lab/worker.py run --help` |
| `record.py` | the format of a record: one file of `benchmarks/records/` for each finished run |
| `predictions.py` | predictions that are kept beside records, to audit a run again |
| `cells.py` | the records of one cell of a table: means over seeds, costs, text |
| `published.py` | the numbers of the paper and of other works, and our targets |
| `page.py` | writes docs/results.md and the queue: `python benchmarks/lab/page.py [--check]` |
| `questions.py` | the sections of the page that answer one question each |

It uses the package; the package never imports it, and the wheel does not contain it.
"""
