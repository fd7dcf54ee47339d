"""Rules between the fields of one recipe; `ds_configs.resolver` has the rules between recipe and layout.

One function per subject yields its problems, so that all are reported at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from pathlib import Path

from recipes import files
from recipes.families import PUBLISHED_VOCABULARIES, SMALLEST_BPE, TRAINED
from recipes.key_paths import paths
from recipes.layout import share_batch
from recipes.problems import Key, Problem, Setting, Text, Words, counted, did_you_mean
from recipes.schema import Origin, Recipe
from recipes.tasks import TASKS

MOST_PROFILED = 100  # steps: a trace grows by megabytes a step
ORIGIN_FIELDS = tuple(sorted(Origin.model_fields))
# Read as a folder of JSONs: that package imports this one.
_DS_CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"

Found = Iterator[Problem]


def problems(recipe: Recipe, *, whole: bool = True, columns: Sequence[str] | None = None) -> list[Problem]:
    """Return the problem of every broken rule; empty for a consistent recipe.

    Args:
        recipe: its fields valid one by one.
        whole: if False, fields may be missing; a rule's problems before its first missing field are kept.
        columns: headings of the row's table; None for a run's own recipe, which has fewer rules.
    """
    rules = [rule(recipe) for rule in _RULES]
    if columns is not None:
        rules += [_ds_config(recipe), _batch(recipe), _cells(recipe, columns)]
    found: list[Problem] = []
    for rule in rules:
        with contextlib.suppress(*(() if whole else (AttributeError, TypeError))):
            for problem in rule:  # one by one, to keep those before a missing field
                found.append(problem)
    return found


def _together(recipe: Recipe, first: str, second: str, joint: str = " with ") -> tuple[Words, ...]:
    """Join two keys with their values, as in "schedule.min_lr=1.0 is above optimizer.lr=0.1"."""
    return Setting(first, attrgetter(first)(recipe)), joint, Setting(second, attrgetter(second)(recipe))


# Keys of the schedule that one kind alone reads: (key, kind, what it says if it must be there).
_SCHEDULE_KEYS = (
    ("power", "polynomial", "1 is the linear decay, 2 a quadratic one"),
    ("wsd_decay_steps", "wsd", "its decay takes the last steps"),
    ("wsd_decay_style", "wsd", ""),
)


def _schedule(recipe: Recipe) -> Found:
    schedule = recipe.schedule
    if schedule.min_lr > recipe.optimizer.lr:
        came: Text = _together(recipe, "schedule.min_lr", "optimizer.lr", " is above ")
        rule, fix = "the rate decays from lr to min_lr", "set schedule.min_lr to optimizer.lr or less"
        yield Problem("schedule.min_lr", came, rule, fix)
    for key, kind, needed in _SCHEDULE_KEYS:
        setting = Setting(f"schedule.{key}", getattr(schedule, key))
        of = Setting("schedule.kind", kind)
        if schedule.kind != kind and setting.value is not None:
            came = setting, " with ", Setting("schedule.kind", schedule.kind)
            yield Problem(setting.key, came, f"only {kind} reads it", ("set it to null, or ", of))
        if schedule.kind == kind and setting.value is None and needed:
            yield Problem(setting.key, (of, " without ", Key(setting.key)), needed, "set it")
    if schedule.kind == "inverse_sqrt" and schedule.decay_steps is not None:
        came = _together(recipe, "schedule.decay_steps", "schedule.kind")
        yield Problem("schedule.decay_steps", came, "this decay has no last step", "set it to null")
    if (end_step := recipe.decay_steps) is None:
        return
    if schedule.warmup_steps >= end_step:
        end = "schedule.decay_steps" if schedule.decay_steps else "steps"
        came = _together(recipe, "schedule.warmup_steps", end, " is not below ")
        fix = f"set schedule.warmup_steps to {end_step - 1} or less"
        yield Problem("schedule.warmup_steps", came, "the warm-up ends before the decay does", fix)
    elif (left := end_step - schedule.warmup_steps) < (schedule.wsd_decay_steps or 0):
        decay = Setting("schedule.wsd_decay_steps", schedule.wsd_decay_steps)
        came = decay, f" is above the {counted(left, 'step')} after the warm-up"
        yield Problem(decay.key, came, "it is the last part of them", f"set it to {left} or less")


def _profile(recipe: Recipe) -> Found:
    steps = recipe.run.profiled
    if recipe.run.profile and not (0 < len(steps) <= MOST_PROFILED and steps[-1] <= recipe.steps):
        rule = f"a profile has 1 to {MOST_PROFILED} steps of the run, first:last"
        last = min(13, recipe.steps)
        fix = f"set run.profile to {max(1, last - 3)}:{last}, or to null"
        yield Problem("run.profile", _together(recipe, "run.profile", "steps"), rule, fix)


def _rampup(recipe: Recipe) -> Found:
    key, ramp, growth = "batch.rampup", recipe.batch.rampup, recipe.batch.global_
    if ramp and ((growth := growth - ramp.start) < 1 or growth % ramp.increment):
        came = _together(recipe, f"{key}.start", f"{key}.increment")
        rule = f"start and one or more increments are batch.global={recipe.batch.global_}"
        more = f"{key}.increment to {math.gcd(growth, ramp.increment)}"
        yield Problem(key, came, rule, f"set {more if growth > 0 else f'{key}.start below batch.global'}")
    trainer = recipe.model.implementation == "transformers"
    if ramp and (trainer or recipe.task):
        by, rule = "transformers' Trainer", "it takes as many micro-batches in every step"
        by, rule = (by, rule) if trainer else ("task", "an epoch over its examples has equal steps")
        yield Problem(key, (Key(key), f" with {by}"), rule, f"set {key} to null")


def _family(recipe: Recipe) -> Found:
    for key, values, why, fix in recipe.model.facts.refused:
        if attrgetter(key)(recipe) in values:
            yield Problem(key, _together(recipe, key, "model.family"), why, fix)
    if recipe.sequence_length < (shortest := recipe.model.facts.shortest):
        came = _together(recipe, "sequence_length", "model.family")
        rule, fix = "a sample is [CLS] A [SEP] B [SEP]", f"set it to {shortest} or more"
        yield Problem("sequence_length", came, rule, fix)


def _positions(recipe: Recipe) -> Found:
    key, length = "model.positions", recipe.sequence_length
    if recipe.positions < length:
        came = _together(recipe, key, "sequence_length", " is below ")
        fix = f"set sequence_length to {recipe.positions} or less, or {key} to {length} or more"
        yield Problem(key, came, "every token of a sample has a position of its own", fix)


def _heads(recipe: Recipe) -> Found:
    model = recipe.model
    if model.hidden % model.heads:
        came = _together(recipe, "model.hidden", "model.heads", " is not divisible by ")
        rule, fix = "every head has hidden/heads dimensions", "set model.heads to a divisor of model.hidden"
        yield Problem("model.heads", came, rule, fix)


def _attention(recipe: Recipe) -> Found:
    model, key = recipe.model, Key("model.attention")
    sparse = " and ".join(kind for kind in ("banded", "fixed") if kind in model.attention)
    window = Setting("model.attention_window", model.attention_window)
    if sparse and model.facts.masked:
        came: Text = key, f" with {sparse} layers and ", Setting("model.family", model.family)
        yield Problem(key, came, "sparse patterns look back only", "set model.attention to [dense]")
    if model.shared_layers and len({*model.attention}) > 1:
        came = _together(recipe, "model.shared_layers", key)
        yield Problem(key, came, "one layer cannot have several kinds", "give one kind, or leave it unshared")
    if len(model.attention) > model.layers:
        came = key, f" has {len(model.attention)} kinds for ", Setting("model.layers", model.layers)
        yield Problem(key, came, "the pattern is repeated over the layers", f"give {model.layers} or fewer")
    if sparse and model.attention_window is None:
        came = key, f" has {sparse} layers without ", Key(window.key)
        yield Problem(key, came, "it says how many positions each one sees", f"set {window.key}")
    if sparse and model.attention_window is not None and model.attention_window >= recipe.sequence_length:
        fix = f"set {window.key} to {recipe.sequence_length - 1} or less, or model.attention to [dense]"
        came = _together(recipe, window.key, "sequence_length")
        yield Problem(window.key, came, "such a layer sees the whole triangle", fix)
    if model.attention_window is not None and not sparse:
        fix = "set model.attention to [dense, banded], or leave the window out"
        yield Problem(window.key, (window, " without a banded or fixed layer"), "", fix)


def _columns(recipe: Recipe) -> Found:
    """Check the global columns of a fixed pattern."""
    model, key, patterns = recipe.model, "model.attention_columns", "model.attention_patterns"
    columns, turns, window = model.attention_columns, model.attention_patterns, model.attention_window
    both = _together(recipe, key, patterns)
    if "fixed" not in model.attention:
        if columns is not None or turns > 1:
            fix = "set model.attention to [dense, fixed], or leave both out"
            yield Problem(key, (*both, " without a fixed layer"), "", fix)
        return
    if columns is None:
        came = Key("model.attention"), " has fixed layers without ", Key(key)
        yield Problem(key, came, "later windows see these positions of each window", f"set {key}")
    elif window is not None and (columns == window or columns * turns > window):
        rule = f"each pattern has its own columns of a window of {window} positions, and not all of them"
        yield Problem(key, both, rule, f"set {key} to {max(1, min(window // turns, window - 1))} or less")


def _implementation(recipe: Recipe) -> Found:
    implementation = Setting("model.implementation", recipe.model.implementation)
    if implementation.value != "transformers":
        return
    if {*recipe.model.attention} != {"dense"}:
        came: Text = Setting("model.attention", list(recipe.model.attention)), " with ", implementation
        yield Problem("model.attention", came, "its GPT-2 has dense layers", "set model.attention to [dense]")
    if recipe.model.shared_layers:
        came = Setting("model.shared_layers", "true"), " with ", implementation
        rule = "its GPT-2 has layers of their own"
        yield Problem("model.shared_layers", came, rule, "leave it out")
    for key, degree in zip(("parallel.tp", "parallel.pp"), recipe.parallel.model_parallel, strict=True):
        if degree > 1:
            came = Setting(key, degree), " with ", implementation
            yield Problem(key, came, "its GPT-2 is cut by ZeRO alone", f"set {key} to 1")
    key = "activation_checkpointing"
    if recipe.activation_checkpointing not in ("none", "full"):
        came = _together(recipe, key, implementation.key)
        yield Problem(key, came, "it recomputes all layers or none", "set full or none")


def _vocabulary(recipe: Recipe) -> Found:
    key, kind_key = "model.vocab_size", "data.tokenizer.kind"
    size, kind = recipe.model.vocab_size, recipe.data.tokenizer.kind
    published = PUBLISHED_VOCABULARIES.get(kind)
    if published and size != published:
        rule = f"the published vocabulary has {published} tokens (tensor parallelism's padding comes on top)"
        fix = f"set {key} to {published}, or {kind_key} to another"
        yield Problem(key, _together(recipe, key, kind_key), rule, fix)
    if kind == "trained_bpe" and size < SMALLEST_BPE:
        rule = "a byte-level vocabulary needs the 256 bytes and one end-of-document token"
        yield Problem(key, _together(recipe, key, kind_key), rule, f"set {key} to {SMALLEST_BPE} or more")
    streamed = next((origin for origin in recipe.data.origins if origin.streamed), None)
    if kind in TRAINED and streamed:
        other = recipe.model.facts.published
        source = Setting("data.source", streamed.source)
        came = Setting(kind_key, kind), " with a streamed source (", source, ")"
        known = f"set {kind_key} to {other} and {key} to {PUBLISHED_VOCABULARIES[other]}"
        fix = f"{known}, or give {kind_key}=file and a path"
        yield Problem(kind_key, came, "a vocabulary cannot be trained on what is read once", fix)


def _tokenizer(recipe: Recipe) -> Found:
    key, tokenizer = "data.tokenizer.kind", recipe.data.tokenizer
    stored = any(origin.source == "store" for origin in recipe.data.origins)
    if tokenizer.kind == "file" and not tokenizer.path:
        came: Text = Setting(key, "file"), " needs ", Key("data.tokenizer.path")
        yield Problem(key, came, "a vocab.txt, a tokenizer.json or a directory with one", "set it")
    if stored and tokenizer.kind in TRAINED:
        came = Setting(key, tokenizer.kind), " with ", Setting("data.source", "store")
        own = "store (the vocabulary that prepare_data kept with it)"
        fix = f"set {key} to {own}, gpt2, bert_uncased, bert_cased or file"
        yield Problem(key, came, "its tokens are numbered already", fix)
    if tokenizer.kind == "store" and not stored:
        came = Setting(key, "store"), " without ", Setting("data.source", "store")
        yield Problem(key, came, "there is no store to take it from", "name another kind")


def _origins(recipe: Recipe) -> Found:
    data = recipe.data
    stated = [key for key in ORIGIN_FIELDS if getattr(data, key) != Origin.model_fields[key].default]
    if data.blend and stated:
        came: Text = Key("data.blend"), f" together with {', '.join(f'data.{key}' for key in stated)}"
        rule, fix = "the parts of the blend say where documents come from", "move these keys into the parts"
        yield Problem("data.blend", came, rule, fix)
    for i, origin in enumerate(data.origins):
        part = f"data.blend[{i}]" if data.blend else "data"
        key, left_out = f"{part}.streaming", f"leave {part}.streaming out"
        source = Setting(f"{part}.source", origin.source)
        streaming = Setting(key, "true"), " with ", source
        if origin.source != "packaged" and not origin.name:
            rule = "the dataset's name on the hub, or the path of the files or of the store"
            yield Problem(source.key, (source, " needs ", Key(f"{part}.name")), rule, "set it")
        if origin.streaming and origin.source == "store":
            yield Problem(key, streaming, "the tokens are there already", left_out)
        if origin.streaming and origin.source == "packaged":
            rule = "the packaged corpus is prepared in seconds and never streamed"
            yield Problem(key, streaming, rule, left_out)
        if origin.streaming and (origin.source, origin.documents) == ("text", "file"):
            came = *streaming, " and ", Setting(f"{part}.documents", "file")
            rule = "a stream holds documents out by their place in their file, and none of a file that is one"
            fix = f"set {key} to false, or {part}.documents to blank_line"
            yield Problem(key, came, f"{rule} document", fix)


def _held_out(recipe: Recipe) -> Found:
    validation, test = recipe.data.validation_every, recipe.data.test_every
    if validation < 2:
        came = Setting("data.validation_every", validation), " holds out every document"
        yield Problem("data.validation_every", came, "", "set it to 2 or more")
    if test is not None and test < 2:
        came = Setting("data.test_every", test), " leaves no document to train on"
        yield Problem("data.test_every", came, "", "set it to 2 or more, or to null")


def _checkpointing(recipe: Recipe) -> Found:
    key, chunk, layers = "activation_checkpointing", recipe.activation_checkpointing, recipe.model.layers
    if isinstance(chunk, int) and chunk > layers:
        fix = f'set it to {layers} or less, to "full" or to "none"'
        came = _together(recipe, key, "model.layers", " is above ")
        yield Problem(key, came, "it is the number of layers recomputed together", fix)


def _provenance(recipe: Recipe) -> Found:
    """Check that the keys named in `inferred`, `differs`, `unknown` and `published.printed` exist."""
    for key in sorted(recipe.inferred.keys() & recipe.unknown.keys()):
        rule = "is in inferred as well, and a value has a source or none"
        yield Problem("unknown", f"unknown: {key}", rule, "keep one of the two")
    printed = recipe.published.printed if recipe.published else {}
    own: dict[str, Collection[str]] = {
        key: getattr(recipe, key) for key in ("inferred", "differs", "unknown")
    }
    known, fix = set(paths()), "name the key whose value it explains, e.g. batch.global"
    for section, keys in {**own, "published.printed": printed}.items():
        for key in (key for key in keys if key not in known):
            yield Problem(section, f"{section}: {key}", "no such key of a recipe", fix)


def _task(recipe: Recipe) -> Found:
    """Check that the task has its head, and the head a BERT."""
    model, task = recipe.model, recipe.task
    head = Setting("model.task_head", model.task_head)
    if head.value != "none" and not model.facts.masked:
        came: Text = head, " with ", Setting("model.family", model.family)
        yield Problem(head.key, came, "heads for tasks stand on a BERT", "set model.family to bert")
    if head.value != "none" and model.sentence_head != "none":
        came = _together(recipe, head.key, "model.sentence_head")
        rule = "it takes the place of the heads of pretraining"
        yield Problem(head.key, came, rule, "set model.sentence_head to none")
    if task is None:
        if head.value != "none":
            yield Problem(head.key, (head, " without ", Key("task")), "", "start with launch/finetune.py")
        return
    facts = TASKS[task.name]
    if head.value != facts.head or (facts.labels and model.head_classes != len(facts.labels)):
        came = (
            Setting("task.name", task.name),
            " with ",
            head,
            " of ",
            Setting("model.head_classes", model.head_classes),
        )
        rule = f"it has a {facts.head} head{f' of {len(facts.labels)}' if facts.labels else ''}"
        yield Problem(head.key, came, rule, "leave the head to --task")
    if facts.head == "span" and task.max_query + task.doc_stride + 3 >= recipe.sequence_length:
        came = _together(recipe, "task.doc_stride", "sequence_length")
        rule = f"a window holds a question of task.max_query={task.max_query} tokens and text to stride over"
        yield Problem("task.doc_stride", came, rule, "shorten task.doc_stride or task.max_query")


_RULES: tuple[Callable[[Recipe], Found], ...] = (
    _schedule, _rampup, _family, _positions, _heads, _attention, _columns, _implementation, _vocabulary,
    _tokenizer, _origins, _held_out, _checkpointing, _provenance, _task, _profile,
)  # fmt: skip


def _ds_config(recipe: Recipe) -> Found:
    """Check that a bare name is a file of ds_configs/; a path may be another machine's: checked on use."""
    name, known = recipe.ds_config, [path.stem for path in _DS_CONFIGS.glob("*.json")]
    if Path(name).name == name and not files.is_file(Path(name)) and name.removesuffix(".json") not in known:
        came, rule = Setting("ds_config", name), "no such file in ds_configs/"
        yield Problem("ds_config", came, rule, did_you_mean(name, known))


def _batch(recipe: Recipe) -> Found:
    """Check the shares of the batch, if the row states dp."""
    batch, dp, (_, pp) = recipe.batch, recipe.parallel.dp, recipe.parallel.model_parallel
    if dp:
        shares = share_batch(batch.micro, batch.accumulation, batch.global_, dp, pp, dp_is_stated=True)
        if isinstance(shares, Problem):
            yield shares


def _cells(recipe: Recipe, columns: Sequence[str]) -> Found:
    row = recipe.published.row if recipe.published else None
    if row is None or not columns or (count := row.count("|") + 1) == len(columns):
        return
    cells = itertools.zip_longest(columns, (cell.strip() for cell in row.split("|")), fillvalue="?")
    shown = ", ".join(f"{name}: {cell}" for name, cell in cells)
    came = (
        Key("published.row"),
        f" has {counted(count, 'cell')} for {counted(len(columns), 'column')} ({shown})",
    )
    rule = "one cell for each heading, separated by |, blank where the source prints none"
    yield Problem("published.row", came, rule, "add the missing or join the surplus ones")
