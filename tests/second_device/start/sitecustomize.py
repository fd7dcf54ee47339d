"""Give every Python process the second device, with DS_ACCELERATOR=board, and this and tests/ on PYTHONPATH.

DeepSpeed chooses its accelerator where `deepspeed.accelerator.real_accelerator` is first asked. The device is
registered when that module is loaded, so that programs that never load DeepSpeed pay nothing. accelerate and
transformers have lists of devices, which are changed when they are loaded.
"""

import importlib.abc
import importlib.util
import os
import sys


def choose(module):
    from second_device.accelerator import BoardAccelerator

    module.ds_accelerator = BoardAccelerator()


def add_device(state):
    """Have `accelerate.state` take the device of a rank for this one, as it takes CUDA's.

    It may be loaded before DeepSpeed, whose modules cannot be imported from here then.
    """
    prepare = state.PartialState._prepare_backend

    def prepare_backend(self, cpu=False, *how, **more):
        if cpu:
            return prepare(self, cpu, *how, **more)
        import torch

        self.device = torch.device("board", torch.board.current_device())
        return "bccl", state.DistributedType.MULTI_GPU

    state.PartialState._prepare_backend = prepare_backend


def has_bf16(module):
    module.is_torch_bf16_gpu_available = lambda: True


AFTER = {
    "deepspeed.accelerator.real_accelerator": choose,
    "accelerate.state": add_device,
    "transformers.utils.import_utils": has_bf16,
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `AFTER`, and has each changed once it is loaded."""

    def find_spec(self, name, path, target=None):
        change = AFTER.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("DS_ACCELERATOR") == "board" and not any(isinstance(f, Finder) for f in sys.meta_path):
    sys.meta_path.insert(0, Finder())
