"""The command under its three launchers: same numbers, clean ends, early refusals, explained failures."""

import json
import shlex
import socket
import sys
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, deepspeed, run, run_ranks
from rank_server import free_port

from ds_configs.plan import HOST, Machine
from launch import pretrain
from launch.console import ends
from launch.experiments.launching import torchrun
from launch.ranks import joining
from launch.records.metrics import read_metrics
from launch.training.start import show_plan

TORCHRUN = torchrun(2)
TINY = ["launch/pretrain.py", "--tiny", "--steps", "4", "--set", "precision=fp32"]


def accelerate(processes):
    launcher = str(Path(sys.executable).parent / "accelerate")
    return [
        launcher,
        "launch",
        "--multi_gpu",
        "--num_processes",
        str(processes),
        "--main_process_port",
        str(free_port()),
    ]


def losses(directory):
    return [r.loss for r in read_metrics(directory / "metrics.jsonl").steps]


@pytest.mark.long
def test_every_launcher_trains_the_same(tmp_path):
    launches = {
        "python": [sys.executable, *TINY, "--ds_config", "zero1"],
        "torchrun": [*TORCHRUN, *TINY, "--ds_config", "ds_configs/zero2.json"],
        "deepspeed": [*deepspeed(2), *TINY, "--ds_config", str(ROOT / "ds_configs" / "pipeline.json")],
        "accelerate": [*accelerate(2), *TINY, "--ds_config", "zero1"],
    }
    found = {}
    for name, command in launches.items():
        done = run([*command, "--out", str(tmp_path / name)])
        assert done.returncode == 0, done.stdout[-3000:]
        found[name] = losses(tmp_path / name)
    assert len(found["python"]) == 4
    for launcher in ("torchrun", "deepspeed", "accelerate"):
        assert found[launcher] == pytest.approx(found["python"], abs=1e-4), launcher
    row = json.loads((tmp_path / "accelerate" / "result.json").read_text())
    assert row["layout"]["dp"] == 2, (
        "on CPUs accelerate --cpu starts a single process, whatever it is asked for"
    )
    row = json.loads((tmp_path / "deepspeed" / "result.json").read_text())
    assert row["layout"]["pp"] == 2 and row["layout"]["dp"] == 1 and row["status"] == "ok"


def test_a_reader_that_goes_away_and_a_notebooks_matplotlib_leave_a_training_alone(tmp_path):
    """Ended as a success after some steps, it would be a loss that no job script sees."""
    command = [sys.executable, *TINY, "--ds_config", "zero1", "--out", str(tmp_path / "run")]
    line = f"{shlex.join(command)} 2>&1 | head -3; exit ${{PIPESTATUS[0]}}"
    done = run(["bash", "-c", line], env={"MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stdout
    assert len(losses(tmp_path / "run")) == 4 and (tmp_path / "run" / "loss.png").exists()
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "ok"


WRONG_LAUNCHES = {
    "WORLD_SIZE=0": "WORLD_SIZE='0': a launcher sets a whole number from 1 to 1000000",
    "RANK=x": "RANK='x': a launcher sets a whole number",
    "RANK=5 WORLD_SIZE=2": "RANK=5 with WORLD_SIZE=2: ranks count from 0 to WORLD_SIZE - 1",
    "RANK=0 WORLD_SIZE=2": "RANK, WORLD_SIZE without LOCAL_RANK, MASTER_ADDR, MASTER_PORT",
    "WORLD_SIZE=64": "WORLD_SIZE without RANK",
    "RANK=0 LOCAL_RANK=-1 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=99999": "MASTER_PORT='99999'",
}


@pytest.fixture
def refusal(monkeypatch, capsys, tmp_path):
    """What pretrain.py refuses in this process, where a launcher sets these variables."""
    monkeypatch.setattr(joining, "postpone_collections", lambda: None)

    def refuse(variables: str, *flags: str) -> str:
        for pair in variables.split():
            monkeypatch.setenv(*pair.split("=", 1))
        monkeypatch.setattr(sys, "argv", [*TINY, "--out", str(tmp_path / "run"), *flags])
        with pytest.raises(SystemExit) as ended:
            ends.run(pretrain.main)
        said = "".join(capsys.readouterr())
        assert ended.value.code == 2 and not (tmp_path / "run").exists(), said
        return said

    return refuse


@pytest.mark.parametrize("variables", WRONG_LAUNCHES)
def test_a_wrong_launch_is_refused(variables, refusal):
    assert WRONG_LAUNCHES[variables] in refusal(variables)


@pytest.mark.parametrize("launcher", ["rank 0", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_two_launches_on_one_port_are_told_apart(tmp_path, launcher):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        rank_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        rank_0 |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        start, env = ([sys.executable], rank_0) if launcher == "rank 0" else (deepspeed(2, port), None)
        done = run([*start, *TINY, "--out", str(tmp_path / "run")], env=env)
    assert done.returncode != 0 and f"port {port}: all processes of a launch meet there" in done.stdout
    assert "--master_port" in done.stdout and "Traceback" not in done.stdout, done.stdout
    assert not (tmp_path / "run").exists()


def test_a_plan_of_two_processes_is_that_of_two_that_are_started(monkeypatch):
    row = ["--tiny", "--ds_config", "zero2"]
    parse = pretrain.build_parser().parse_args
    planned = pretrain.checked_job(parse([*row, "--plan", "--processes", "2"]))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    started = pretrain.checked_job(parse(row))
    assert planned.plan == started.plan and planned.plan.layout.dp == 2


def test_a_plan_on_paper_says_for_what_machine(monkeypatch, capsys):
    machine = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=True)
    monkeypatch.setattr("launch.machine.description.detect_machine", lambda emulate, **on_paper: machine)
    parse = pretrain.build_parser().parse_args
    row = ["--recipe", "megatron_paper_table1/8.3b-mp-dp", "--set", "parallel.dp=null", "--plan"]
    for config, said in (("fp16_dynamic", "planned for GPUs that"), ("zero1", "planned for machines like")):
        job = pretrain.checked_job(parse([*row, "--processes", "64", "--ds_config", config]))
        show_plan(job, [])
        shown = capsys.readouterr().out
        assert "x dp 8 = 64 processes, planned; not started here" in shown and said in shown


OF_FOUR = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29517"


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (["--processes", "2"], "", "--processes without --plan: it plans on paper"),
        (["--processes", "2", "--plan"], OF_FOUR, "--processes 2 with 4 that a launcher started"),
        (["--processes", "0", "--plan"], "", "give a whole number from 1"),
    ],
)
def test_the_number_of_processes_is_a_launcher_s(flags, env, said, refusal):
    assert said in refusal(env, *flags)


@pytest.mark.long
def test_the_partitioned_activations_of_a_json_are_honoured(tmp_path):
    config = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    config["activation_checkpointing"] = {"partition_activations": True, "cpu_checkpointing": True}
    (tmp_path / "partitioned.json").write_text(json.dumps(config))
    settings = ("--set", "parallel.tp=2", "--set", "activation_checkpointing=full")
    for name, path in {"plain": "zero1", "partitioned": str(tmp_path / "partitioned.json")}.items():
        done = run([*TORCHRUN, *TINY, *settings, "--ds_config", path, "--out", str(tmp_path / name)])
        assert done.returncode == 0, done.stdout[-3000:]
    assert losses(tmp_path / "partitioned") == pytest.approx(losses(tmp_path / "plain"), abs=1e-5)


@pytest.mark.parametrize("launcher", ["forked", pytest.param("deepspeed", marks=pytest.mark.long)])
def test_a_refusal_is_said_once_and_starts_nothing(tmp_path, launcher):
    out = tmp_path / "run"
    settings = ("parallel.pp=2", "batch.micro=3", "batch.accumulation=2")
    bad = [*TINY, "--ds_config", "zero3", *(f"--set={setting}" for setting in settings), "--out", str(out)]
    done = run_ranks(2, *bad) if launcher == "forked" else run([*deepspeed(2), *bad])
    assert done.returncode != 0 and "Traceback" not in done.stdout
    assert done.stdout.count("parallel.pp=2 with zero_optimization.stage=3") == 1
    assert done.stdout.count("is not batch.global") == 1, "all problems at once"
    assert not out.exists()


@pytest.mark.long
def test_a_lost_loss_ends_every_rank_with_one_explanation(tmp_path):
    """In bf16 DeepSpeed skips such steps in silence; the first of two ranks has to finish its report."""
    out = tmp_path / "run"
    flags = ("--ds_config", "bf16", "--set", "optimizer.lr=1e30", "--out", str(out))
    done = run([*TORCHRUN, *TINY[:2], *flags])
    assert done.returncode != 0
    assert done.stdout.count("the loss is nan in bf16") == 1 and "optimizer.lr" in done.stdout, done.stdout
    assert json.loads((out / "result.json").read_text())["status"] == "diverged"
    assert (out / "loss.png").exists()
    assert not any((out / "checkpoints").glob("step-*/manifest.json"))


@pytest.mark.long
def test_a_start_that_failed_does_not_block_its_directory(tmp_path):
    small, start = tmp_path / "small.jsonl", [sys.executable, *TINY, "--out", str(tmp_path / "run")]
    small.write_text('{"text": "too little text"}\n' * 3)
    missing, failed = (
        run([*start, "--set", "data.source=jsonl", "--set", f"data.name={name}"])
        for name in ("nope.jsonl", small)
    )
    assert missing.returncode == 2 and "nope.jsonl" in missing.stdout and "Traceback" not in missing.stdout
    assert failed.returncode != 0
    assert run([*start, "--ds_config", "zero1"]).returncode == 0


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_a_failing_rank_is_the_last_on_the_screen(tmp_path, launcher):
    command = deepspeed(2) if launcher == "deepspeed" else TORCHRUN
    flags = (*TINY[1:], "--ds_config", "zero3", "--out", str(tmp_path / "run"))
    done = run([*command, str(WORKERS / "failing_rank.py"), *flags])
    assert done.returncode != 0
    text = done.stdout
    assert "rank 1 of 2 failed" in text and "rank 0 of 2 failed" not in text
    after = text[text.rindex("ValueError: planted failure of rank 1") :].splitlines()[1:]
    ours = [line for line in after if line.strip() and "launch.py" not in line and set(line.strip()) != {"="}]
    assert ours == [], f"only the launcher's own lines follow: {ours}"
    assert "planted failure" in (tmp_path / "run" / "error-rank-1.txt").read_text()


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_thirty_launches_end_with_0(tmp_path):
    """gloo aborts about one process in forty while Python finalises: the processes end before."""
    for i in range(30):
        done = run([*deepspeed(2), *TINY, "--ds_config", "zero2", "--out", str(tmp_path / str(i))])
        assert done.returncode == 0, f"launch {i}: {done.returncode}\n{done.stdout[-3000:]}"
