"""tools/check_tables.py on the published tables: it finds what is known to be wrong with the sources."""

import pytest
from launching import ROOT

from tools import check_tables
from tools.tables import verification


@pytest.fixture(scope="module")
def report():
    """The report on every published table of this repository."""
    return verification.verify()


def lines(report) -> str:
    stale = [f"stale: {line}" for line in report.stale]
    return "\n".join([*(f"{check.subject} {check.difference}" for check in report.unexplained), *stale])


def found(report, subject: str, quantity: str):
    (check,) = (each for each in report.checks if (each.subject, each.quantity) == (subject, quantity))
    return check


def test_every_disagreement_is_explained_and_no_explanation_is_stale(report):
    assert report.passed, lines(report)


def test_the_readme_says_how_many_values_agree(report):
    number = check_tables._numbers(report, report.checks)
    agree, errata = number["agree"], number["errata"]
    quoted = f"Of {agree + errata} recomputed values {agree} agree; {errata} disagree with the sources"
    words = (ROOT / "recipes" / "README.md").read_text().split()
    assert quoted in " ".join(words)


KNOWN = [
    ("dgx2_gpt2_model_parallel/54x1920-h20-tp2", "parameters", "2491526400"),
    ("dgx2_gpt2_model_parallel/54x1920-h20-tp2", "parameters per rank", "1245763200"),
    ("dgx2_gpt2_data_parallel/40x1536-b2-oom", "out of memory", "micro-batch 8"),
    ("jeanzay_hf_deepspeed_max_size/23b-g16", "TFLOPS", "twice"),
    *((f"jeanzay_megatron_performance/{row}", "GPUs", "= 32") for row in (
        "18b-pp8-ga64-mb4", "18b-pp8-ga128-mb4", "18b-pp8-ga256-mb4", "18b-pp8-ga128-mb6", "18b-pp8-ga32-mb8",
    )),
    ("jeanzay_megatron_performance/48b-pp32-ga256-mb4", "GPUs", "= 128"),
    ("jeanzay_megatron_performance/18b-pp8-ga128-mb4", "TFLOPS", "-0.6 %"),
    ("jeanzay_megatron_deepspeed_zero_tp_sweep/48b-tp1-mb16", "TFLOPS", "+2.3 %"),
    ("jeanzay_megatron_deepspeed_zero_cpu_offload/48b-tp4-mb64", "TFLOPS", "+7.9 %"),
    ("jeanzay_megatron_max_size_16gb/22b-g256", "global batch", "= 16"),
    ("jeanzay_megatron_max_size_16gb/22b-g256", "size label", "26.19B"),
    ("jeanzay_megatron_max_size_16gb/50b-g128", "size label", "of all ranks in 2^20 x 1000"),
    ("jeanzay_megatron_performance/48b-pp16-ga256-mb4-0525", "size label", "48.40 in 2^30"),
    ("jeanzay_hf_deepspeed_performance/48b-mb4-0527", "time", "139.52"),
    ("a100_blog_table4/2b", "weak scaling", "92.8"),
    ("a100_blog_table4/8.7b", "weak scaling", "76.6"),
    ("sber_path_to_13b/01-small", "size label", "124.4M"),
    ("a100_blog_bert_base/110m", "size label", "110.1M"),
    ("sber_path_to_13b/06-gpt3-large-deepspeed", "size label", "760.3M"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "quantity", "computed"), KNOWN)
def test_what_is_known_to_be_wrong_is_found(report, subject, quantity, computed):
    of_row = [check for check in report.explanations if check.subject == subject]
    known = [check for check in of_row if quantity in check.quantity]
    assert [computed in check.computed for check in known] in ([True], [True, False]), known


def test_every_known_disagreement_is_found(report):
    """Counted before the errata moved into the tables' files, without those of texts."""
    assert (len(report.errata), len(report.explanations), len(report.texts)) == (17, 54, 17)


def test_the_two_accounts_of_berts_training_parameters_are_set_side_by_side(report):
    (text,) = (text for text in report.texts if "Devlin et al., 2018" in text)
    assert "kept the same as ALBERT" in text and "LAMB" in text


# Sizes and speeds of the rows' models that other documents and logs print.
ELSEWHERE = [
    ("jeanzay_megatron_max_size_32gb/193b-g256", "parameters, middle stages", "805433344", "805433344"),
    ("jeanzay_megatron_deepspeed_zero/48b-tp4-mb48-0525", "parameters, all ranks", "52.005B", "52004716544"),
    ("dgx2_gpt2_data_parallel/24x1024-g16-b32", "parameters, all ranks", "354871296", "354871296"),
    ("a100_blog_table4/8.7b", "parameters, each once", "8.67B", "8668008448"),
    ("a100_blog_table4/4.2b", "TFLOPS, batch 2048 in 1242 ms on 512 GPUs", "116.7", "116.6"),
    (
        "a100_blog_figure2/gpt2-8.3b-a100", "speed over gpt2-8.3b-v100", "2.5x",
        "312 / 125 TFLOPS = 2.496, of the peaks",
    ),
    ("jeanzay_megatron_max_size_16gb/7.5b-g16", "setting published.time_per_iteration_s", "0.6613", "0.661"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "quantity", "printed", "computed"), ELSEWHERE)
def test_what_logs_and_other_documents_print_agrees(report, subject, quantity, printed, computed):
    check = found(report, subject, quantity)
    assert (check.printed, check.computed, check.status) == (printed, computed, "agrees")


def test_what_cannot_be_checked_says_why(report):
    reasons = {
        check.subject: check.how
        for check in report.checks
        if check.status == "not checkable" and check.quantity != "parameters"
    }
    assert "no public script" in reasons["jeanzay_megatron_deepspeed_zero_tp_sweep/24b-tp1-mb16"]
    assert "no time" in reasons["hpe1270_v100_pcie/tf-bert-b10"]
    assert "activations decide" in reasons["dgx2_gpt2_data_parallel/40x1536-b24-oom"]
    assert any("129 / 217 / 125 s, 74 % apart" in remark for remark in report.repeated)


def test_every_row_is_checked_on_its_modules(report):
    modules = [check for check in report.checks if check.quantity == "modules against cost.py"]
    others = {f"a100_blog_table{name}" for name in ("2/roberta", "2/albert", "2/xlnet", "3/albert")}
    rows = {check.subject for check in report.checks if check.transcribed} - others
    assert {check.subject for check in modules} == rows and len(rows) >= 98
    assert {check.status for check in modules} == {"agrees"}
    largest = next(check for check in modules if check.subject.endswith("193b-g256"))
    assert largest.computed == "207012282368 on 256 ranks"


# Worked out by hand from the row: 40 layers of 6144, 1024 tokens, batch 4 in 1.381 s on 16 GPUs, recomputed;
# 24 layers of 1024, batch 24 in 0.655 s on 8 GPUs, not recomputed. 50688, 50304: padded vocabularies.
BY_HAND = [
    ("jeanzay_megatron_max_size_32gb/18b-g16", "TFLOPS",
     18 * 4 * 2 * 1024 * 4 / (1.381 * 16 * 1000), "26.69 with 18B"),
    ("jeanzay_megatron_max_size_32gb/18b-g16", "TFLOPS, formula, all parameters",
     18.437670912 * 4 * 2 * 1024 * 4 / (1.381 * 16 * 1000), "27.34"),
    ("jeanzay_megatron_max_size_32gb/18b-g16", "TFLOPS, exact count",
     4 * (4 * 40 * (24 * 1024 * 6144**2 + 4 * 1024**2 * 6144) + 6 * 1024 * 6144 * 50688) / (1.381 * 16e12),
     "27.96"),
    ("hpe1270_v100_pcie/gpt2-b3-no-ckpt", "TFLOPS, formula, all parameters",
     0.354823168 * 3 * 2 * 1024 * 24 / (0.655 * 8 * 1000), "9.985"),
    ("hpe1270_v100_pcie/gpt2-b3-no-ckpt", "TFLOPS, exact count",
     24 * (3 * 24 * (24 * 1024 * 1024**2 + 4 * 1024**2 * 1024) + 6 * 1024 * 1024 * 50304) / (0.655 * 8e12),
     "11.36"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "quantity", "value", "shown"), BY_HAND)
def test_operations_are_those_worked_out_by_hand(report, subject, quantity, value, shown):
    assert found(report, subject, quantity).computed == shown
    assert float(shown.split()[0]) == float(f"{value:.4g}")


NOT_RECOMPUTED = [
    ("hpe1270_v100_pcie/tf-bert-b10", "printed published.samples_per_s", "no time is printed"),
    ("hpe1270_v100_pcie/tf-bert-b10", "printed batch.micro", "samples/s alone"),
    ("dgx2_gpt2_data_parallel/40x1536-b24-oom", "printed batch.micro", "out of memory"),
    ("dgx2_bert_data_parallel/40x1536-b2", "printed published.cached_gb", "bounded by"),
    ("dgx2_bert_model_parallel/64x2304-tp4-b2", "printed model.heads", "no size depends"),
    ("jeanzay_megatron_performance/36b-pp8-ga128-mb4", "printed published.date", "nothing follows"),
]


@pytest.mark.parametrize(("subject", "quantity", "why"), NOT_RECOMPUTED)
def test_a_printed_number_that_nothing_recomputes_is_listed(report, subject, quantity, why):
    check = found(report, subject, quantity)
    assert check.status == "not checkable" and why in check.how


def test_every_time_is_a_plausible_share_of_the_peak(report):
    shares = {
        check.subject: check for check in report.checks if check.quantity == "share of peak, exact count"
    }
    timed = {check.subject for check in report.checks if check.quantity == "TFLOPS, exact count"}
    assert timed <= set(shares) and len(timed) >= 70
    assert {check.status for check in shares.values()} == {"agrees"}


# (row, quantity) -> worked out by hand: tokens of the pretraining over 2M x 1024 x 512; RACE's 1436 and 3498.
SCORES = {
    ("a100_blog_table2/3.9b", "trained tokens"): ("1", f"{1.5e6 / 2e6:.3g}", "rounded"),
    ("a100_blog_table2/albert", "trained tokens"): ("3", f"{1.5e6 * 4096 / (2e6 * 1024):.3g}", "exact"),
    ("a100_blog_table2/roberta", "trained tokens"): ("2", f"{5e5 * 8192 / (2e6 * 1024):.3g}", "exact"),
    ("a100_blog_table2/3.9b", "RACE, of middle and high"):
        ("89.5", f"{(1436 * 91.8 + 3498 * 88.6) / 4934:.2f}", "rounded"),
    ("a100_blog_table3/3.9b", "RACE, of middle and high"):
        ("90.9", f"{(1436 * 93.1 + 3498 * 90.0) / 4934:.2f}", "rounded"),
    ("a100_blog_table3/3.9b", "ensemble, squad2.f1"): ("91.7", "91.2, of one model", "no less"),
    ("a100_blog_table3/albert", "ensemble, race.accuracy"): ("89.4", "86.5, of one model", "no less"),
    ("a100_blog_table2/1.3b", "size, squad2.em"): ("87.1", "84.8, of 336m", "better with size"),
}  # fmt: skip


@pytest.mark.parametrize(("subject", "quantity"), SCORES)
def test_scores_owe_each_other_what_is_worked_out_by_hand(report, subject, quantity):
    printed, computed, how = SCORES[subject, quantity]
    check = found(report, subject, quantity)
    assert check.status == "agrees" and check.printed in (printed, f"{float(printed)}")
    assert computed in check.computed and how in check.how


def test_every_score_of_every_line_is_checked(report):
    """All 10 scores are larger than the next smaller model's, twice; 7 of each ensemble are no less."""
    tables = ("a100_blog_table2", "a100_blog_table3")
    of = [check.quantity for check in report.checks if check.status == "agrees" and check.table in tables]
    assert sum(quantity.startswith("size, ") for quantity in of) == 20
    assert sum(quantity.startswith("ensemble, ") for quantity in of) == 14
    assert of.count("RACE, of middle and high") == 8 and of.count("trained tokens") == 6
