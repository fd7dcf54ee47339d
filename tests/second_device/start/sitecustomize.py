"""Give every Python process with DS_ACCELERATOR=board and this folder on PYTHONPATH the second device.

DeepSpeed chooses its accelerator where `deepspeed.accelerator.real_accelerator` is first asked. The device is
registered when that module is loaded, so that programs that never load DeepSpeed pay nothing.
"""

import importlib.abc
import importlib.util
import os
import sys

CHOOSER = "deepspeed.accelerator.real_accelerator"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module that chooses, and has it choose the second device."""

    def find_spec(self, name, path, target=None):
        if name != CHOOSER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            from second_device.accelerator import BoardAccelerator

            module.ds_accelerator = BoardAccelerator()

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("DS_ACCELERATOR") == "board" and not any(isinstance(f, Finder) for f in sys.meta_path):
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.meta_path.insert(0, Finder())
