"""Mistakes in loops of strangers, and errors that others reported: each is noticed, and its kind is said."""

import subprocess

import planted
import pytest
from known.releases import RELEASES
from known.replanted import KNOWN

FOUND = [each for each in RELEASES if each.first]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("proofs")
    cases = planted.planted([*planted.MISTAKES, *KNOWN], out / "planted")
    return planted.prove_all([*cases, *planted.alone(cases), *planted.sound()], out)


@pytest.mark.ci
def test_twenty_mistakes_are_noticed_and_named(rows):
    assert len(planted.MISTAKES) >= 20
    said = {each.name: planted.said(rows[each.name]) for each in planted.MISTAKES}
    assert not [name for name in said if rows[name].agrees or not rows[name].first], said
    right = [each for each in planted.MISTAKES if said[each.name].startswith(f"{each.kind}:")]
    assert right == [*planted.MISTAKES], said


@pytest.mark.ci
def test_errors_that_were_reported_are_found_by_tensor(rows):
    assert len(KNOWN) >= 10
    said = {each.name: planted.said(rows[each.name]) for each in KNOWN}
    assert not [name for name in said if not rows[name].first], said
    wrong = [each.name for each in KNOWN if each.kind and not said[each.name].startswith(f"{each.kind}:")]
    assert not wrong, said


@pytest.mark.ci
def test_in_one_process_no_mistake_is_one(rows):
    for mistake in (*planted.MISTAKES, *KNOWN):
        row = rows[f"{mistake.name} alone"]
        assert row.agrees, f"{mistake.name}: {planted.said(row)}"


@pytest.mark.ci
def test_the_sound_loops_agree(rows):
    for case in planted.sound():
        assert rows[case.name].agrees, planted.said(rows[case.name])


@pytest.mark.long
@pytest.mark.parametrize("release", FOUND, ids=lambda each: each.source)
def test_an_error_of_a_release_is_found_in_it(release, tmp_path):
    try:
        said = release.prove(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip("no index has these packages")
    assert f"{release.first} is the first that differs" in said, said
