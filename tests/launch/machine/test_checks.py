"""The checks that every start of a run makes."""

from ds_configs.plan import GPU
from launch.machine import checks
from launch.ranks import processes
from recipes import catalog


def test_how_much_disk_the_checkpoints_take():
    def bytes_of(*settings):
        return checks.checkpoint_bytes(catalog.load("default/sotu", [f"run.{s}" for s in settings]))

    size, _ = bytes_of()
    assert size == 12 * 13_891_584
    assert bytes_of("save_every=0", "save_last=false", "keep_checkpoints=null")[1] == 0
    assert bytes_of("save_every=0", "save_last=true", "keep_checkpoints=null")[1] == 1
    assert bytes_of("save_every=100", "save_last=true", "keep_checkpoints=null")[1] == 3, "300 steps"
    assert bytes_of("save_every=7", "save_last=true", "keep_checkpoints=null")[1] == 43
    assert bytes_of("save_every=7", "save_last=true", "keep_checkpoints=2")[1] == 3, (
        "one until the next is there"
    )
    assert bytes_of("save_every_minutes=5", "keep_checkpoints=null")[1] is None


def test_rank_0_alone_has_files_for_all_ranks():
    """At 4,096 ranks it had 8,201 open (docs/benchmarks.md)."""
    assert checks.files_needed(8) == 160 and checks.files_needed(8, 7) == 144
    assert 8_201 < checks.files_needed(4096) == 8_704
    assert checks.files_needed(4096, 1) == 512


def test_the_start_runs_the_quick_part(monkeypatch, tmp_path):
    functions = checks.quick(catalog.load(), tmp_path)
    assert {"packages", "variables", "disk"} == set(functions), "on a CPU"
    with monkeypatch.context() as on_gpu:
        on_gpu.setattr(processes, "device", lambda: GPU)
        functions = checks.quick(catalog.load(), tmp_path)
        assert {"packages", "GPU kernels", "shared memory", "variables", "disk"} == set(functions)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "disk" not in checks.quick(catalog.load(), tmp_path), "rank 0 writes"
