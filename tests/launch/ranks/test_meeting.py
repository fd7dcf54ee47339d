"""One rank's refusal or death ends all of them, and nobody else can say a word at their meeting."""

import json
import os
import socket
import subprocess
import sys
import threading

import pytest
from launching import WORKERS, environment, run_ranks

from data.durable_files import left_by_a_crash
from launch.ranks import connection
from launch.ranks.connection import Message
from launch.ranks.ranks_meeting import sentences

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


def test_a_machine_whose_cache_all_may_write_ends_the_ranks_of_all(tmp_path):
    (tmp_path / "there" / "cache").mkdir(parents=True)
    (tmp_path / "there" / "cache").chmod(0o777)
    how = {"cwd": tmp_path, "timeout": 60, "kill_after": 0.1}
    done = run_ranks(2, WORKERS / "elsewhere.py", tmp_path / "there", *TINY, "--out", "run", **how)
    assert done.returncode == 2 and "(rank 1):" in done.stdout, done.stdout
    assert done.stdout.count(f"chmod o-w {tmp_path / 'there' / 'cache'}") == 1


DYING = """
import os, sys, time
from launch.ranks import processes, ranks_meeting
ranks_meeting.SETTLE_S = 1.0
dying, how = int(sys.argv[1]), sys.argv[2]
met = ranks_meeting.RanksMeeting()
met.all_or_none(lambda: None)
if processes.rank() == dying:
    if how == "in order":
        met.end()
    os._exit(9)
time.sleep(60 if how == "dies" else 2)
met.end()
"""


def ranks_of(program, world, *given, own=None):
    """Start a program on ranks that meet at a free port of this machine; return the processes.

    `own`: more of the environment, for each rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    started = []
    for rank in range(world):
        place = {**launch, "RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), **(own[rank] if own else {})}
        command = [sys.executable, "-c", program, *map(str, given)]
        piped = subprocess.PIPE
        started.append(
            subprocess.Popen(command, env=environment(place), stdout=piped, stderr=piped, text=True)
        )
    return started


@pytest.mark.parametrize(
    ("how", "dying"),
    [
        ("dies", 1),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (("dies", 0), ("in order", 1), ("in order", 0))
        ),
    ],
)
def test_a_death_ends_all_and_is_told_once(dying, how):
    ranks = ranks_of(DYING, 3, dying, how)
    said = [rank.communicate(timeout=90)[1] for rank in ranks]
    left = 0 if how == "in order" else 1
    assert [rank.returncode for rank in ranks] == [9 if rank == dying else left for rank in range(3)], said
    who = f"rank {dying} on {socket.gethostname()} (pid {ranks[dying].pid})"
    told = [f"{who} has ended: " in text for text in said]
    assert told == [left == 1 and rank == 1 - dying for rank in range(3)], said


MEETING = """
import json, sys
from pydantic import TypeAdapter
from launch.ranks.ranks_meeting import RanksMeeting
from launch.ranks.processes import rank
met = RanksMeeting()
def made():
    return met.once(lambda: {"a": [1, 2.5, None]}, TypeAdapter(dict[str, list[float | None]]))
everyone = met.to_rank_0(rank() * 11)
found = met.all_or_none(made), met.from_rank_0(rank() + 5), everyone, sorted(met.places)
def refuse():
    if rank() == 0:
        raise ValueError("rank 0 does not want to")
    return met.once(lambda: {}, TypeAdapter(dict[str, int]))
print(json.dumps(found), flush=True)
met.all_or_none(refuse)
"""


@pytest.mark.ci
def test_ranks_exchange_json_and_rank_0_refuses_before_it_makes_what_others_wait_for():
    ranks = ranks_of(MEETING, 3)
    said = [rank.communicate(timeout=90) for rank in ranks]
    handed = {"a": [1.0, 2.5, None]}
    assert [json.loads(out) for out, _ in said] == [
        [handed, 5, [0, 11, 22], [0, 1, 2]],
        [handed, 5, [11], [0, 1]],
        [handed, 5, [22], [0, 2]],
    ]
    assert [rank.returncode for rank in ranks] == [2, 2, 2]
    assert said[0][1].strip().endswith("rank 0 does not want to") and not said[1][1] + said[2][1], said


def pair(token=b"t" * 32, of_others=None):
    """Connect one rank to rank 0; return both ends, or None where it is not let in."""
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    admitted = {}
    over = threading.Event()
    door = threading.Thread(target=lambda: admitted.update(connection.admit(server, token, 2, over.is_set)))
    door.start()
    try:
        connected = socket.create_connection(("127.0.0.1", port), timeout=20)
        other = connection.prove(connected, 1, of_others or token)
        door.join(20)
        return admitted[1], other
    except connection.OtherSecretError:
        return None
    finally:
        over.set()
        door.join(20)


def test_messages_are_heard_and_a_changed_repeated_or_foreign_one_ends_the_connection():
    for harm in ("none", "changed", "repeated", "turned round", "too long"):
        first, other = pair()
        other.send(Message("value", "a", [1]).encoded())
        assert first.take() == [Message("value", "a", [1])]
        sent = []
        other.socket, real = type("Line", (), {"sendall": sent.append}), other.socket
        other.send(Message("value", "b", float("inf")).encoded())
        line = sent[0]
        if harm == "none":
            real.sendall(line[:7])
            assert first.take() == []
            real.sendall(line[7:] + line[:0])
            assert first.take() == [Message("value", "b", float("inf"))]
            continue
        if harm == "changed":
            real.sendall(line.replace(b"Infinity", b"Infinitx"))
        elif harm == "repeated":
            real.sendall(line)
            first.take()
            real.sendall(line)
        elif harm == "turned round":
            first.send(Message("value", "c").encoded())
            real.sendall(real.recv(1000))
        else:
            real.sendall(connection.HEADER.pack(connection.MOST_BYTES + 1, b"p" * 32))
        with pytest.raises(ConnectionAbortedError):
            first.take()
    assert pair(of_others=b"x" * 32) is None, "another secret"


def test_a_message_that_comes_back_to_its_sender_is_refused():
    """Its number is the one that is due: by the direction alone it differs from the other rank's."""
    for mine in (0, 1):
        ends = pair()
        sender, other = ends[mine], ends[1 - mine]
        sender.send(Message("death").encoded())
        other.socket.sendall(other.socket.recv(1000))
        with pytest.raises(ConnectionAbortedError):
            sender.take()


def test_a_rank_that_is_admitted_keeps_its_connection():
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    admitted, token = {}, b"t" * 32
    over = threading.Event()
    door = threading.Thread(target=lambda: admitted.update(connection.admit(server, token, 3, over.is_set)))
    door.start()
    try:
        callers = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(3)]
        ranks = zip(callers, (1, 1, 2), strict=True)
        first, again, _ = [connection.prove(caller, rank, token) for caller, rank in ranks]
        door.join(20)
    finally:
        over.set()
        door.join(20)
    again.send(Message("death").encoded())
    first.send(Message("value", "a", 1).encoded())
    assert admitted.keys() == {1, 2} and admitted[1].take() == [Message("value", "a", 1)]


PEER = """
import os, sys
from launch.ranks import connection
if sys.argv[2] == "another":
    os.setgid(65534)
    os.setuid(65534)
try:
    if sys.argv[1] == "listens":
        server = connection.listen_here("test-of-peers-1")
        print("there", flush=True)
        server.accept()
    else:
        connection.prove(connection.connect_here("test-of-peers-2"), 1, b"")
        print("admitted", flush=True)
except OSError:
    print("turned away", flush=True)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone becomes another account")
@pytest.mark.parametrize("account", ["this", "another"])
def test_on_one_machine_the_kernel_says_who_calls_and_who_listens(account):
    def peer(does):
        program = [sys.executable, "-c", PEER, does, account]
        return subprocess.Popen(program, env=environment(), stdout=subprocess.PIPE, text=True)

    listening = peer("listens")
    assert listening.stdout.readline() == "there\n"
    if account == "this":
        connection.connect_here("test-of-peers-1").close()
    else:
        with pytest.raises(ConnectionAbortedError, match="another account"):
            connection.connect_here("test-of-peers-1")
    listening.communicate(timeout=60)
    calling = []
    server = connection.listen_here("test-of-peers-2")
    over = lambda: bool(calling) and calling[0].poll() is not None  # noqa: E731
    calling.append(peer("calls"))
    admitted = connection.admit(server, b"", 2, over)
    said = calling[0].communicate(timeout=60)[0]
    assert (said, [*admitted]) == (("admitted\n", [1]) if account == "this" else ("turned away\n", []))


HASTY = "from launch.ranks import door\ndoor.LOOK_FOR_S = 1.0\n"
STATED = HASTY + MEETING.replace("met.all_or_none(refuse)", "met.end()")


@pytest.mark.parametrize("others", ["same", "other", ""])
def test_ranks_on_several_machines_know_each_other_by_a_secret_of_the_environment(tmp_path, others):
    """No disk is shared: each rank has a cache and a directory of its own."""
    between = {"MASTER_ADDR": "127.0.0.2", "LOCAL_WORLD_SIZE": "1"}
    own = [
        {"MEGARECIPES_CACHE": str(tmp_path / name), "MEGARECIPES_SECRET": secret, **between}
        for name, secret in (("a", "same"), ("b", others))
    ]
    ranks = ranks_of(STATED, 2, own=own)
    said = [rank.communicate(timeout=90) for rank in ranks]
    if others == "same":
        assert [json.loads(out)[1] for out, _ in said] == [5, 5], said
    else:
        assert all(rank.returncode for rank in ranks)
        assert "another MEGARECIPES_SECRET than rank 0, or none" in said[1][1], said
    assert not [*tmp_path.rglob("meeting*")]


def test_a_secret_is_read_from_a_file_of_this_account_alone(tmp_path):
    token = b"s" * 32
    places = [tmp_path / "missing" / "place", tmp_path]
    kept = connection.keep_secret(places, "meeting.1.tmp", token)
    assert kept == [places[0] / "meeting.1.tmp", tmp_path / "meeting.1.tmp"]
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    assert left_by_a_crash("meeting.0643a25e.tmp"), "it keeps no run from its directory"
    os.utime(kept[0], (0, 0))
    connection.keep_secret(places[:1], "meeting.2.tmp", token)
    assert [path.name for path in places[0].iterdir()] == ["meeting.2.tmp"], (
        "what a killed start left is gone"
    )
    assert connection.keep_secret([tmp_path], "meeting.1.tmp", token) == [], "nothing is written over"
    assert connection.find_secret([tmp_path], "meeting.1.tmp") == token
    kept[1].chmod(0o640)
    assert connection.find_secret([tmp_path], "meeting.1.tmp") is None
    kept[1].chmod(0o600)
    (tmp_path / "link").symlink_to(kept[1])
    assert connection.find_secret([tmp_path], "link") is None
    if os.geteuid() == 0:
        os.chown(kept[1], 65534, 65534)
        assert connection.find_secret([tmp_path], "meeting.1.tmp") is None
