import pytest
from lab.cells import Numbers, fill
from lab.page import main
from lab.record import take
from lab.run_queue import BY_KEY, cell
from lab_runs import record

WORST = BY_KEY["human-worse"]


def numbers(*records, changed=()):
    return Numbers(records={each["name"]: each for each in records}, changed=frozenset(changed))


def seeds(*finals, protocol="paper", method="nearsay", **more):
    runs = [cell(WORST, method, protocol=protocol, seed=seed) for seed in range(len(finals))]
    return [record(run, final, seed=seed, **more) for seed, (run, final) in enumerate(zip(runs, finals, strict=True))]


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
        ("final - 94.5", "0.3 above"),
        ("auroc - .940", ".011 above"),
        ("final - short-human-worse-nearsay final", "1.9 above"),
        ("final - paper-human-worse-nearsay-seed-1 final", "0.3 above"),
    ],
)
def test_a_reference_is_the_mean_over_seeds(reference, told):
    every = numbers(*seeds(0.940, 0.945, 0.959, auroc=0.9512), *seeds(0.929, protocol="short"))
    assert fill(f"at {{paper-human-worse-nearsay {reference}}} of it", every) == f"at {told} of it"


def test_a_name_with_its_seed_is_one_run():
    every = numbers(*seeds(0.940, 0.945))
    assert fill("{paper-human-worse-nearsay-seed-1 final}, {paper-human-worse-nearsay-seed-1 seeds}", every) == (
        "94.5, one seed"
    )


def test_what_the_audit_found_and_what_was_held_out_can_be_told():
    one = {**seeds(0.94, held_out=0.5512)[0], "audit": {"auroc": 0.9901, "average_precision": 0.985, "seconds": 3.0}}
    kinds = {"audit-auroc": ".990", "audit-ap": ".985", "held-out": "55.1"}
    for kind, told in kinds.items():
        assert fill(f"{{paper-human-worse-nearsay {kind}}}", numbers(one)) == told


def test_a_method_s_name_does_not_take_that_of_another():
    every = numbers(*seeds(0.77, method="ncr+mixup"), *seeds(0.70, method="ncr"))
    assert fill("{paper-human-worse-ncr+mixup final} {paper-human-worse-ncr final}", every) == "77.0 70.0"


def test_a_mean_is_never_of_two_forms_of_a_method():
    every = numbers(*seeds(0.90, 0.95), changed=["paper-human-worse-nearsay-seed-0"])
    assert fill("{paper-human-worse-nearsay final}", every) == "95.0"


def test_many_seeds_are_counted_in_digits():
    assert fill("{paper-human-worse-nearsay seeds}", numbers(*seeds(0.90, 0.91, 0.92, 0.93))) == "4 seeds"


def test_what_was_not_run_is_said_to_be_so():
    every = numbers(*seeds(0.90))
    assert fill("{short-symmetric-20-elr final}", every) == "not run"
    assert fill("{paper-human-worse-nearsay final - short-symmetric-20-elr final}", every) == "not run"
    assert fill("{short-symmetric-20-elr seeds}", every) == "no seed"


@pytest.mark.parametrize(
    "reference",
    [
        "paper-human-worse-nearsy final",
        "paper-human-worse-nearsay",
        "paper-human-worse-nearsay finale",
        "paper-human-worse-nearsay audit-auroc",
        "paper-human-worse-nearsay held-out",
        "paper-human-worse-nearsay final - much",
        "paper-human-worse-nearsay final - 1 2 3",
        "",
    ],
)
def test_a_reference_that_means_nothing_is_quoted_with_what_would(tmp_path, capsys, reference):
    take(seeds(0.90), tmp_path)
    (tmp_path / "found.md").write_text(f"It is {{{reference}}}.\n")
    assert main(["--records", str(tmp_path), "--out", str(tmp_path / "page.md")]) == 65
    told = capsys.readouterr().err
    assert told.startswith(f"error: {tmp_path / 'found.md'}: {{{reference}}} is no number of a run; write {{RUN KIND}}")
    assert not (tmp_path / "page.md").exists()
