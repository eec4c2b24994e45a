"""Every public option refuses what lies outside of its range: wrong types, numbers out of range, NaN, infinity, huge
numbers, empty strings.

The options are read from the signatures of the public classes, so that one that is added without a line here fails the
test.
"""

import inspect
import math
from datetime import timedelta

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import Strategy

import lightning_fastft
from lightning_fastft import FineTuner, OffloadCheckpointing
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.document import Document
from lightning_fastft.packing.rows.formats import COLUMNS
from lightning_fastft.training.losses import PREFERENCE_LOSSES
from tests.support.sizes import sizes

CONFIG = sizes(model_type="qwen3", vocab=64, width=32, inner=32, layers=1, heads=2)
# What options are called with; each kind of option says which of these it takes.
HUGE = 10**400
POOL = (
    None,
    True,
    False,
    0,
    1,
    -1,
    -(10**400),
    HUGE,
    0.5,
    1.0,
    -0.5,
    1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "  ",
    "nonsense",
    "\0",
    "1",
    "true",
    "nan",
    b"auto",
    [],
    [None],
    [1],
    [-1],
    {},
    {"": 1},
    {"unknown": "x"},
    (),
    object(),
    1j,
    len,
    timedelta(seconds=-1),
)


def is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value):
    return (is_whole(value) or isinstance(value, float)) and not (isinstance(value, float) and not math.isfinite(value))


def whole(low, high=None):
    return lambda value: is_whole(value) and value >= low and (high is None or value <= high)


def number(low, high):
    return lambda value: is_number(value) and low <= value <= high


def choice(*names):
    def is_named(value):
        return any(
            value is name or (isinstance(value, str) and isinstance(name, str) and value == name) for name in names
        )

    # Tried in addition to POOL.
    is_named.names = names
    return is_named


def either(*kinds):
    def is_any(value):
        return any(kind(value) for kind in kinds)

    is_any.names = tuple(name for kind in kinds for name in getattr(kind, "names", ()))
    return is_any


def nothing(value):
    return value is None


def flag(value):
    return isinstance(value, bool)


def path(value):
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value


def text(value):
    return isinstance(value, str) and bool(value.strip())


def called(value):
    return callable(value)


def rows(value):
    """What is in a list is judged when it is read, row by row."""
    return value is None or path(value) or isinstance(value, (list, tuple))


def named(value):
    """Names of data sets, each with its rows."""
    is_mapping = isinstance(value, dict) and bool(value)
    return is_mapping and all(text(name) and given is not None and rows(given) for name, given in value.items())


share = number(0, 1)
tokenizer = either(nothing, text, called)
# Objects of Lightning, which judges them when the Trainer puts them together.
LIGHTNINGS_OWN = "Lightning's own"
strategy = {
    "activations": either(nothing),
    "attention": choice("auto", "tiled", "varlen", "cudnn", "flex", "sdpa", "reference", "one_by_one"),
    "exact_resume": flag,
    **dict.fromkeys(
        ("accelerator", "cluster_environment", "checkpoint_io", "precision_plugin", "kwargs", "timeout"), LIGHTNINGS_OWN
    ),
}
size = whole(1, 2**20)

TUNER = {
    # A dictionary and a configuration are judged when they are read; here none of either is whole.
    "model": either(path, lambda value: isinstance(value, dict)),
    "tokenizer": tokenizer,
    "quantization": choice(None, "nf4"),
    "lora": either(nothing, lambda value: value == {}),
    # A configuration has no weights.
    "init": choice("random"),
    "dtype": choice("auto", "bfloat16", "float16", "float32"),
    "adapter_dtype": choice("float32", "bfloat16"),
    "master_dtype": choice("auto", "float32", "bfloat16"),
    "optimizer": either(nothing, called),
    "learning_rate": either(nothing, number(0, 1e3)),
    "weight_decay": either(nothing, number(0, 1e3)),
    "scheduler": either(choice("cosine", "linear", "constant"), called),
    "scheduler_interval": choice("step", "epoch"),
    "warmup_share": share,
    "warmup_steps": either(nothing, whole(0, 10**9)),
    "min_learning_rate_share": share,
    "revision": either(nothing, text),
    "accept_other_base": flag,
    "loraplus_lr_ratio": either(nothing, number(1, 1e3)),
    # No value of the pool is a folder.
    "adapter": nothing,
    "frozen_adapters": either(nothing, lambda value: isinstance(value, (list, tuple)) and not value),
}
weight = number(0, 1e3)
reference = either(nothing, text)

OPTIONS = {
    "FineTuner": {**TUNER, "neftune_noise_alpha": either(nothing, number(1e-6, 1e3))},
    "PreferenceTuner": {
        **TUNER,
        # Without adapters this loss needs another reference.
        "lora": lambda value: value == {},
        # For full fine-tuning.
        "master_dtype": choice("auto"),
        # "robust" needs a label_smoothing.
        "loss": choice(*(loss for loss in PREFERENCE_LOSSES if loss != "robust")),
        "beta": number(1e-6, 1e3),
        "label_smoothing": number(0, 0.499),
        "sft_weight": either(nothing, weight),
        "reference": reference,
        # Read by loss="simpo" and loss="kto" alone.
        "gamma": number(0.5, 0.5),
        **dict.fromkeys(("desirable_weight", "undesirable_weight"), number(1, 1)),
    },
    "RewardTuner": {
        **TUNER,
        "loss": choice("pairwise", "scalar", "stepwise"),
        "read": choice("last", "mean"),
        "center_weight": weight,
    },
    "PolicyTuner": {
        **TUNER,
        # For full fine-tuning.
        "master_dtype": choice("auto"),
        # Others do not read clip_low and clip_high.
        "loss": choice("grpo", "dapo"),
        "advantage": choice("normalised", "centred", "leave_one_out", "given"),
        "ratio": choice("token", "sequence"),
        "clip_low": share,
        **dict.fromkeys(("clip_high", "kl_weight"), weight),
        # At least 1 + clip_high.
        "dual_clip": either(nothing, number(1.2, 1e3)),
        # Read by loss="sapo" alone.
        "sapo_temperature_pos": number(1, 1),
        "sapo_temperature_neg": number(1.05, 1.05),
        # Read with a kl_weight alone.
        "unbiased_kl": lambda value: value is False,
        "temperature": number(1e-3, 1e3),
        "sampler_clip": either(nothing, number(1e-3, 1e3)),
        # Belongs to loss="dr_grpo" alone.
        "max_completion_tokens": nothing,
        # Read with a kl_weight alone.
        "reference": either(nothing),
    },
    "DistillationTuner": {
        **TUNER,
        "teacher": text,
        "kind": choice("forward_kl", "reverse_kl", "jsd"),
        # Read by kind="jsd" alone.
        "beta": number(0.5, 0.5),
        "temperature": number(1e-3, 1e3),
        "sft_weight": share,
        "vocab_size": either(nothing, whole(2)),
        "store": either(nothing, path),
        # Read with a store alone.
        "top_k": nothing,
    },
    "RolloutDataModule": {
        "prompts": lambda value: value is not None and rows(value),
        "rewards": either(nothing, called),
        "reward_weights": either(nothing, lambda value: isinstance(value, (list, tuple)) and not value),
        # A function without a description is refused, and none here has one.
        "tools": either(nothing, lambda value: isinstance(value, (list, tuple)) and not value),
        # Read with tools alone.
        "max_tool_turns": nothing,
        "sampler": called,
        "sampled_share": share,
        **dict.fromkeys(("num_completions", "prompts_per_round", "max_new_tokens"), whole(1)),
        "temperature": number(1e-3, 1e3),
        "sampling_options": either(nothing, lambda value: value == {}),
        "max_tokens": whole(2),
        "chat_template_kwargs": either(nothing, lambda value: isinstance(value, dict)),
        "pad_to_max": flag,
        "share_prompts": choice("auto", True, False),
        "mask_truncated": flag,
        "seed": whole(0, 2**64 - 1),
    },
    "PackedDataModule": {
        "paths": rows,
        **dict.fromkeys(("val_paths", "test_paths", "predict_paths"), either(rows, named)),
        "val_share": share,
        "tokenizer": tokenizer,
        "max_tokens": whole(2, 2**31 - 1),
        "format": choice("auto", *COLUMNS),
        "columns": either(nothing, lambda value: value == {}),
        "chat_template": either(nothing, text),
        "chat_template_kwargs": either(nothing, lambda value: isinstance(value, dict)),
        "loss_on": choice("completion", "all"),
        "add_eos": flag,
        **dict.fromkeys(("separator", "step_separator"), lambda value: isinstance(value, str)),
        "extra_columns": choice("refuse", "ignore"),
        "too_long": choice("refuse", "truncate", "split"),
        "pad_to_max": flag,
        "share_prompts": choice("auto", True, False),
        "streaming": flag,
        "seed": whole(0, 2**64 - 1),
        "num_workers": whole(0, 1024),
        "pin_memory": choice("auto", True, False),
        "cache_dir": either(nothing, path),
        "num_proc": either(nothing, whole(1, 1024)),
        "max_reject_share": share,
        "rejected_path": either(nothing, path),
        "show_progress": flag,
    },
    "OffloadCheckpointing": {
        "policy": choice("auto", "keep", "offload", "recompute"),
        "vram_budget": either(choice("auto"), number(2**-30, 2**20)),
        "host_budget": either(choice("auto"), number(0, 2**20)),
        "buffers": whole(1, 8),
        "weights": choice("auto", "resident", "stream"),
        "mlp_tiles": whole(1, 1024),
    },
    "FastFTStrategy": strategy,
    "FastFTDDPStrategy": {**strategy, "context_parallel": size},
    "FastFTFSDPStrategy": {
        **strategy,
        **dict.fromkeys(("data_parallel_size", "tensor_parallel_size"), either(choice("auto"), size)),
        **dict.fromkeys(("context_parallel", "expert_parallel"), size),
        "adapters": choice("auto", "replicate", "shard"),
        "shard": either(choice("auto", "node"), whole(1, 2**20)),
        "gradient_sync": choice("window", "batch"),
        "save_distributed_checkpoint": flag,
        "async_save": flag,
        "process_group_backend": either(nothing, text),
        "timeout": either(nothing, lambda value: isinstance(value, timedelta) and value > timedelta(0)),
    },
    "BincountRouter": {},
    "ExactResume": {"stop_signals": flag, "stop_timeout_s": number(1, 86_400)},
    "FastFTProgressBar": {
        "refresh_rate": whole(0),
        "process_position": whole(0),
        "leave": flag,
        "names": lambda value: isinstance(value, (list, tuple)) and all(map(text, value)),
    },
    "FiniteGuard": {
        "max_skips": whole(1, 100),
        "check_every_n_steps": whole(1),
        "unsupported": choice("refuse", "wait"),
    },
    "FusedKernels": {
        "cuda_graphs": choice(False, True, "auto"),
        "base_compute": choice("model_dtype", "fp8", "fp8_reference"),
    },
    "GenerateSamples": {
        "prompts": lambda value: isinstance(value, (list, tuple)) and len(value) > 0 and all(map(text, value)),
        "max_new_tokens": whole(1),
        "tokenizer": LIGHTNINGS_OWN,
    },
    "GradientHealth": {"num_steps": whole(3), "allow_zero": either(text, lambda value: value in ([], ()))},
    "HostWaitDetector": {
        "steps": lambda value: (
            isinstance(value, (list, tuple)) and len(value) > 0 and all(is_whole(step) and step >= 0 for step in value)
        ),
        "on_wait": choice("report", "warn", "raise"),
    },
    "PackedTraining": {"attention": strategy["attention"], "activations": strategy["activations"]},
    "RunReport": {"path": either(nothing), "profile_step": either(nothing, whole(0))},
    "TokenThroughput": {"log_every_n_steps": whole(1), "peak_flops": either(nothing, number(1, 1.7e308))},
    "Watchdog": {"timeout_s": number(1, 86_400), "first_steps_factor": number(1, 1000)},
}
# The other options of a call, where the defaults are not enough to make one.
GIVEN = {
    **{name: {"model": CONFIG, "init": "random"} for name in ("FineTuner", "RewardTuner")},
    **{name: {"model": CONFIG, "init": "random", "lora": {}} for name in ("PreferenceTuner", "PolicyTuner")},
    "DistillationTuner": {"model": CONFIG, "init": "random", "teacher": "teacher"},
    "GenerateSamples": {"prompts": ["a"]},
    "PackedDataModule": {"paths": "rows.jsonl"},
    "RolloutDataModule": {"prompts": "rows.jsonl"},
}
LORA = {"r": whole(1, 2**16), "lora_alpha": lambda value: number(0, 2**20)(value) and value > 0, "lora_dropout": share}
CHECKED_WHEN_USED = (
    "BatchContext",
    "Document",
    "PackedBatch",
    "Status",
    "FastFTError",
    "collate",
    "register",
    "VerifiedCheckpointIO",
)


def option_names(name):
    """The options of a class, and those that it hands to its bases."""
    item = getattr(lightning_fastft, name)
    bases = inspect.getmro(item) if isinstance(item, type) else (item,)
    bases = [base for base in bases if base.__module__.startswith("lightning_fastft")]
    found = {}
    for base in bases:
        if base is not item and "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__ if base is not item else item).parameters.values()
        found |= {parameter.name: None for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return [option for option in found if option not in ("self", "needs_reference")]


def accepted(make, kind, values=()):
    """The values outside of the range that were taken, and those inside that were not."""
    wrong, missing = [], []
    for value in values or (*POOL, *getattr(kind, "names", ())):
        try:
            make(value)
        # What Python and Lightning say of a wrong type is an answer too.
        except (ValueError, TypeError):
            missing += [value] if kind(value) else []
        else:
            wrong += [] if kind(value) else [value]
    return wrong, missing


def cases():
    for name, options in OPTIONS.items():
        for option, kind in options.items():
            if kind is not LIGHTNINGS_OWN and option in option_names(name):
                yield pytest.param(name, option, kind, id=f"{name}-{option}")


def test_every_public_option_has_a_range():
    public = {name: getattr(lightning_fastft, name) for name in lightning_fastft.__all__}
    owners = (OffloadCheckpointing,)
    wanted = {
        name
        for name, item in public.items()
        if item in owners
        or (isinstance(item, type) and issubclass(item, (Callback, Strategy, LightningModule, LightningDataModule)))
    }
    assert wanted == set(OPTIONS), "write the ranges of the options of a public class in OPTIONS of this file"
    assert public.keys() - wanted <= {*CHECKED_WHEN_USED}
    for name in wanted:
        missing = [option for option in option_names(name) if option not in OPTIONS[name]]
        assert missing == [], f"write their ranges in OPTIONS[{name!r}] of this file"


# A permission of one run, a function, and what the model and its adapters were read from.
NOT_IN_CHECKPOINTS = {"accept_other_base", "optimizer", "tokenizer", "adapter"}


@pytest.mark.parametrize("name", [name for name in OPTIONS if name.endswith("Tuner")])
def test_a_checkpoint_of_a_tuner_keeps_every_option(name):
    tuner = getattr(lightning_fastft, name)(**GIVEN[name])
    missing = {*option_names(name)} - {*tuner.hparams} - NOT_IN_CHECKPOINTS
    assert missing == set(), f"give them to save_hyperparameters in {name}.__init__: a resumed run would not have them"


@pytest.mark.parametrize(("name", "option", "kind"), list(cases()))
def test_values_outside_of_the_range_are_refused(name, option, kind):
    make = getattr(lightning_fastft, name)
    given = {**GIVEN.get(name, {}), **({"lora": {}} if option in ("quantization", "loraplus_lr_ratio") else {})}
    wrong, missing = accepted(lambda value: make(**{**given, option: value}), kind)
    assert wrong == [], f"{name}({option}=...) takes these"
    assert missing == [], f"{name}({option}=...) refuses these"


@pytest.mark.parametrize("field", LORA)
def test_values_of_adapters_outside_of_the_range_are_refused(field):
    wrong, missing = accepted(lambda value: FineTuner(CONFIG, init="random", lora={field: value}), LORA[field])
    assert (wrong, missing) == ([], [])


def test_the_number_of_values_is_printed():
    found = [case.values for case in cases() if not case.marks]
    outside = sum(not kind(value) for _, _, kind in found for value in POOL)
    print(
        f"R22: 0 of {outside} values outside of a range accepted, over {len(found)} options of {len(OPTIONS)} public "
        "classes"
    )
    assert len(found) > 70


def test_a_value_that_is_accepted_outside_of_its_range_is_seen():
    assert accepted(lambda value: None, whole(1), values=(1, 0)) == ([0], [])


def test_what_is_checked_when_used_is_no_owner_of_options():
    assert {BatchContext.__name__, Document.__name__} <= {*CHECKED_WHEN_USED}
