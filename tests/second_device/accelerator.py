"""DeepSpeed's accelerator over the second device: asynchronous as CUDA's, with the CPU's compiled ops."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from second_device import board


class BoardAccelerator(CPU_Accelerator):
    """Answers by `torch.board` what a GPU's answers by `torch.cuda`."""

    def __init__(self) -> None:
        super().__init__()
        self._name, self._communication_backend_name = "board", "bccl"

    def _no(self) -> bool:
        return False

    is_synchronized_device = use_host_timers = resolves_data_dependency = handles_memory_backpressure = _no

    def __getattribute__(self, name: str) -> Any:
        if name in _AS_TORCH:
            return getattr(torch.board, name)
        return super().__getattribute__(name)

    def create_op_builder(self, class_name: str) -> Any:
        """Return the CPU's builder, but none for collectives through shared memory, which no GPU has."""
        return None if class_name == "ShareMemCommBuilder" else super().create_op_builder(class_name)

    def device_name(self, device_index: int | None = None) -> str:
        return "board" if device_index is None else f"board:{device_index}"

    def current_device_name(self) -> str:
        return f"board:{torch.board.current_device()}"

    def default_generator(self, device_index: int) -> torch.Generator:
        return board.C.default_generator(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        return board.C.memory()["limit"]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.board.mem_get_info()[0]

    def is_fp16_supported(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def pin_memory(
        self, tensor: torch.Tensor, make_copy: bool = True, match_shape: bool = True
    ) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "board"

    def visible_devices_envs(self) -> list[str]:
        return ["BOARD_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        current_env["BOARD_VISIBLE_DEVICES"] = ",".join(map(str, local_accelerator_ids))


_AS_TORCH = frozenset(
    (
        *("device", "set_device", "current_device", "device_count", "synchronize"),
        *("Stream", "stream", "current_stream", "default_stream", "Event"),
        *("manual_seed", "manual_seed_all", "initial_seed", "get_rng_state", "set_rng_state"),
        *("default_generators", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"),
        *("memory_reserved", "max_memory_reserved", "memory_stats", "empty_cache"),
    )
)


def _constructor(dtype: torch.dtype) -> property:
    def make(self: BoardAccelerator) -> Any:
        return lambda data=(), **more: torch.tensor(
            data, dtype=dtype, device=self.current_device_name(), **more
        )

    return property(make)


for _name, _dtype in {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.double,
    "FloatTensor": torch.float,
    "HalfTensor": torch.half,
    "IntTensor": torch.int,
    "LongTensor": torch.long,
}.items():
    setattr(BoardAccelerator, _name, _constructor(_dtype))
