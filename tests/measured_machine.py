"""Rates of a machine of two cores without a GPU, as if they had been measured."""

from launch.machine.rates import Rates

TWO_CORES = Rates(
    accelerator="cpu", accelerators=0, cores=2, tflops={"fp32": 0.2, "bf16": 2.0},
    layer_tflops={"fp32": 0.2, "bf16": 1.0}, attention_tflops={"fp32": 0.1, "bf16": 0.05}, memory_gb_s=20.0,
    layer_gb_s=5.0, host_gb_s=20.0, copy_gb_s=10.0, link_gb_s=1.0, start_us=3.0, memory_bytes=16e9,
    host_bytes=16e9, context_bytes=4e8,
)  # fmt: skip
