"""plan.py cluster: what it shows, writes and refuses."""

import re
import subprocess
import sys

import pytest
from cluster_jobs import CASES, job, parsed, text
from launching import ROOT, run

from launch import plan as command
from launch.console import ends
from launch.planning.clusters import cluster_command, files
from recipes.problems import ProblemsError

REFUSED = {
    "--recipe parallel_kinds/3d --gpus-per-node 3 --nodes 3": "give --gpus-per-node 2 --nodes 4",
    "--recipe parallel_kinds/3d --gpus-per-node 4 --nodes 1": "give --nodes 2",
    "--recipe parallel_kinds/3d --gpus-per-node 8 --nodes 2": "give --nodes 1",
    "--recipe a100_blog_table1/3.9b --nodes 33": "512 processes on 33 nodes of 16 GPUs",
    "--recipe openwebtext/gpt2-124m --hardware a100-80x8 --nodes 3": "24 is not|dp=24",
    "--recipe parallel_kinds/3d": "give --hardware, e.g. a100-80x8, or --gpus-per-node 8",
    "--recipe parallel_kinds/3d --hardware dgx3": "did you mean dgx2",
    f"{CASES['open']} c": "the layout takes 2, each once; name 2, or give --nodes 3",
    "--recipe parallel_kinds/3d --gpus-per-node 4 --hosts a a": "names 2, 1 different",
    "--recipe parallel_kinds/4d": "no such recipe",
    f"{CASES['unknown']} --run ../../x": "--run ../../x: .* which .. would leave",
    f"{CASES['unknown']} --run /": "a run has a directory of its own",
    "--recipe parallel_kinds/3d --gpus-per-node 8 --ds_config zero3": "stage",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_does_not_fill_the_nodes_is_refused_with_the_fix(line):
    with pytest.raises(ValueError, match=REFUSED[line]):
        job(line)


@pytest.mark.parametrize("flags", ["--gpus-per-node 4 --nodes 1", "--gpus-per-node 8 --nodes 2"])
def test_the_fix_is_accepted(flags):
    """The --nodes of the refusal, typed as it stands there."""
    with pytest.raises(ProblemsError) as refused:
        job(f"--recipe parallel_kinds/3d {flags}")
    (fix,) = re.findall("give (--nodes [0-9]+)$", str(refused.value).strip())
    assert job(f"--recipe parallel_kinds/3d {flags.partition(' --nodes')[0]} {fix}").layout.world == 8


def test_without_out_everything_is_shown_and_nothing_written(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cluster_command.run(parsed(CASES["3d"])) == 0
    told = capsys.readouterr().out
    assert "deepspeed --hostfile hosts --num_nodes 16 --num_gpus 4 launch/pretrain.py" in told
    assert 'torchrun --nnodes 16 --nproc_per_node 4 --node_rank "$NODE_RANK" --master_addr node-0' in told
    assert "60-63" in told and "no kernels for sm_70" in told
    assert not list(tmp_path.iterdir())


def test_files_are_written_and_written_again(tmp_path, capsys):
    out = tmp_path / "a" / "b"
    cluster_command.run(parsed(f"{CASES['open']} --out {out}"))
    assert {path.name for path in out.iterdir()} == {*files.NAMES}
    assert (out / "hosts").read_text().splitlines()[1:] == ["a slots=8", "b slots=8"]
    cluster_command.run(parsed(f"{CASES['open'].replace('--nodes 2', '--nodes 4')} c d --out {out}"))
    assert "d slots=8" in (out / "hosts").read_text()
    before = [(out / name).read_bytes() for name in files.NAMES]
    for other in (CASES["3d"], f"{CASES['open']} --run runs/second"):
        with pytest.raises(ProblemsError, match="hosts exists already: only the same job's files") as refused:
            cluster_command.run(parsed(f"{other} --out {out}"))
        assert len(refused.value.problems) == len(files.NAMES)
    assert before == [(out / name).read_bytes() for name in files.NAMES]


@pytest.mark.parametrize("name", files.NAMES)
def test_no_file_of_another_is_overwritten(name, tmp_path):
    (tmp_path / name).write_text("mine\n")
    with pytest.raises(ProblemsError, match=f"{name} exists already"):
        cluster_command.run(parsed(f"{CASES['open']} --out {tmp_path}"))
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine\n"


def test_deepspeed_reads_the_hostfile():
    from deepspeed.launcher.runner import _parse_hostfile

    assert dict(_parse_hostfile(text("open", "hosts").splitlines())) == {"a": 8, "b": 8}


def test_steps_and_tiny_are_carried_into_what_is_launched():
    there = job("--recipe parallel_kinds/3d --gpus-per-node 8 --tiny --steps 7 --set seed=3")
    assert there.command.endswith("--set seed=3 --tiny --steps 7")
    assert there.run_directory == "runs/parallel_kinds-3d-tiny-3d"
    assert job("3d").command.count("--steps") == 0


def test_other_hardware_has_its_own_number_of_gpus():
    there = job("--recipe a100_blog_table1/3.9b --hardware v100-32x4")
    assert (there.nodes, there.gpus) == (128, 4)
    assert job("--recipe a100_blog_table1/3.9b").gpus == 16


def test_an_open_degree_is_filled_by_the_nodes():
    assert job("open").layout.dp == 16
    assert job("--recipe openwebtext/gpt2-124m --hardware a100-80x8").layout.dp == 8


def test_the_wheel_has_kernels_for_the_gpu():
    """By PyTorch's release matrix of 2.13: V100 and older are in cu126 alone, Blackwell in CUDA 13 alone."""
    for capability in (50, 60, 70):
        assert files.wheel_for(capability).index == "https://download.pytorch.org/whl/cu126"
    for capability in (75, 80, 86, 89, 90, 100, 120, None):
        assert files.wheel_for(capability).index is None


def test_the_image_is_of_the_gpu_and_of_no_root():
    old, new, unknown = (text(case, "Dockerfile") for case in ("3d", "open", "unknown"))
    assert "FROM nvidia/cuda:12.6.3-devel" in old and "TORCH_CUDA_ARCH_LIST=7.0" in old
    assert re.search(r"^RUN pip install --index-url https://download.pytorch.org/whl/cu126 ", old, re.M)
    assert "FROM nvidia/cuda:13" in new and "--index-url" not in new
    assert "Nobody knows the GPU" in unknown and "TORCH_CUDA_ARCH_LIST" not in unknown
    for image in (old, new, unknown):
        assert image.index("USER 10001") > image.index("pip install --no-deps -e .")
        assert {"g++", "ninja-build", "libaio-dev"} <= {*image.split()}


def test_the_pins_are_read_from_the_requirements():
    """What the Dockerfile's shell makes of requirements.txt."""
    found = subprocess.run(
        ["grep", "-oE", "^torch==[0-9.]+", "requirements.txt"], cwd=ROOT, capture_output=True, text=True
    )
    assert re.fullmatch(r"torch==2\.13\.\d+\n", found.stdout)


def test_it_starts_without_torch(tmp_path):
    program = f"""
import sys
sys.argv = ["plan.py", *{(CASES["open"] + f" --out {tmp_path}").split()!r}]
from cluster_jobs import parsed
from launch import plan as command
from launch.console import ends
from launch.planning.clusters import cluster_command
cluster_command.run(parsed(" ".join(sys.argv[1:])))
sys.exit(sorted({{"torch", "deepspeed", "numpy", "matplotlib"}} & set(sys.modules)) or 0)
"""
    done = run([sys.executable, "-c", program], env={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_command_refuses_in_a_sentence(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan.py", "cluster", "--recipe", "parallel_kinds/3d"])
    with pytest.raises(SystemExit) as ended:
        ends.run(command.main)
    assert ended.value.code == 2 and "--gpus-per-node 8" in capsys.readouterr().err
