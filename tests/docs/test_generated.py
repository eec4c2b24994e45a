"""docs/support.md and docs/options.md are what the package says of itself, docs/numbers.md is what results.csv says."""

import importlib.util
import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

import lightning_fastft
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.hf.families import FAMILIES
from tests.support.tiny_models import COMPOSITES, build_tiny

ROOT = Path(__file__).parents[2]
AGAIN = "the package has changed: python docs/generate.py"


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_table_of_families_is_what_the_judges_say(generate):
    text = generate.write_support()
    assert (ROOT / "docs/support.md").read_text() == text, AGAIN
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in text.splitlines()
        if line.count("|") == 7
    }
    assert all(rows[family][0] == "tested" for family in FAMILIES)
    assert rows["gpt_oss"][1:] == ["tiled, varlen, flex, reference", "yes", "yes", "linear layers and experts"]
    assert rows["llama"][2:] == ["yes", "dense", "linear layers"]
    assert rows["minimax"][:2] == ["refused", "-"]
    # The gated delta rule is fused with its layer; convolutions and latent attention run as modules.
    fused = {family: rows[family][2] for family in ("qwen3_next", "qwen3_5_text", "lfm2", "deepseek_v3", "olmoe")}
    assert list(fused.values()) == ["yes", "yes", "yes, mixers as modules", "norms and blocks", "-"]
    reasons = re.findall(r"^- `(\w+)`: (.*)$", text.partition("## Refused")[2].partition("\n## ")[0], re.MULTILINE)
    assert reasons
    assert all("one_by_one" not in reason for _, reason in reasons), "the remedy is above the list"


@pytest.mark.slow
def test_every_family_with_fused_layers_is_in_the_table(generate):
    families = [*FAMILIES, *generate.MORE_FAMILIES]
    models = [generate.build_on_meta(family) for family in families if family in CONFIG_MAPPING]
    # The text parts of models with images.
    models += map(build_tiny, COMPOSITES)
    kinds = {type(module).__name__ for model in models for module in model.modules()}
    # An older transformers has not all of them.
    later = tuple(family for family in families if family not in CONFIG_MAPPING)
    missing = {name for name in LAYERS.keys() - kinds if not name.lower().startswith(later)}
    assert missing == set(), "add its model_type to FAMILIES of hf/families.py or to MORE_FAMILIES of docs/generate.py"


def test_page_of_options_is_what_signatures_say(generate):
    text = generate.write_options()
    assert (ROOT / "docs/options.md").read_text() == text, AGAIN
    assert set(re.findall(r"^## (\w+)$", text, flags=re.MULTILINE)) == {*lightning_fastft.__all__, "Commands"}
    assert "| `segment_lengths` | `tuple[int, ...]` | `()` |" in text, "fields of a NamedTuple"
    assert "| `**options` | `Any` |  | Options of ``FineTuner``. |" in text, "not a required option"


def test_every_option_of_a_public_class_is_described(generate):
    """A parameter that its docstring leaves out would be missing from the page."""
    import inspect

    missing = []
    for name in lightning_fastft.__all__:
        value = getattr(lightning_fastft, name)
        if not inspect.isclass(value) or issubclass(value, Exception) or value.__init__ is object.__init__:
            continue
        meanings = generate.read_meanings(value)
        parameters = list(inspect.signature(value.__init__).parameters.values())[1:]
        named = [option.name for option in parameters if option.kind not in (option.VAR_KEYWORD, option.VAR_POSITIONAL)]
        missing += [f"{name}.{option}" for option in named if option not in meanings]
    assert missing == [], "describe them under Args in the docstring of the class"


def test_every_choice_of_an_option_is_described(generate):
    rows = re.findall(
        r"^\| `(\w+)` \| `.*?Literal\[(.*?)\].*?` \| .*? \| (.*) \|$", generate.write_options(), re.MULTILINE
    )
    assert len(rows) > 20
    missing = [
        f"{option}={choice!r}"
        for option, choices, meaning in rows
        for choice in re.findall(r"'([^']*)'", choices)
        if choice not in meaning
    ]
    assert missing == [], "say under Args of the class what they do"


@pytest.fixture(scope="module")
def numbers():
    from docs import numbers_page

    return numbers_page


def test_page_of_numbers_is_what_results_say(numbers):
    assert (ROOT / "docs/numbers.md").read_text() == numbers.write_numbers(), (
        "results.csv or benchmarks/published_table.py has changed: python docs/generate.py"
    )


def test_aims_in_the_table_are_missed(numbers):
    for aim in numbers.write_aims(numbers.read_entries()).splitlines()[2:]:
        _, wanted, measured, *_ = [cell.strip() for cell in aim.strip("|").split("|")]
        short = [float(text.split()[0].replace(",", "")) for text in (wanted, measured)]
        assert (short[1] < short[0]) if "tokens/s" in wanted else (short[1] > short[0]), aim


def test_starts_are_those_of_the_newest_run(numbers):
    def rows(command, factor):
        parts = list(enumerate(("imports", "loaded", "first step", "steady"), start=1))
        return [
            {
                "benchmark": "first_step", "workload": "w", "date": "2026-11-27", "device": "NVIDIA H200",
                "command": command, "system": f"{system}, {caches} caches", "metric": f"time to {part}",
                "value": f"{factor * number * (4 if system == 'unsloth' else 1)}",
            }
            for system in ("ours", "unsloth") for caches in ("cold", "warm") for number, part in parts
        ]  # fmt: skip

    _, _, cold, warm, _, run = numbers.write_first_steps([*rows("old", 10), *rows("new", 1)]).splitlines()
    assert cold == "| w | cold | 1.0 | 2.0 | 3.0 | 4.0 | 12.0 | 16.0 | 0.25 | 0.25 |"
    assert warm == cold.replace("cold", "warm")
    assert run == "- w, H200, 2026-11-27: `new`"


def find_numbers(text):
    """Return the numbers of prose. Names with digits (Qwen3-14B, H200, 8-bit) are none."""
    words = re.sub(r"<!--.*?-->|`[^`]*`|\]\([^)]*\)|\{\w+\}", " ", text)
    return [word for word in re.findall(r"[^\s|(]*\d[^\s|)]*", words) if not re.match(r"[A-Za-z]|\d+-bit\b", word)]


def test_prose_names_no_figure_of_its_own(numbers):
    assert find_numbers(numbers.TEMPLATE) == []


@pytest.mark.parametrize("claim", ["1.9 times", "takes 854 ms", "+3.9 %", "1.9x", "in (12 GiB)", "2026-11-22"])
def test_a_figure_by_hand_is_seen(numbers, claim):
    assert len(find_numbers(f"{numbers.TEMPLATE} On Qwen3-14B in 8-bit: {claim}.")) == 1


def test_a_figure_that_changes_in_results_changes_in_tables_and_prose(numbers, tmp_path):
    text, path = (ROOT / "benchmarks/results.csv").read_text(), tmp_path / "results.csv"
    path.write_text(text.replace(",63.5151,", ",777.542,"))
    changed = numbers.write_numbers(path)
    assert "takes 778 ms" in " ".join(changed.split())
    assert "| `keep+graphs` | 32-bit | 778 |" in changed
    assert numbers.write_numbers() == changed.replace("778", "63.5")


def entry_of(numbers, label, *, order, command="a", device="NVIDIA H200", ms=100.0, workload="tiny, packed"):
    figures = {"ms": ms, "tokens": 1e5 / ms, "allocated": 10.0}
    return numbers.Entry("train_step", workload, label, "2026-11-26", command, device, order, figures)


def test_headline_is_the_newest_joint_run_and_what_others_have_besides(numbers):
    entries = [
        entry_of(numbers, "unsloth unsloth, adamw_8bit", order=1, command="old"),
        entry_of(numbers, "unsloth skip, adamw_8bit", order=2, command="old", device="NVIDIA H100"),
        entry_of(numbers, "ours keep, adamw_fused", order=3, command="old", ms=90.0),
        entry_of(numbers, "ours keep, adamw_fused", order=4, command="joint", ms=95.0),
        entry_of(numbers, "unsloth off, adamw_8bit", order=5, command="joint", ms=98.0),
        # Newer and alone, or with plain only: neither is a headline.
        entry_of(numbers, "ours keep, adamw_fused", order=6, command="alone", ms=50.0),
        entry_of(numbers, "ours keep, adamw_fused", order=7, command="plain", ms=51.0),
        entry_of(numbers, "plain recompute, adamw_8bit", order=8, command="plain"),
        entry_of(numbers, "ours keep, adamw_fused", order=9, workload="tiny, packed, labels 30%", ms=40.0),
        # Newer, beside a slow setting only: a ratio would not be one of the best of each.
        entry_of(numbers, "ours keep, adamw_fused", order=10, command="lacks", ms=45.0),
        entry_of(numbers, "unsloth unsloth, adamw_8bit", order=11, command="lacks", ms=200.0),
    ]
    run, earlier = numbers.find_headline(entries, "tiny")
    assert [entry.order for entry in run] == [4, 5]
    assert [entry.order for entry in earlier] == [11, 8]


def test_a_control_stands_beside_the_row_that_it_repeats(numbers, monkeypatch):
    monkeypatch.setattr(numbers, "HEADLINES", ("tiny",))
    labels = ("ours keep, adamw_fused", "ours keep A/A, adamw_fused", "unsloth off, adamw_8bit")
    entries = [entry_of(numbers, label, order=order, ms=90.0 + order) for order, label in enumerate(labels)]
    # Of another run: neither a row nor a control.
    entries.insert(0, entry_of(numbers, "unsloth off A/A, adamw_8bit", order=-1, command="old", ms=80.0))
    cells = [line.split(" | ")[1:6] for line in numbers.write_headlines(entries).splitlines() if "tiny" in line]
    assert cells == [["ours", "`keep`", "32-bit", "90", "91"], ["unsloth", "`off`", "8-bit", "92", ""]]


def test_ratios_are_of_equal_moments_first_and_leave_fp8_out(numbers, monkeypatch):
    monkeypatch.setattr(numbers, "HEADLINES", ("tiny",))
    labels = (("ours keep+fused+fp8, adamw_fused", 10.0), ("ours keep+fused, adamw_fused", 50.0))
    labels += (("ours keep+fused, adamw_fused_8bit", 80.0), ("unsloth off, adamw_8bit", 100.0))
    # Measured twice: the faster time counts, on both sides.
    labels += (("ours keep+fused A/A, adamw_fused", 40.0), ("unsloth off A/A, adamw_8bit", 96.0))
    entries = [entry_of(numbers, label, order=order, ms=ms) for order, (label, ms) in enumerate(labels)]
    row = numbers.write_ratios(entries).splitlines()[-1]
    assert row == "| tiny | unsloth | 1.20 |  | 2.40 | 10 against 10 |"


def test_a_part_of_a_page_is_replaced_and_nothing_around_it(generate):
    page = "before <!-- x -->\nold\n<!-- end of x -->\nafter <!-- y -->\nold"
    assert (
        generate.replace_part(page, "x", "new\n") == "before <!-- x -->\nnew\n<!-- end of x -->\nafter <!-- y -->\nold"
    )
    assert (
        generate.replace_part(page, "y", "new\n")
        == "before <!-- x -->\nold\n<!-- end of x -->\nafter <!-- y -->\nnew\n"
    )
    with pytest.raises(ValueError, match="no mark 'z'"):
        generate.replace_part(page, "z", "new")


def test_figures_have_three_digits_or_more(numbers):
    assert numbers.format_figure(2293.28) == "2,293"
    assert numbers.format_figure(14.94) == "14.9"
    assert numbers.format_figure(0.48822) == "0.488"


def test_the_table_of_quality_shows_the_newest_curves_and_a_slower_start(tmp_path, numbers):
    head = "system,mode,seed,step,seconds,loss,exact\n"
    ends = "ours,keep,0,9,{},2.5,0.5\nours,keep,1,9,2,2.7,0.7\nplain,keep,0,9,4,2.6,0.6\nplain,keep,1,9,3,2.6,0.6\n"
    start = "ours,keep,0,0,0,3.0,0.4\n"
    (tmp_path / "quality-x-2026-01-02.csv").write_text(head + start + ends.format(5))
    (tmp_path / "quality-y-2026-01-01.csv").write_text(head + start + ends.format(1))
    text = numbers.write_quality(tmp_path)
    assert "| lightning_fastft | `keep` | 5 | 2.0 to 2.0 | 2.6000 (2.5000 to 2.7000) | 60.0% (50.0% to 70.0%) |" in text
    assert "slower than transformers + PEFT" in text
    (tmp_path / "quality-x-2026-01-02.csv").unlink()
    assert "slower" not in numbers.write_quality(tmp_path)
