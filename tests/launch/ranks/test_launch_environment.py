"""Slurm's, Open MPI's and PMI's variables tell each process its place, or are refused."""

import contextlib
import os

import pytest
from srun_task import srun_environment

from launch import pretrain
from launch.compare_layouts import refuse_tasks
from launch.ranks import ending, joining, processes
from launch.ranks.launch_environment import (
    carried,
    first_host,
    forgotten_srun,
    missing_variables,
    sees_own_device,
    tasks_per_node,
)
from launch.ranks.meeting import Meeting
from launch.ranks.watchdog import flight_recorder
from recipes.problems import Problem, ProblemsError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
BATCH = {  # a batch script of a job of eight tasks, and the shell of salloc
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29400",
}


def test_one_process_needs_torchs_four_variables_alone():
    four = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611"}
    assert missing_variables(four) == {"LOCAL_RANK": "0"}
    assert missing_variables({**four, "LOCAL_RANK": "0"}) == {}
    assert missing_variables({**four, "WORLD_SIZE": "2"}) == {}, "which of a machine's it is, nobody says"


def test_lists_of_slurm_are_read():
    assert first_host("node[003-006,010],gpu-b[1-2]") == "node003"
    assert first_host("login") == first_host("login,a[1-2]") == "login"
    assert first_host("r[1-2]n[09-10]-ib") == "r1n09-ib"
    assert tasks_per_node("4(x2),3") == [4, 4, 3]


def test_a_task_of_srun_finds_its_place():
    assert missing_variables(srun_environment(5, 8, 4)) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "node001",
        "MASTER_PORT": str(15_000 + 4711 * 8 % 16_000),
    }
    other_job = missing_variables(srun_environment(5, 8, 4, job=4712))
    assert other_job["MASTER_PORT"] != missing_variables(srun_environment(5, 8, 4))["MASTER_PORT"]
    assert missing_variables(srun_environment(1, 4, 4))["MASTER_ADDR"] == "127.0.0.1", "one machine"
    assert missing_variables(srun_environment(0, 1, 1)) == {}, "one task is a plain python"


def test_what_a_job_script_chose_stays():
    chosen = {"MASTER_ADDR": "ib0-node001", "MASTER_PORT": "6000", "WORLD_SIZE": "8"}
    assert {*missing_variables({**srun_environment(5, 8, 4), **chosen})} == {
        *("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }


def test_the_step_counts_and_not_its_job():
    """`srun --preserve-env` leaves the job's numbers in the others."""
    job = {"SLURM_NTASKS": "16", "SLURM_TASKS_PER_NODE": "4(x4)", "SLURM_JOB_NODELIST": "node[001-004]"}
    assert missing_variables({**srun_environment(5, 8, 4), **job}) == missing_variables(
        srun_environment(5, 8, 4)
    )


def test_uneven_nodes_have_their_own_size():
    environ = {**srun_environment(6, 8, 4), "SLURM_STEP_TASKS_PER_NODE": "5,3", "SLURM_LOCALID": "1"}
    assert missing_variables(environ)["LOCAL_WORLD_SIZE"] == "3"


@pytest.mark.parametrize("step", [None, "batch", "4294967290", "4294967291"])
def test_a_batch_script_is_one_process_whatever_its_job_has(step):
    environ = BATCH if step is None else {**BATCH, "SLURM_STEP_ID": step}
    assert missing_variables(environ) == {}
    assert "`srun python …` starts one for each" in forgotten_srun(environ)
    assert forgotten_srun({**BATCH, "SLURM_NTASKS": "1"}) is None


def test_a_command_typed_into_a_shell_of_srun_is_one_process():
    shell = {**srun_environment(0, 8, 4), "SLURM_PTY_PORT": "4000"}
    assert missing_variables(shell, at_terminal=True) == {}
    assert missing_variables(shell, at_terminal=False)["WORLD_SIZE"] == "8", "a step started from that shell"


def test_torchrun_under_srun_keeps_its_own_variables():
    """One task a node, and one of mpirun's likewise."""
    assert missing_variables({**srun_environment(1, 2, 1), **TORCHRUN}) == {}
    orted = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert missing_variables({**orted, **local, **TORCHRUN}) == {}
    assert missing_variables(TORCHRUN) == {}


def test_ranks_of_mpi_find_their_place():
    for environ, rank in ((OPEN_MPI, "3"), (HYDRA, "1")):
        found = missing_variables(environ)
        assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == (rank, "4", rank)
        assert found["MASTER_ADDR"] == "127.0.0.1" and found["LOCAL_WORLD_SIZE"] == "4"
    mvapich = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
    assert missing_variables(mvapich) == missing_variables(OPEN_MPI)
    cray = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    assert missing_variables(cray) == missing_variables(HYDRA)


def test_a_start_looks_for_its_place_where_any_launcher_has_left_a_variable(monkeypatch):
    mvapich = {name.replace("OMPI", "MV2"): value for name, value in OPEN_MPI.items()}
    for environ, size in (({}, None), (OPEN_MPI, "4"), (mvapich, "4"), (HYDRA, "4"), (of_srun(), "8")):
        monkeypatch.setattr(os, "environ", {**environ})
        processes.check_launch()
        assert os.environ.get("WORLD_SIZE") == size
    for environ in {"PMIX_RANK": "1"}, {"WORLD_SIZE": "2"}, {"MASTER_PORT": "x"}, {"LOCAL_RANK": "-1"}:
        monkeypatch.setattr(os, "environ", {**environ})
        with pytest.raises(ProblemsError, match=next(iter(environ))):
            processes.check_launch()


def test_mpi_over_machines_takes_the_address_of_rank_0():
    environ = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert missing_variables({**environ, "MASTER_ADDR": "a"})["MASTER_PORT"] == "29500"


def test_mpi_counts_before_the_tasks_of_slurm_that_carry_it():
    orted = srun_environment(1, 2, 1)
    assert missing_variables({**orted, **OPEN_MPI})["RANK"] == "3"
    assert missing_variables({**orted, **HYDRA})["RANK"] == "1"
    pmi2 = {"PMI_RANK": "5", "PMI_SIZE": "8"}
    assert missing_variables({**srun_environment(5, 8, 4), **pmi2})["LOCAL_RANK"] == "1", "srun --mpi=pmi2"


def of_srun(lost: str = "", **changed: str) -> dict[str, str]:
    """The variables of task 5 of 8, four a machine."""
    environ = {**srun_environment(5, 8, 4), **changed}
    environ.pop(lost, None)
    return environ


def without(environ: dict[str, str], lost: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name != lost}


# `srun -n 2 torchrun --nproc_per_node 4`: each would write into the run directory.
APART = {**srun_environment(1, 2, 1), **without(TORCHRUN, "GROUP_WORLD_SIZE"), "WORLD_SIZE": "4"}
LEFT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # by a shell: each task would take itself for all
TWO_MACHINES = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
REFUSED = (
    ({**APART, "GROUP_WORLD_SIZE": "1"}, "srun started 2 launches of 4.*--nnodes"),
    ({**APART, "CROSS_SIZE": "1"}, "srun started 2 launches of 4.*--nnodes"),
    (of_srun(**LEFT), "unset RANK, LOCAL_RANK, WORLD_SIZE"),
    (of_srun(**LEFT) | {"WORLD_SIZE": "8"}, "srun says 5"),
    (of_srun(WORLD_SIZE="4"), "WORLD_SIZE=4 with SLURM_STEP_NUM_TASKS=8, SLURM_PROCID=5: srun says 8; unset"),
    (of_srun(SLURM_PROCID="8"), "contradict each other.*unset"),
    (of_srun(SLURM_LOCALID="4"), "contradict each other.*unset"),
    (of_srun(SLURM_NODEID="2"), "contradict each other.*unset"),
    (of_srun(SLURM_STEP_TASKS_PER_NODE="4"), "contradict each other.*unset"),
    (of_srun(SLURM_STEP_TASKS_PER_NODE="4,5"), "contradict each other.*unset"),
    (of_srun(SLURM_STEP_NUM_TASKS="x"), "SLURM_STEP_NUM_TASKS='x': srun sets.*unset"),
    # a part of them, as in a container that takes only some of them along
    *((of_srun(lost), lost) for lost in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")),
    *((without(OPEN_MPI, lost), lost) for lost in OPEN_MPI),
    *((without(HYDRA, lost), lost) for lost in HYDRA),
    ({"PMIX_RANK": "1"}, "PMIX_RANK"),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "contradict each other"),
    (TWO_MACHINES, "mpirun -x MASTER_ADDR=HOST"),
    ({**HYDRA, "MPI_LOCALNRANKS": "2"}, "mpiexec -genv MASTER_ADDR HOST"),
)


@pytest.mark.parametrize(("environ", "said"), REFUSED, ids=[said[:40] for _, said in REFUSED])
def test_places_that_cannot_be_are_refused(environ, said):
    with pytest.raises(ProblemsError, match=f"(?s){said}"):
        missing_variables(environ)


def test_a_command_that_starts_its_own_processes_is_started_once():
    with pytest.raises(ProblemsError, match="starts its processes itself, and srun started it 8 times"):
        refuse_tasks(srun_environment(5, 8, 4))
    for once in ({}, BATCH, srun_environment(0, 1, 1)):
        refuse_tasks(once)


def test_a_plain_python_is_left_alone():
    assert missing_variables({}) == {} == missing_variables({"MASTER_ADDR": "a", "MASTER_PORT": "1"})


def test_secrets_are_not_told_to_other_machines():
    environ = {"HF_HOME": "/scratch", "HF_TOKEN": "secret", "MEGARECIPES_CACHE": "c", "PATH": "p"}
    environ |= {"GLOO_SOCKET_IFNAME": "ib0", "MEGARECIPES_LOCAL_RANK": "3"}
    assert {*carried(environ)} == {"HF_HOME", "MEGARECIPES_CACHE", "GLOO_SOCKET_IFNAME"}


def test_one_device_is_taken_for_a_rank_s_own_only_where_something_bound_it():
    """torchrun's ranks see alike: one device there is one for all of them."""
    visible = ["CUDA_VISIBLE_DEVICES"]
    one, two = {"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert sees_own_device({"SLURM_GPUS_PER_TASK": "1"}, visible)
    assert sees_own_device({"SLURM_GPU_BIND": "verbose,single:1"}, visible)
    assert not sees_own_device({"SLURM_GPU_BIND": "none"}, visible)
    assert sees_own_device(one, visible), "a wrapper that chose it"
    assert not sees_own_device(two, visible) and not sees_own_device({}, visible)
    assert not sees_own_device({**one, **TORCHRUN}, visible)


@pytest.mark.parametrize(("tp", "before", "after"), [(2, None, "1"), (1, None, None), (2, "8", "8")])
def test_tensor_parallelism_orders_what_a_gpu_starts(monkeypatch, tp, before, after):
    """Set before ranks take their devices, unless the user has set it."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(joining, "own_place", lambda: seen.append(os.environ.get(name)))
    monkeypatch.setattr(processes, "start_processes", lambda store: None)
    monkeypatch.setattr(ending, "clean_exit", contextlib.nullcontext)
    seen = []
    with joining.joined(Meeting(), tp, admit=lambda: "admitted") as admitted:
        assert admitted == "admitted" and seen == [after]


def test_a_training_by_tensor_ranks_says_so_before_it_asks_cuda_for_anything(monkeypatch):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "8")
    asked = []

    def detect_machine(*how, **more):
        asked.append(os.environ.pop(name, None))
        raise ProblemsError([Problem("x", "asked", "enough", "stop")])

    monkeypatch.setattr(pretrain.description, "detect_machine", detect_machine)
    for flags in ("zero1", "zero1 --set parallel.tp=2", "3d", "no"):
        args = pretrain.build_parser().parse_args(["--tiny", "--ds_config", *flags.split()])
        with pytest.raises(ProblemsError):
            pretrain.checked_job(args)
    assert asked == [None, "1", "1"], "a JSON that is not there asks for nothing"


def test_the_flight_recorder_is_on_unless_the_user_says_otherwise(tmp_path):
    """By either name: torch lets the newer one stand before the older."""
    own = flight_recorder({}, tmp_path)
    assert own["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "hang-collectives-rank-")
    assert {*own} == {"TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"}
    said = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
    assert {*flight_recorder(said, tmp_path)} == {"TORCH_FR_DUMP_TEMP_FILE"}
