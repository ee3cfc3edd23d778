import re

import pytest
from lab.cells import Numbers, fill
from lab.run_queue import BY_KEY, OWN, cell
from lab_runs import record

WORST = BY_KEY["human-worse"]
RUN = f"paper-human-worse-{OWN}"


def numbers(*records, changed=()):
    return Numbers(records={each["name"]: each for each in records}, changed=frozenset(changed))


def seeds(*finals, protocol="paper", method=OWN, **more):
    runs = [cell(WORST, method, protocol=protocol, seed=seed) for seed in range(len(finals))]
    return [
        record(run, final, seed=seed, **more)
        for seed, (run, final) in enumerate(zip(runs, finals, strict=True))
    ]


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("final", "94.8"),
        ("best", "95.8"),
        ("last-10", "93.8"),
        ("forgotten", "1.0"),
        ("best-epoch", "90"),
        ("auroc", ".951"),
        ("ap", ".875"),
        ("minutes", "1.0"),
        ("seeds", "three seeds"),
        ("final - 95.5", "0.7 below"),
        ("auroc - .940", ".011 above"),
        (f"final - short-human-worse-{OWN} final", "1.9 above"),
        (f"final - paper-human-worse-{OWN}-seed-1 final", "0.3 above"),
    ],
)
def test_a_reference_is_the_mean_over_seeds(reference, told):
    every = numbers(*seeds(0.940, 0.945, 0.959, auroc=0.9512), *seeds(0.929, protocol="short"))
    assert fill(f"at {{paper-human-worse-{OWN} {reference}}} of it", every) == f"at {told} of it"


def test_figures_of_the_audit_and_of_held_out_examples_can_be_named():
    one = {
        **seeds(0.94, held_out=0.5512)[0],
        "audit": {"auroc": 0.9901, "average_precision": 0.985, "seconds": 3.0},
    }
    kinds = {"audit-auroc": ".990", "audit-ap": ".985", "held-out": "55.1"}
    for kind, told in kinds.items():
        assert fill(f"{{{RUN} {kind}}}", numbers(one)) == told


def test_a_method_s_name_does_not_take_that_of_another():
    every = numbers(*seeds(0.77, method="ncr+mixup"), *seeds(0.70, method="ncr"))
    assert (
        fill("{paper-human-worse-ncr+mixup final} {paper-human-worse-ncr final}", every)
        == "77.0 70.0"
    )


def test_a_mean_is_never_of_two_forms_of_a_method():
    every = numbers(*seeds(0.90, 0.95), changed=[f"{RUN}-seed-0"])
    assert fill(f"{{{RUN} final}}", every) == "95.0"


def test_a_run_that_is_missing_reads_not_run():
    every = numbers(*seeds(0.90))
    assert fill("{short-symmetric-20-elr final}", every) == "not run"
    assert fill(f"{{{RUN} final - short-symmetric-20-elr final}}", every) == "not run"
    assert fill("{short-symmetric-20-elr seeds}", every) == "no seed"


@pytest.mark.parametrize(
    "reference",
    [f"{RUN}x final", RUN, f"{RUN} finale", f"{RUN} held-out", f"{RUN} final - much", ""],
)
def test_a_reference_that_means_nothing_is_quoted(reference):
    with pytest.raises(ValueError, match=re.escape(f"{{{reference}}}")):
        fill(f"It is {{{reference}}}.", numbers(*seeds(0.90)))
