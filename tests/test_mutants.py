import mutants
import pytest


def test_every_mutant_still_applies():
    for mutant in mutants.MUTANTS:
        source = (mutants.ROOT / "src" / "nearsay" / mutant.path).read_text()
        assert source.count(mutant.old) == 1, mutant.name


@pytest.mark.slow
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_notice(mutant):
    assert not mutants.survives(mutant)
