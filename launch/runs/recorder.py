"""What rank 0 says and keeps of a run, from the plan on the screen to the results row; silence on the other ranks."""

from __future__ import annotations

from pathlib import Path

from launch.machine import description
from launch.machine.memory import peak_cached_bytes, peak_memory
from launch.planning.plan_text import describe_plan
from launch.runs import result, vocabulary
from launch.runs.directory import RunDirectory, read_metrics
from launch.runs.loss_plot import plot_loss
from launch.runs.metrics import Metrics
from launch.training import initial_weights
from recipes.family_words import WORDS

LARGEST_SAMPLED = (
    2_000_000_000  # parameters; above this, rank 0 does not assemble the whole model to continue a prompt
)


class Silence:
    """The ranks other than 0."""

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None: ...

    def say(self, text: str) -> None: ...

    def start(self, corpus, saved) -> None: ...

    def step(self, step: int, report, seconds: float, data_seconds: float) -> None: ...

    def validation(self, step: int, report, kind: str = "validation") -> None: ...

    def saving(self, memory: dict) -> None: ...

    def finish(
        self, status: str, reason: str | None = None, memory: dict | None = None, because: str | None = None
    ) -> None: ...


class Report(Silence):
    """Rank 0. `original`: the recipe before --tiny, --set and --steps."""

    def __init__(
        self, job, directory: RunDirectory, *, original, tiny: bool, emulated: bool, progress: bool = True
    ):
        self.job, self.directory = job, directory
        self.original, self.tiny, self.emulated, self.progress = original, tiny, emulated, progress
        self.metrics: Metrics | None = None
        self._drawn: int | None = None  # records in loss.png
        self.described = description.describe()

    def __exit__(self, *_) -> None:
        if self.metrics:
            self.metrics.close()
        self.directory.close()

    def say(self, text: str) -> None:
        if self.metrics:
            self.metrics.note(text)
        elif self.progress:
            print(text, flush=True)

    def start(self, corpus, saved) -> None:
        """Show the plan and open the records at `saved`, the checkpoint that training will go on from, or at their beginning."""
        self.corpus = corpus
        vocabulary.keep(self.directory.path, corpus.tokenizer)
        done = saved.step if saved else 0
        text = describe_plan(
            self.job.plan, name=self.job.name, hardware=description.summary(self.described), run_directory=self.directory.path,
            data=corpus.summary,
        )  # fmt: skip
        if self.progress:
            print(f"\n{text}\n", flush=True)
            print(
                f"to beat on the validation text, in nats per {self._token()}: uniform {corpus.uniform_entropy:.4f}, "
                f"unigram {corpus.unigram_entropy:.4f}\n",
                flush=True,
            )
        self.metrics = Metrics(
            self.directory,
            self.job.plan,
            progress=self.progress,
            start_step=done,
            total_steps=self.job.plan.recipe.steps,
        )
        for notice in self.directory.notices:
            self.metrics.note(notice)
        if self.job.initial_weights and (
            warning := vocabulary.foreign_tokens(Path(self.job.initial_weights), corpus.tokenizer)
        ):
            self.metrics.note(warning)
        if self.job.initial_weights and not done:
            for remark in initial_weights.remarks(self.job.plan.recipe):
                self.metrics.note(remark)
        if self.job.resume:
            self.metrics.note(
                f"resumed from {saved.directory}"
                if saved
                else "--resume: no complete checkpoint yet, starting at step 0"
            )

    def step(self, step: int, report, seconds: float, data_seconds: float) -> None:
        assert self.metrics is not None
        self.metrics.step(
            step, report.loss, report.lr, report.grad_norm, report.loss_scale, report.skipped, seconds, peak_memory().bytes,
            report.parts, data_seconds,
        )  # fmt: skip

    def validation(self, step: int, report, kind: str = "validation") -> None:
        assert self.metrics is not None
        self.metrics.validation(step, report.loss, report.parts, kind)

    def saving(self, memory: dict) -> None:
        """Loss curve and results row of a run that has only its last checkpoint to write, which a host may not survive."""
        self._keep("saving", memory, "its last checkpoint was not complete when this was written")

    def finish(
        self, status: str, reason: str | None = None, memory: dict | None = None, because: str | None = None
    ) -> None:
        """Loss curve, results row and, after a whole run, a sample; on an early stop, how to go on.

        `reason`: of an early stop, for the screen; `because`: of a failure, for the row. `memory`: peaks over all ranks; rank 0's own
        where the others can no longer be asked.
        """
        assert self.metrics is not None
        self.metrics.close()
        row = self._keep(status, memory or {"cached_bytes": peak_cached_bytes()}, because)
        if status == "ok" and self.job.plan.recipe.run.prompt:
            row["sample"] = self.sample()
            result.write_result(self.directory.result_json, row)
        if not self.progress:
            return
        print("\n" + result.format_row(row))
        if row.get("sample"):
            print(f"\nsample\n  {row['sample']}")
        print(
            f"\n{self.directory.path}: result.json, loss.png, metrics.jsonl{self._checkpoints()}", flush=True
        )
        if reason:
            print(f"{reason}; go on with the same command and --resume", flush=True)

    def _checkpoints(self) -> str:
        from launch.checkpoints import checkpoint

        if checkpoint.newest(self.directory.checkpoints):
            return ", checkpoints/"
        return (
            ""
            if self.job.plan.recipe.run.save_last
            else "; no checkpoint (--set run.save_last=true keeps one)"
        )

    def _keep(self, status: str, memory: dict, because: str | None) -> dict:
        """loss.png and result.json as they are now; the row."""
        records = read_metrics(self.directory.metrics_jsonl)
        entropies = {"uniform": self.corpus.uniform_entropy, "unigram": self.corpus.unigram_entropy}
        row = result.result_row(
            self.job.plan, records, name=self.job.name, described=self.described, original=self.original, entropies=entropies,
            **memory, tiny=self.tiny, emulated_fp16=self.emulated, status=status, reason=because,
        )  # fmt: skip
        row["banded_attention_kernel"] = self._band_kernel()
        result.write_result(
            self.directory.result_json, row
        )  # before the plot: where another rank has failed, this one is soon ended
        if self._drawn != len(records):
            plot_loss(self.directory.metrics_jsonl, self.directory.loss_png, entropies, title=self.job.name)
            self._drawn = len(records)
        return row

    def _band_kernel(self) -> str | None:
        from launch.training.build_model import band_kernel

        return band_kernel(self.job.plan)

    def _token(self) -> str:
        return WORDS[self.job.plan.recipe.model.family].predicted

    def sample(self) -> str:
        """The prompt, continued or with its masks filled by the final weights; a line that says so where the model is too large."""
        from launch.checkpoints import checkpoint
        from launch.checkpoints.weights import load_tensors
        from launch.training.build_model import whole_model
        from modeling import cost
        from modeling.families import family_of

        recipe = self.job.plan.recipe
        if cost.parameters(recipe.model, recipe.sequence_length) > LARGEST_SAMPLED:
            return f"not sampled: more than {LARGEST_SAMPLED:,} parameters"
        saved = checkpoint.newest(self.directory.checkpoints)
        assert recipe.run.prompt is not None
        if saved is None or saved.step < recipe.steps:
            return "not sampled: there is no checkpoint of the last step (run.save_last=false); --set run.save_last=true keeps one"
        model = whole_model(recipe, load_tensors(saved.directory))
        return family_of(recipe.model).answer(model, self.corpus.tokenizer, recipe.run.prompt, recipe.seed)
