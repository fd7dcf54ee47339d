"""Corrections of DeepSpeed, one file each; versions.py has the releases that are taken.

Each docstring names the release, the symptom, upstream's issue, and a test that fails once DeepSpeed is
corrected.

    zero0                       stage 0 in fp16 and bf16 does not train as the JSON says, and its gradient
                                norm in fp32 is too small on a CPU
    short_steps                 ZeRO 1 to 3 copy gradients, and look for infinities, more often than needed
                                (before 0.19.8 DeepSpeed's own step stays, except that of BF16_Optimizer)
    freed_gradients             ZeRO-2 frees a gradient larger than the bucket while it is reduced
    whole_buffers               half precision rounds the buffers of a module (0.18.9 at least)
    flat_weights                ZeRO 1 and 2 cannot gather the stepped weights (0.18.9 only)
    loss_scale                  a growing loss scale halves the gradients of its step; an overflow at the
                                smallest one is a bare Exception
    cpu_adam_bias_correction    a resumed CPU Adam differs in the last bits

Corrections at the start and end of a process are in `launch/machine`, which imports nothing from here:

    processes.start_processes   collectives on a CPU compile for 20 s and leave 66 MiB per rank in /dev/shm
    compiled_ops                torch's lock file of a killed compilation blocks every later run
    ending.clean_exit           gloo aborts about one run in forty while Python finalises
"""
