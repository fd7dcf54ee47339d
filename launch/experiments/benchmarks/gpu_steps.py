"""The steps of `benchmark.py gpu`, each some minutes on one GPU, what matters most first."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch

from ds_configs.resolver import resolve
from launch.console.text_table import table
from launch.experiments.benchmarks.gpu_context import CannotRunHere, Context, Goal, Outcome, speeds
from launch.experiments.benchmarks.specification import Specification
from launch.experiments.benchmarks.step_speed import summarised
from launch.experiments.benchmarks.turns import ROOT, Worker, WorkerFailed, ended
from launch.machine import abilities, measuring
from launch.planning import memory_fit
from modeling import cost

GPT, BERT = "openwebtext/gpt2-124m", "wikipedia/bert-336m"
LARGE, LARGEST = "a100_blog_table4/1.2b", "jeanzay_megatron_max_size_32gb/193b-g256"
MEDIUM = ("sber_path_to_13b/03-medium", "sber_path_to_13b/05-gpt3-medium")
SPARSE = "sber_path_to_13b/07-gpt3-large-sparse"
LAST = 400  # characters of what a failed command said
RATE_GOAL, TIMES_GOAL = 0.55, 1.5  # share of the matrix rate; of transformers' seconds under the same JSON
CONFIGS = ("zero1", "zero3_offload", "zero0", "zero2", "zero3", "zero2_offload", "zero3_offload_optimizer")
SMALL = ("batch.global=64",)  # of the row that GPU users run first
FEW = ("batch.global=16", "batch.micro=16")
PLAIN = ("precision=bf16", "dropout.attention=0")


@dataclass(frozen=True)
class Step:
    name: str
    title: str
    run: Callable[[Context], Outcome]


def rates(context: Context) -> Outcome:
    measured = asdict(measuring.measured())
    torch.cuda.empty_cache()  # of this process, for those of the next steps
    return Outcome(measured, table(measured.items()))


def runs(context: Context) -> Outcome:
    """Some 30 steps of every configuration that one GPU takes, in both families and by `transformers`."""
    skipped = {"pipeline", "3d", "zero_infinity"}  # several processes; a disk
    configs = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json") if path.stem not in skipped)
    configs.sort(key=lambda name: CONFIGS.index(name) if name in CONFIGS else len(CONFIGS))
    cases = [("default/sotu", config) for config in context.few(configs)]
    cases += [("bert/sotu", config) for config in context.few(("zero1", "zero3"))]
    if not context.walks:
        cases.append(("transformers", "zero3"))
    found: dict[str, Any] = {}
    for recipe, config in cases:
        name, settings = f"{recipe}, {config}", ["run.save_every=0", "run.save_last=false"]
        if recipe == "transformers":
            recipe = "default/sotu"
            settings += ["model.implementation=transformers"]
        emulated = ["--emulate_fp16"] if context.walks and "fp16" in config else []
        shared = ["--recipe", recipe, "--ds_config", config, "--steps", "2" if context.walks else "30"]
        out = context.folder / "runs" / name.replace("/", "-").replace(", ", "-")
        shutil.rmtree(out, ignore_errors=True)
        done = context.pretrain(out, settings, *shared, *emulated)
        if done.returncode:
            found[name] = {"failed": f"code {done.returncode}: {done.stderr.strip()[-LAST:]}"}
            continue
        result = json.loads((out / "result.json").read_text(encoding="utf-8"))
        found[name] = {"validation loss": result["losses"]["validation"]["loss"]}
        found[name]["s per step"] = result["speed"]["seconds_per_step"]
        context.say(f"{name}: {found[name]}")
    return plainly(found)


def plainly(found: dict[str, Any]) -> Outcome:
    """A line for each."""

    def shown(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = ((name, ", ".join(f"{k} {shown(v)}" for k, v in each.items())) for name, each in found.items())
    return Outcome(found, table(lines))


def beside(first: Outcome, second: Outcome) -> Outcome:
    """Both, the first above."""
    return Outcome([first.found, second.found], f"{first.said}\n\n{second.said}", second.goals)


def row_1_2b(context: Context) -> Outcome:
    """The row as it stands (fp16, recomputed, dropout), and in bf16 with all activations kept."""
    kept = context.alone(
        LARGE, "precision=bf16", "activation_checkpointing=none", "dropout.hidden=0", "dropout.attention=0"
    )
    specs = [
        context.spec("bf16, compiled", LARGE, *kept, ds_config="zero1", compiled=True),
        context.spec("bf16, eager", LARGE, *kept, ds_config="zero1"),
        context.spec("bf16, transformers", LARGE, *kept, system="transformers", ds_config="zero1"),
        context.spec("bf16, bare loop", LARGE, *kept, system="bare", ds_config="zero1", compiled=True),
    ]
    published = context.alone(LARGE) if not context.walks else context.alone(LARGE, "precision=bf16")
    specs += [
        context.spec("the row, compiled", LARGE, *published, ds_config="zero1", compiled=True),
        context.spec("the row, transformers", LARGE, *published, system="transformers", ds_config="zero1"),
    ]
    measured = context.measure(specs)
    rows = {row.name: row for row in summarised(measured)}

    def share(name: str) -> float | None:
        return rows[name].share if name in rows else None

    def times(ours: str, theirs: str) -> float | None:
        return rows[theirs].seconds / rows[ours].seconds if {ours, theirs} <= rows.keys() else None

    kept_share, row_share = share("bf16, compiled"), share("the row, compiled")
    with_repeated = row_share and row_share * recomputed(specs[4])
    goals = [
        Goal("share of the matrix rate, bf16, nothing recomputed", RATE_GOAL, kept_share),
        Goal("share with the recomputed forward counted, as the row stands", RATE_GOAL, with_repeated),
        Goal("times transformers' speed, bf16", TIMES_GOAL, times("bf16, compiled", "bf16, transformers")),
        Goal("times transformers' speed, as the row stands", TIMES_GOAL,
             times("the row, compiled", "the row, transformers")),
    ]  # fmt: skip
    return speeds(measured, goals)


def recomputed(spec: Specification) -> float:
    """Operations of a step with those that recomputation repeats, over those without."""
    recipe = spec.load()
    count = partial(cost.exact_flops_per_step, recipe.model, recipe.sequence_length, 1)
    return count(checkpointing=recipe.checkpoint_interval > 0) / count()


def rows_345m(context: Context) -> Outcome:
    specs = []
    for recipe in MEDIUM:
        settings = context.alone(recipe, "precision=bf16")
        name = recipe.partition("/")[2]
        specs += [
            context.spec(f"{name}, compiled", recipe, *settings, ds_config="zero1", compiled=True),
            context.spec(
                f"{name}, transformers", recipe, *settings, system="transformers", ds_config="zero1"
            ),
        ]
    return speeds(context.measure(context.few(specs)))


def attention(context: Context) -> Outcome:
    """Which kernels attention takes in training: by profiles of GPT-2, and of a BERT with padded samples."""
    dropout = context.alone(GPT, *SMALL, "dropout.attention=0.1")
    specs = [
        context.spec("GPT-2", GPT, *context.alone(GPT, *SMALL), ds_config="zero1"),
        context.spec("GPT-2, dropout 0.1", GPT, *dropout, ds_config="zero1"),
        context.spec("padded BERT", BERT, *context.alone(BERT, *FEW), ds_config="zero1"),
    ]
    measured = context.measure(specs, traced=True)
    found = {each.spec.name: {"kernels": each.profile["attention"]} for each in measured if each.profile}
    return beside(plainly(found), speeds(measured))


def precisions(context: Context) -> Outcome:
    """bf16, and fp16 with the dynamic loss scaler, under ZeRO 0-3 and offload."""
    chosen = product(context.few(CONFIGS[:6]), ("bf16", "fp16"))
    specs = [
        context.spec(
            f"{config}, {kind}", GPT, *context.alone(GPT, *SMALL, f"precision={kind}"), ds_config=config
        )
        for config, kind in chosen
    ]
    return speeds(context.measure(specs))


def compiling(context: Context) -> Outcome:
    """Eager against compiled, with the number of graphs and what broke them."""
    cases = [("GPT-2", GPT, context.alone(GPT, *SMALL), f"zero{stage}") for stage in (1, 2, 3)]
    cases.insert(1, ("padded BERT", BERT, context.alone(BERT, *FEW), "zero1"))
    specs = [
        context.spec(f"{name}, {config}{', compiled' * form}", recipe, *own, ds_config=config, compiled=form)
        for name, recipe, own, config in context.few(cases)
        for form in (False, True)
    ]
    measured = context.measure(specs)
    return beside(
        plainly({each.spec.name: each.graphs for each in measured if each.graphs}), speeds(measured)
    )


def tuning(context: Context) -> Outcome:
    """What a step of GPT-2 124M costs with other settings of DeepSpeed: overlap, buckets, optimizer, sums."""
    large, small = ({"reduce_bucket_size": size, "allgather_bucket_size": size} for size in (5e8, 1e6))
    changes: dict[str, dict[str, Any]] = {
        "as it is": {},
        "no overlap": {"zero_optimization": {"overlap_comm": False}},
        "buckets of 5e8": {"zero_optimization": large},
        "buckets of 1e6": {"zero_optimization": small},
        "gradients summed in fp32": {"data_types": {"grad_accum_dtype": "fp32"}},
        "DeepSpeed's own Adam": {"optimizer": {"params": {"torch_adam": False}}},
    }  # fmt: skip
    specs = []
    config = json.loads((ROOT / "ds_configs/zero1.json").read_text(encoding="utf-8"))
    for name, change in context.few(list(changes.items())):
        path = context.folder / "configs" / f"{name.replace(' ', '-')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(merged(config, change)), encoding="utf-8")
        specs.append(context.spec(name, GPT, *context.alone(GPT, *SMALL), ds_config=str(path)))
    larger = context.alone(GPT, *SMALL, "batch.micro=32")
    specs.append(context.spec("micro-batch 32", GPT, *larger, ds_config="zero1"))
    return speeds(context.measure(specs))


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the values of `change`, section by section."""
    both = {
        key: merged(config[key], value) if isinstance(config.get(key), dict) else value
        for key, value in change.items()
    }
    return {**config, **both}


def operations(context: Context) -> Outcome:
    """Output layers, losses, optimizers and attention by themselves."""
    found: dict[str, Any] = {}
    for name in ("attention", "output_layer", "cross_entropy", "optimizers"):
        done = context.run("-m", "launch.experiments.benchmarks.gpu_kernels", name, context.device)
        failed = {"failed": {"why": done.stderr.strip()[-LAST:]}}
        rows = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else failed
        found |= {f"{name}: {case}": values for case, values in rows.items()}
        context.say(f"{name}: {'failed' if done.returncode else 'done'}")
    return plainly(found)


def repeating(context: Context) -> Outcome:
    """Two equal runs, and one that is stopped and resumed: whether their losses are the same, bit for bit."""
    whole, half = (4, 2) if context.walks else (20, 10)
    found: dict[str, Any] = {}
    histories = {}
    for name, parts in {"first": [whole], "second": [whole], "resumed": [half, whole]}.items():
        out = context.folder / "repeating" / name
        shutil.rmtree(out, ignore_errors=True)
        for steps in parts:
            done = context.pretrain(out, [], "--ds_config", "zero1", "--steps", str(steps), "--resume")
            if done.returncode:
                return plainly({name: {"failed": done.stderr.strip()[-LAST:]}})
        lines = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        histories[name] = {line["step"]: line["loss"] for line in lines if line.get("kind") == "step"}
    for name in ("second", "resumed"):
        differing = [s for s, loss in histories["first"].items() if histories[name].get(s) != loss]
        found[name] = {
            "steps that differ from the first run's": len(differing),
            "the first": min(differing, default=None),
        }
    return plainly(found)


def memory(context: Context) -> Outcome:
    """Peak memory of the 1.2B row, predicted and measured; offload with one thread and with all cores."""
    settings = context.alone(LARGE, *(["precision=bf16"] if context.walks else []))
    configs = context.few(("zero1", "zero3_offload", "zero0", "zero3"))
    specs = [context.spec(config, LARGE, *settings, ds_config=config) for config in configs]
    single = context.spec("one thread", LARGE, *settings, ds_config="zero3_offload", threads=1)
    measured = context.measure(specs if context.walks else [*specs, single])
    here = abilities.detect_machine()
    found: dict[str, Any] = {}
    for each in (each for each in measured if each.peak_bytes):
        plan = resolve(each.spec.load(), each.spec.ds_config or "", 1, here)
        needed = memory_fit.needs(plan, gpus=not context.walks)
        # Of a GPU, torch's peak is of tensors alone.
        outside = 0.0 if context.walks else needed.context + needed.fragmentation
        predicted = (needed.total - outside) / 1e9
        measured_gb = (each.peak_bytes or 0) / 1e9
        found[each.spec.name] = {
            "predicted_gb": predicted, "measured_gb": measured_gb, "ratio": measured_gb / predicted,
        }  # fmt: skip
    return beside(plainly(found), speeds(measured))


def sparse(context: Context) -> Outcome:
    """flex_attention in banded layers: heads of 96 and 64, recomputed or not, next to dense layers."""
    specs = []
    for heads, recompute, compiled in product((16, 24), ("none", "full"), (False, True)):
        more = (*PLAIN, f"model.heads={heads}", f"activation_checkpointing={recompute}")
        name = f"heads of {1536 // heads}, recomputed: {recompute}{', compiled' * compiled}"
        specs.append(
            context.spec(name, SPARSE, *context.alone(SPARSE, *more), ds_config="zero1", compiled=compiled)
        )
    dense = context.alone(SPARSE, *PLAIN, "model.attention=[dense]", "model.attention_window=null")
    specs.append(context.spec("dense, compiled", SPARSE, *dense, ds_config="zero1", compiled=True))
    return speeds(context.measure(context.few(specs), traced=True))


def layer_193b(context: Context) -> Outcome:
    """One layer of the 193B row: start, memory, attention with heads of 512."""
    settings = context.alone(LARGEST, "model.layers=1", "batch.global=4", "precision=bf16")
    spec = context.spec("one layer", LARGEST, *settings, ds_config="zero1")
    measured = context.measure([spec], traced=True)
    found = {
        "start": {"seconds": measured[0].start_s},
        "attention": {"kernels": (measured[0].profile or {}).get("attention")},
    }
    return beside(plainly(found), speeds(measured))


def one_device(context: Context) -> Outcome:
    """Tensor, pipeline and data parallelism with two ranks on one GPU, through gloo: if it runs at all."""
    found: dict[str, Any] = {}
    cases = {
        "tp2": ("zero1", "parallel.tp=2"),
        "pp2": ("pipeline", "parallel.pp=2"),
        "tp2 zero3": ("zero3", "parallel.tp=2"),
    }
    cases |= {
        f"dp2 {config}": (config, "parallel.dp=2") for config in ("zero1", "zero2", "zero3", "zero3_offload")
    }
    for name, (config, degree) in context.few(list(cases.items())):
        share = not context.walks
        spec = context.spec(name, "default/sotu", degree, ds_config=config, processes=2, shared_device=share)
        try:
            with ended(Worker(spec, context.folder / "one-device" / name.replace(" ", "-"))) as worker:
                times = [seconds for seconds, *_ in worker.ask("run", 3)]
                found[name] = {"seconds": times[-1]}
        except WorkerFailed as error:
            found[name] = {"failed": str(error)[-LAST:]}
        context.say(f"{name}: {found[name]}")
    return plainly(found)


def zero_gradients(context: Context) -> Outcome:
    """fp16: the share of gradients that are zero at accumulation 64, by the initial loss scale."""
    config = json.loads((ROOT / "ds_configs/zero1.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    accumulation = 2 if context.walks else 64
    settings = context.alone(GPT, "precision=fp16", f"batch.global={accumulation}", "batch.micro=1")
    for power in (16, 26):
        path = context.folder / "configs" / f"scale-{power}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(merged(config, {"fp16": {"initial_scale_power": power}})), encoding="utf-8"
        )
        spec = context.spec(f"scale-{power}", GPT, *settings, ds_config=str(path))
        with ended(Worker(spec, context.folder / spec.name)) as worker:
            found[f"initial scale 2^{power}"] = {"share of zeros": worker.ask("zeros")}
    return plainly(found)


def layouts(context: Context) -> Outcome:
    command = ["launch/compare_layouts.py", "--tiny", *(["--steps", "2"] if context.walks else ["--compile"])]
    if context.walks:
        command += ["--only", "accumulation 4"]
    done = context.run(*command)
    found = {"agree": done.returncode == 0, "said": done.stdout[-8000:]}
    if done.returncode == 2:
        raise CannotRunHere(done.stderr.strip()[-LAST:])
    return Outcome(found, done.stdout.strip()[-8000:])


STEPS: Sequence[Step] = (
    Step("rates", "matrix rate and memory bandwidth", rates),
    Step("runs", "does everything run: every configuration of one GPU, both families", runs),
    Step("1.2b", "the 1.2B row of the A100 document's table 4, and its goals", row_1_2b),
    Step("attention", "kernels that attention takes in GPT-2 and in a padded BERT", attention),
    Step("one_device", "tensor, pipeline and data parallelism with two ranks on one GPU", one_device),
    Step("tuning", "GPT-2 124M under other settings of DeepSpeed", tuning),
    Step("precisions", "bf16 and fp16 under ZeRO 0-3 and offload", precisions),
    Step("compile", "eager against compiled", compiling),
    Step("345m", "the 345M rows", rows_345m),
    Step("operations", "output layer, loss, optimizer and attention by themselves", operations),
    Step("repeat", "two equal runs and a resumed one, bit for bit", repeating),
    Step("memory", "peak memory predicted and measured", memory),
    Step("193b", "one layer of the 193B row", layer_193b),
    Step("sparse", "flex_attention in the sparse rows", sparse),
    Step("zeros", "gradients that fp16 flushes to zero, by the initial loss scale", zero_gradients),
    Step("layouts", "compare_layouts", layouts),
)
