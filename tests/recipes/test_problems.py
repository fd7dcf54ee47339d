"""What the system refuses is told with what is free and the fix."""

import errno
import resource

import pytest

from recipes.problems import Problem, ProblemsError, amount, system_error, system_problem, take_file_handles


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, ("MB are free", "make room there, or name another place")),
        (errno.EDQUOT, ("MB are free", "make room there, or name another place")),
        (errno.EROFS, ("Read-only file system", "name another place")),
        (errno.EFBIG, ("a file may have", "ulimit -f")),
        (errno.EMFILE, ("files open", "ulimit -n")),
        (errno.EIO, ("does not answer", "dmesg")),
    ],
)
def test_a_refusal_of_the_system_says_where_why_and_what_to_do(tmp_path, number, said):
    error = OSError(number, "?" if number != errno.EROFS else "Read-only file system")
    for named in (error, OSError(number, error.strerror, str(tmp_path / "new" / "file"))):
        text = str(system_problem(named, tmp_path / "place", "name another place"))
        assert all(each in text for each in said) and str(named.filename or tmp_path / "place") in text


def test_only_such_errors_and_what_they_caused_go_without_a_traceback():
    full = OSError(errno.ENOSPC, "full")
    caused = RuntimeError("writing failed")
    caused.__cause__ = full
    met = RuntimeError("while handling")
    met.__context__ = full
    assert system_error(full) is system_error(caused) is full
    for other in (met, ValueError(), FileNotFoundError(errno.ENOENT, "")):
        assert system_error(other) is None


def test_a_process_takes_the_file_handles_it_may_have(monkeypatch):
    limits = [(64, 128)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    take_file_handles(128)
    assert limits[-1] == (128, 128)
    with pytest.raises(ProblemsError, match=r"128 files open.*129 are needed.*ulimit -Hn 129"):
        take_file_handles(129)
    limits[:] = [(64, 10**6)]
    take_file_handles(100_000)
    assert limits[-1] == (100_000, 10**6), "more than are usually taken"
    limits[:] = [(64, resource.RLIM_INFINITY)]
    take_file_handles(128)
    assert limits[-1] == (65_536, resource.RLIM_INFINITY)


def test_a_refusal_shows_what_a_screen_would_obey():
    assert str(Problem("a", "\x1b[2Jgone", "rule\x07", "fix")) == r"\x1b[2Jgone: rule\x07; fix"


def test_bytes_have_three_digits_and_a_unit():
    sizes = {
        0: "0 MB",
        2_934_000: "2.93 MB",
        99e6: "99 MB",
        0.1e9: "0.1 GB",
        23.114e9: "23.1 GB",
        1.54e12: "1.54 TB",
    }
    for size, words in sizes.items():
        assert amount(size) == words
