"""What one rank refuses ends all of them, before a process group is made."""

from launching import WORKERS, run_ranks

from launch.ranks.meeting import sentences

TINY = ["--tiny", "--steps", "2", "--ds_config", "zero1"]


def test_each_refusal_is_said_once_with_its_place():
    assert sentences([("a", None), ("b", None)]) == ""
    assert sentences([("a", "no"), ("a", "no"), ("b", "no")]) == "no"
    assert sentences([("a", "no"), ("a", None)]) == "no", "what rank 0 alone looks at"
    assert sentences([("a", None), ("b", "no"), ("b", "no")]) == "on b (ranks 1, 2):\nno"
    told = sentences([("a", "x"), ("b", "y"), ("c", "y")])
    assert told == "on a (rank 0):\nx\non b, c (ranks 1, 2):\ny"


def test_a_rank_that_lacks_a_file_ends_all_ranks_with_its_refusal(tmp_path):
    """The others would wait for it; and rank 0 must have spoken before the launcher ends it."""
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "text.jsonl").write_text('{"text": "words"}\n' * 20)
    data = ["--set", "data.source=jsonl", "--set", "data.name=text.jsonl", "--out", "run"]
    how = {"cwd": tmp_path / "here", "timeout": 60, "kill_after": 0.1}
    done = run_ranks(2, WORKERS / "elsewhere.py", tmp_path / "there", *TINY, *data, **how)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    assert done.stdout.count("text.jsonl") == 1 and "(rank 1):" in done.stdout
    assert not (tmp_path / "here" / "run").exists()


def test_a_run_directory_that_is_not_shared_is_refused_at_the_start(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    how = {"cwd": tmp_path / "here", "timeout": 60, "kill_after": 0.1}
    done = run_ranks(2, WORKERS / "elsewhere.py", tmp_path / "there", *TINY, "--out", "run", **how)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    assert f"{tmp_path / 'there' / 'run'} does not hold" in done.stdout and "--out" in done.stdout
    assert "(rank 1):" in done.stdout
    assert not [*(tmp_path / "here" / "run").glob("shared.*")], "the token is gone"
