"""Rules between the fields of one recipe; `ds_configs.resolver` has the rules between recipe and layout.

One function per subject yields its problems, so that all are reported at once: the key to change, what came,
the rule, and the fix. In what came "{batch.micro}" stands for the key with its value, "{batch.micro!k}" for
the key alone.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from string import Formatter

from recipes import files
from recipes.families import OF_CONFIG, PUBLISHED_VOCABULARIES, SMALLEST_BPE, TRAINED
from recipes.key_paths import paths
from recipes.layout import share_batch
from recipes.problems import Key, Problem, Setting, Words, counted, did_you_mean, either
from recipes.schema import DEEPSPEED_SCHEDULES, Origin, Recipe

MOST_PROFILED = 100  # steps: a trace grows by megabytes a step
ORIGIN_FIELDS = tuple(sorted(Origin.model_fields))
# Read as a folder of JSONs: that package imports this one.
_DS_CONFIGS = Path(__file__).resolve().parents[1] / "ds_configs"

Found = Iterator[tuple[str, str, str, str] | Problem]


def problems(
    recipe: Recipe, *, whole: bool = True, columns: Sequence[str] | None = None
) -> list[Problem]:
    """Return the problem of every broken rule; empty for a consistent recipe.

    Args:
        recipe: its fields valid one by one.
        whole: if False, fields may be missing; a rule's problems before its first missing field are kept.
        columns: headings of the row's table; None for a run's own recipe, which has fewer rules.
    """
    rules = [*_RULES]
    if columns is not None:
        rules += (_ds_config, _batch, functools.partial(_cells, columns), _branch)
    missing = () if whole else (AttributeError, KeyError, TypeError)
    found: list[Problem] = []
    for rule in rules:
        with contextlib.suppress(*missing):
            if rule in _ABOUT and not _ABOUT[rule](recipe):
                continue
            for each in rule(
                recipe
            ):  # one by one, to keep those before a missing field
                if not isinstance(each, Problem):
                    key, came, broken, fix = each
                    each = Problem(key, tuple(_words(recipe, came)), broken, fix)
                found.append(each)
    return found


def _words(recipe: Recipe, text: str) -> Iterator[Words]:
    """Yield the pieces of a text with keys in braces."""
    for before, key, _, form in Formatter().parse(text):
        if before:
            yield before
        if key:
            value, _ = Formatter().get_field(key, (), vars(recipe))
            if isinstance(value, bool):
                value = str(value).lower()
            if isinstance(value, tuple):
                value = [*value]
            yield Key(key) if form else Setting(key, value)


# Keys of the schedule that some kinds alone read: (key, kinds, what it says if it must be there).
_SCHEDULE_KEYS = (
    ("power", ("polynomial",), "1 is the linear decay, 2 a quadratic one"),
    ("wsd_decay_steps", ("wsd",), "its decay takes the last steps"),
    ("wsd_decay_style", ("wsd",), ""),
    ("warmup_type", DEEPSPEED_SCHEDULES, ""),
    ("warmup_min_lr", ("WarmupCosineLR",), ""),
)


def _schedule(recipe: Recipe) -> Found:
    schedule = recipe.schedule
    if schedule.min_lr > recipe.optimizer.lr:
        yield (
            "schedule.min_lr",
            "{schedule.min_lr} is above {optimizer.lr}",
            "the rate decays from lr to min_lr",
            "set schedule.min_lr to optimizer.lr or less",
        )
    for name, kinds, needed in _SCHEDULE_KEYS:
        key = f"schedule.{name}"
        value = getattr(schedule, name)
        if schedule.kind not in kinds and value is not None:
            yield (
                key,
                f"{{{key}}} with {{schedule.kind}}",
                f"only {either(kinds)} reads it",
                f"set it to null, or schedule.kind={kinds[0]}",
            )
        if schedule.kind in kinds and value is None and needed:
            yield key, f"{{schedule.kind}} without {{{key}!k}}", needed, "set it"
    if schedule.kind in DEEPSPEED_SCHEDULES and schedule.counts == "samples":
        yield (
            "schedule.counts",
            "{schedule.counts} with {schedule.kind}",
            "DeepSpeed counts steps",
            "set it to steps",
        )
    if schedule.kind == "inverse_sqrt" and schedule.decay_steps is not None:
        yield (
            "schedule.decay_steps",
            "{schedule.decay_steps} with {schedule.kind}",
            "this decay has no last step",
            "set it to null",
        )
    end_step = recipe.decay_steps
    # whose warm-up goes first
    if end_step is None or schedule.kind in DEEPSPEED_SCHEDULES:
        return
    if schedule.warmup_steps >= end_step:
        end = "{schedule.decay_steps}" if schedule.decay_steps else "{steps}"
        yield (
            "schedule.warmup_steps",
            f"{{schedule.warmup_steps}} is not below {end}",
            "the warm-up ends before the decay does",
            f"set schedule.warmup_steps to {max(0, end_step - 2)} or less",
        )
    elif (left := end_step - schedule.warmup_steps) < (schedule.wsd_decay_steps or 0):
        yield (
            "schedule.wsd_decay_steps",
            f"{{schedule.wsd_decay_steps}} is above the {counted(left, 'step')} after the warm-up",
            "it is the last part of them",
            f"set it to {left} or less",
        )


def untrained(recipe: Recipe) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield what of its schedule the trained steps lack, and settings under which they have it."""
    after = recipe.begins_after
    if recipe.steps <= after:
        more = {"steps": after + 1}
        for _, besides in untrained(recipe.model_copy(update=more)):
            more |= besides
        yield f"the branch begins after step {after}", more
        return
    schedule = recipe.schedule
    last = recipe.steps
    end = recipe.decay_steps
    warm = schedule.warmup_steps
    part = schedule.wsd_decay_steps
    begins = end - part if end and part else warm
    # a step's rate is that after the steps before it
    spare = 0 if schedule.kind in ("constant", "WarmupLR") else 2
    late = begins > last - spare
    if late and not part:
        yield (
            f"the warm-up ends after step {warm}, and training after step {last}",
            {"steps": warm + spare},
        )
    elif late or (end and after >= end):
        said = f"the decay takes steps {begins + 1} to {end}, and training {after + 1} to {last}"
        last = max(last, warm + spare)
        more = {"schedule.decay_steps": last}
        if last > recipe.steps:
            more["steps"] = last
        if part and part != (fits := max(2, min(part, last - warm))):
            more["schedule.wsd_decay_steps"] = fits
        yield said, more


def schedule_problems(
    recipe: Recipe, where: str, *, own: bool = True, cut: bool = False
) -> Iterator[Problem]:
    """Yield a problem for each that is `untrained`.

    `own`: the user set the schedule, or branched it off; `cut`: --steps gave the last step.
    """
    came = Setting("steps", recipe.steps)
    for why, settings in untrained(recipe):
        fix = list[Words](["give"])
        for key, value in settings.items():
            flag = " --" if cut and key == "steps" else " --set "
            fix += flag, Setting(key, value)
        if not own:
            fix += ", or --", came, " to train the beginning of its schedule"
        yield Problem("steps", came, why, tuple(fix), where)


_READ_BY_ONE = {
    "min_coeff": "lamb",
    "max_coeff": "lamb",
    "adam_lr": "muon",
    "momentum": "muon",
    "adjust_lr": "muon",
}


def _optimizer(recipe: Recipe) -> Found:
    optimizer = recipe.optimizer
    for name, reader in _READ_BY_ONE.items():
        key = f"optimizer.{name}"
        if optimizer.name != reader and getattr(optimizer, name) is not None:
            yield (
                key,
                f"{{{key}}} with {{optimizer.name}}",
                f"only {reader} reads it",
                "set it to null",
            )
    if optimizer.name == "muon" and not optimizer.bias_correction:
        yield (
            "optimizer.bias_correction",
            "{optimizer.bias_correction} with {optimizer.name}",
            "torch's AdamW steps what Muon does not, and corrects",
            "set it to true",
        )
    least, most = optimizer.trust_ratios
    if least > most:
        yield (
            "optimizer.min_coeff",
            f"{{optimizer.min_coeff!k}} {least:g} is above {{optimizer.max_coeff!k}} {most:g}",
            "a trust ratio lies between them",
            "set it to the other or less",
        )


def _profile(recipe: Recipe) -> Found:
    steps = recipe.run.profiled
    if not 0 < len(steps) <= MOST_PROFILED or steps[-1] > recipe.steps:
        last = min(13, recipe.steps)
        yield (
            "run.profile",
            "{run.profile} with {steps}",
            f"a profile has 1 to {MOST_PROFILED} steps of the run, first:last",
            f"set run.profile to {max(1, last - 3)}:{last}, or to null",
        )


def _rampup(recipe: Recipe) -> Found:
    key = "batch.rampup"
    ramp = recipe.batch.rampup
    assert ramp
    growth = recipe.batch.global_ - ramp.start
    if growth < 1 or growth % ramp.increment:
        more = f"{key}.increment to {math.gcd(growth, ramp.increment)}"
        yield (
            key,
            "{batch.rampup.start} with {batch.rampup.increment}",
            f"start and one or more increments are batch.global={recipe.batch.global_}",
            f"set {more if growth > 0 else f'{key}.start below batch.global'}",
        )
    if recipe.model.implementation == "transformers":
        yield (
            key,
            "{batch.rampup!k} with transformers' Trainer",
            "it takes as many micro-batches in every step",
            f"set {key} to null",
        )
    elif recipe.task:
        yield (
            key,
            "{batch.rampup!k} with task",
            "an epoch over its examples has equal steps",
            f"set {key} to null",
        )


def _family(recipe: Recipe) -> Found:
    for key, values, why, fix in recipe.model.facts.refused:
        if attrgetter(key)(recipe) in values:
            yield key, f"{{{key}}} with {{model.family}}", why, fix
    shortest = recipe.model.facts.shortest
    if recipe.sequence_length < shortest:
        yield (
            "sequence_length",
            "{sequence_length} with {model.family}",
            "a sample is [CLS] A [SEP] B [SEP]",
            f"set it to {shortest} or more",
        )


def _positions(recipe: Recipe) -> Found:
    length = recipe.sequence_length
    if recipe.positions < length:
        yield (
            "model.positions",
            "{model.positions} is below {sequence_length}",
            "every token of a sample has a position of its own",
            f"set sequence_length to {recipe.positions} or less, or model.positions to {length} or more",
        )


def _heads(recipe: Recipe) -> Found:
    if recipe.model.hidden % recipe.model.heads:
        yield (
            "model.heads",
            "{model.hidden} is not divisible by {model.heads}",
            "every head has hidden/heads dimensions",
            "set model.heads to a divisor of model.hidden",
        )


def _attention(recipe: Recipe) -> Found:
    model = recipe.model
    key = "model.attention"
    window = "model.attention_window"
    size = model.attention_window
    kinds = model.attention
    length = recipe.sequence_length
    sparse = " and ".join(kind for kind in ("banded", "fixed") if kind in kinds)
    if sparse and model.facts.masked:
        yield (
            key,
            f"{{model.attention!k}} with {sparse} layers and {{model.family}}",
            "sparse patterns look back only",
            "set model.attention to [dense]",
        )
    if sparse and recipe.data.attend == "document":
        yield (
            "data.attend",
            f"{{data.attend}} with {sparse} layers",
            "sparse patterns have no borders of documents",
            "set data.attend to window, or model.attention to [dense]",
        )
    if model.shared_layers and len({*kinds}) > 1:
        yield (
            key,
            "{model.shared_layers} with {model.attention}",
            "one layer cannot have several kinds",
            "give one kind, or leave it unshared",
        )
    if len(kinds) > model.layers:
        yield (
            key,
            f"{{model.attention!k}} has {len(kinds)} kinds for {{model.layers}}",
            "the pattern is repeated over the layers",
            f"give {model.layers} or fewer",
        )
    if sparse and size is None:
        yield (
            key,
            f"{{model.attention!k}} has {sparse} layers without {{model.attention_window!k}}",
            "it says how many positions each one sees",
            f"set {window}",
        )
    if sparse and size is not None and size >= length:
        yield (
            window,
            "{model.attention_window} with {sequence_length}",
            "such a layer sees the whole triangle",
            f"set {window} to {length - 1} or less, or model.attention to [dense]",
        )
    if size is not None and not sparse:
        yield (
            window,
            "{model.attention_window} without a banded or fixed layer",
            "",
            "set model.attention to [dense, banded], or leave the window out",
        )


def _columns(recipe: Recipe) -> Found:
    """Check the global columns of a fixed pattern."""
    model = recipe.model
    key = "model.attention_columns"
    columns = model.attention_columns
    turns = model.attention_patterns
    window = model.attention_window
    both = "{model.attention_columns} with {model.attention_patterns}"
    if "fixed" not in model.attention:
        if columns is not None or turns > 1:
            yield (
                key,
                f"{both} without a fixed layer",
                "",
                "set model.attention to [dense, fixed], or leave both out",
            )
    elif columns is None:
        yield (
            key,
            "{model.attention!k} has fixed layers without {model.attention_columns!k}",
            "later windows see these positions of each window",
            f"set {key}",
        )
    elif window is not None and (columns == window or columns * turns > window):
        yield (
            key,
            both,
            f"each pattern has its own columns of a window of {window} positions, and not all of them",
            f"set {key} to {max(1, min(window // turns, window - 1))} or less",
        )


def _implementation(recipe: Recipe) -> Found:
    """Check what the models of transformers have not."""
    data = recipe.data
    tp, pp = recipe.parallel.model_parallel
    full = recipe.activation_checkpointing in ("none", "full")
    only_tuned = recipe.model.family == "bert" and not recipe.task
    for key, wrong, rule, fix in (
        ("model.family", only_tuned, "is only fine-tuned", "gpt2"),
        (
            "model.attention",
            {*recipe.model.attention} != {"dense"},
            "has dense layers",
            "[dense]",
        ),
        (
            "model.shared_layers",
            recipe.model.shared_layers,
            "has layers of their own",
            "false",
        ),
        ("data.attend", data.attend == "document", "sees windows", "window"),
        ("data.positions", data.positions == "document", "sees windows", "window"),
        ("parallel.tp", tp > 1, "is cut by ZeRO alone", "1"),
        ("parallel.pp", pp > 1, "is cut by ZeRO alone", "1"),
        (
            "activation_checkpointing",
            not full,
            "recomputes all layers or none",
            "full or none",
        ),
    ):
        if wrong:
            yield (
                key,
                f"{{{key}}} with {{model.implementation}}",
                f"its {recipe.model.facts.title} {rule}",
                f"set {key} to {fix}",
            )


# keys that only our own models read, and their defaults
_OURS = {
    "model.layer_norm": "pre",
    "model.sentence_head": "none",
    "model.task_head": "none",
    "model.vocab_divisible_by": 128,
    "init_std": 0.02,
    "dropout.hidden": 0.0,
    "dropout.attention": 0.0,
}


def _config(recipe: Recipe) -> Found:
    """Check that a config is of transformers, and that no key beside it would be read by nobody."""
    model = recipe.model
    of_theirs = model.implementation == "transformers" and model.family in OF_CONFIG
    if not (model.config and of_theirs):
        yield (
            "model.config",
            "{model.config!k} with {model.family} and {model.implementation}",
            "it is of transformers, and of a causal_lm or masked_lm, which have no other",
            "set model.implementation to transformers, model.family to one of the two, and the config",
        )
    for key, default in _OURS.items():
        if attrgetter(key)(recipe) != default:
            yield (
                key,
                f"{{{key}}} with {{model.config!k}}",
                "only our own models read it: a config has keys of its own",
                f"set {key} to {default}",
            )


def _vocabulary(recipe: Recipe) -> Found:
    key = "model.vocab_size"
    kind_key = "data.tokenizer.kind"
    size = recipe.model.vocab_size
    kind = recipe.data.tokenizer.kind
    both = "{model.vocab_size} with {data.tokenizer.kind}"
    published = PUBLISHED_VOCABULARIES.get(kind, size)
    # rows of a config may pad its vocabulary
    if size < published or (size > published and recipe.model.config is None):
        yield (
            key,
            both,
            f"the published vocabulary has {published} tokens (tensor parallelism's padding comes on top)",
            f"set {key} to {published}, or {kind_key} to another",
        )
    if kind == "trained_bpe" and size < SMALLEST_BPE:
        yield (
            key,
            both,
            "a byte-level vocabulary needs the 256 bytes and one end-of-document token",
            f"set {key} to {SMALLEST_BPE} or more",
        )
    if kind in TRAINED and any(origin.streamed for origin in recipe.data.origins):
        other = recipe.model.facts.published
        known = (
            f"set {kind_key} to {other} and {key} to {PUBLISHED_VOCABULARIES[other]}"
        )
        yield (
            kind_key,
            "{data.tokenizer.kind} with a streamed source",
            "a vocabulary cannot be trained on what is read once",
            f"{known}, or give {kind_key}=file and a path",
        )


def _tokenizer(recipe: Recipe) -> Found:
    key = "data.tokenizer.kind"
    kind = recipe.data.tokenizer.kind
    stored = any(origin.source == "store" for origin in recipe.data.origins)
    if kind == "file" and not recipe.data.tokenizer.path:
        yield (
            key,
            "{data.tokenizer.kind} needs {data.tokenizer.path!k}",
            "a vocab.txt, a tokenizer.json or a directory with one",
            "set it",
        )
    if stored and kind in TRAINED:
        own = "store (the vocabulary that prepare_data kept with it)"
        yield (
            key,
            "{data.tokenizer.kind} with data.source=store",
            "its tokens are numbered already",
            f"set {key} to {own}, gpt2, bert_uncased, bert_cased or file",
        )
    if kind == "store" and not stored:
        yield (
            key,
            "{data.tokenizer.kind} without data.source=store",
            "there is no store to take it from",
            "name another kind",
        )


def _origins(recipe: Recipe) -> Found:
    data = recipe.data
    stated = [
        key
        for key in ORIGIN_FIELDS
        if getattr(data, key) != Origin.model_fields[key].default
    ]
    if data.blend and stated:
        yield (
            "data.blend",
            f"{{data.blend!k}} together with {', '.join(f'data.{key}' for key in stated)}",
            "the parts of the blend say where documents come from",
            "move these keys into the parts",
        )
    for i, origin in enumerate(data.origins):
        part = f"data.blend[{i}]" if data.blend else "data"
        key = f"{part}.streaming"
        source = f"{{{part}.source}}"
        fix = f"set {part}.streaming to false"
        if origin.source != "packaged" and not origin.name:
            yield (
                f"{part}.source",
                f"{source} needs {{{part}.name!k}}",
                "the dataset's name on the hub, or the path of the files or of the store",
                "set it",
            )
        if origin.source == "packaged" and origin.name:
            own = f"set {part}.source to the kind of that text, or {part}.name to null"
            yield (
                f"{part}.name",
                f"{{{part}.name}} with {source}",
                "the packaged text has no other, and the name would not be read",
                own,
            )
        if origin.streaming and origin.source in ("store", "packaged"):
            yield (
                key,
                f"{{{key}}} with {source}",
                "packaged text and stored tokens are never streamed",
                fix,
            )
        if origin.streaming and (origin.source, origin.documents) == ("text", "file"):
            rule = "a stream holds documents out by their place in their file, and none of a file that is one"
            yield (
                key,
                f"{{{key}}} with {source} and {{{part}.documents}}",
                f"{rule} document",
                f"{fix}, or {part}.documents to blank_line",
            )


def _held_out(recipe: Recipe) -> Found:
    validation = recipe.data.validation_every
    test = recipe.data.test_every
    if validation < 2:
        yield (
            "data.validation_every",
            "{data.validation_every} holds out every document",
            "",
            "set it to 2 or more",
        )
    if test is not None and test < 2:
        yield (
            "data.test_every",
            "{data.test_every} leaves no document to train on",
            "",
            "set it to 2 or more, or to null",
        )


def _checkpointing(recipe: Recipe) -> Found:
    key = "activation_checkpointing"
    chunk = recipe.activation_checkpointing
    layers = recipe.model.layers
    if isinstance(chunk, int) and chunk > layers:
        yield (
            key,
            "{activation_checkpointing} is above {model.layers}",
            "it is the number of layers recomputed together",
            f'set it to {layers} or less, to "full" or to "none"',
        )


def _provenance(recipe: Recipe) -> Found:
    """Check that the keys named in `inferred`, `differs`, `unknown` and `published.printed` exist."""
    for key in sorted(recipe.inferred.keys() & recipe.unknown.keys()):
        yield (
            "unknown",
            f"unknown: {key}",
            "is in inferred as well, and a value has a source or none",
            "keep one of the two",
        )
    own: dict[str, Collection[str]] = {
        key: getattr(recipe, key) for key in ("inferred", "differs", "unknown")
    }
    own["published.printed"] = recipe.published.printed if recipe.published else ()
    known = set(paths()) if any(own.values()) else ()
    fix = "name the key whose value it explains, e.g. batch.global"
    for section, keys in own.items():
        for key in (key for key in keys if key not in known):
            yield section, f"{section}: {key}", "no such key of a recipe", fix


def _task(recipe: Recipe) -> Found:
    """Check that the task has its head, and the head a BERT."""
    model = recipe.model
    task = recipe.task
    key = "model.task_head"
    head = recipe.model.task_head
    if head != "none" and not model.facts.masked:
        yield (
            key,
            "{model.task_head} with {model.family}",
            "heads for tasks stand on a BERT",
            "set model.family to bert",
        )
    if head != "none" and model.sentence_head != "none":
        yield (
            key,
            "{model.task_head} with {model.sentence_head}",
            "it takes the place of the heads of pretraining",
            "set model.sentence_head to none",
        )
    if task is None:
        yield (
            key,
            "{model.task_head} without {task!k}",
            "",
            "start with launch/finetune.py",
        )
        return
    from recipes.tasks import TASKS

    facts = TASKS[task.name]
    if head != facts.head or (facts.labels and model.head_classes != len(facts.labels)):
        yield (
            key,
            "{task.name} with {model.task_head} of {model.head_classes}",
            f"it has a {facts.head} head{f' of {len(facts.labels)}' if facts.labels else ''}",
            "leave the head to --task",
        )
    if model.implementation == "transformers":
        for name in ("check_every", "profile"):
            if getattr(recipe.run, name):
                yield (
                    f"run.{name}",
                    f"{{run.{name}}} with {{model.implementation}}",
                    "Trainer's own loop takes the steps of a fine-tuning",
                    f"set run.{name} to null",
                )
    if (
        facts.head == "span"
        and task.max_query + task.doc_stride + 3 >= recipe.sequence_length
    ):
        yield (
            "task.doc_stride",
            "{task.doc_stride} with {sequence_length}",
            f"a window holds a question of task.max_query={task.max_query} tokens and text to stride over",
            "shorten task.doc_stride or task.max_query",
        )


def _task_files(recipe: Recipe) -> Found:
    task = recipe.task
    assert task
    for name in ("dev_mismatched", "test_mismatched"):
        if getattr(task, name) and task.name != "mnli":
            yield (
                f"task.{name}",
                f"--{name} with {{task.name}}",
                "only MNLI has examples of other genres",
                "leave it out",
            )
    for name, other in (("train", "dev"), ("dev", "train")):
        if getattr(task, name) and not getattr(task, other):
            yield (
                f"task.{other}",
                f"--{name} without --{other}",
                "files take the place of the hub's data set together",
                f"add --{other} FILE",
            )


_Rule = Callable[[Recipe], Found]
_RULES: tuple[_Rule, ...] = (
    _schedule, _optimizer, _rampup, _family, _positions, _heads, _attention, _columns, _implementation,
    _config, _vocabulary, _tokenizer, _origins, _held_out, _checkpointing, _provenance, _task, _task_files,
    _profile,
)  # fmt: skip


def _ds_config(recipe: Recipe) -> Found:
    """Check that a bare name is a file of ds_configs/; a path may be another machine's: checked on use."""
    name = recipe.ds_config
    known = [path.stem for path in _DS_CONFIGS.glob("*.json")]
    if (
        Path(name).name == name
        and not files.is_file(Path(name))
        and name.removesuffix(".json") not in known
    ):
        yield (
            "ds_config",
            "{ds_config}",
            "no such file in ds_configs/",
            did_you_mean(name, known),
        )


def _branch(recipe: Recipe) -> Found:
    yield (
        "branch",
        "{branch!k}",
        "is written by the run that it is of",
        "leave it out: --branch RUN[@STEP] goes on from a run's checkpoint",
    )


def _batch(recipe: Recipe) -> Found:
    """Check the shares of the batch of a row that states dp."""
    batch = recipe.batch
    dp = recipe.parallel.dp
    assert dp
    _, pp = recipe.parallel.model_parallel
    shares = share_batch(
        batch.micro, batch.accumulation, batch.global_, dp, pp, dp_is_stated=True
    )
    if isinstance(shares, Problem):
        yield shares


def _cells(columns: Sequence[str], recipe: Recipe) -> Found:
    row = recipe.published.row if recipe.published else None
    if row is None or not columns:
        return
    printed = row.split("|")
    if len(printed) == len(columns):
        return
    cells = itertools.zip_longest(columns, map(str.strip, printed), fillvalue="?")
    shown = ", ".join(f"{name}: {cell}" for name, cell in cells)
    yield Problem(
        "published.row",
        (
            Key("published.row"),
            f" has {counted(len(printed), 'cell')} for {counted(len(columns), 'column')} ({shown})",
        ),
        "one cell for each heading, separated by |, blank where the source prints none",
        "add the missing or join the surplus ones",
    )


# Of the rules about what a recipe may have: what has to be there.
_ABOUT: dict[_Rule, Callable[[Recipe], object]] = {
    _rampup: attrgetter("batch.rampup"),
    _implementation: lambda recipe: recipe.model.implementation == "transformers",
    _config: lambda recipe: recipe.model.config or recipe.model.family in OF_CONFIG,
    _heads: lambda recipe: recipe.model.config is None,
    _task: lambda recipe: recipe.task or recipe.model.task_head != "none",
    _task_files: attrgetter("task"),
    _profile: attrgetter("run.profile"),
    _batch: attrgetter("parallel.dp"),
    _branch: attrgetter("branch"),
}
