"""FastFTFSDPStrategy: two ranks with half a model each give the weights of one process; what cannot be served is
refused by name.
"""

import json
import pickle

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_fastft.checkpoint import files
from lightning_fastft.core.errors import CheckpointNotSavedError, OptionError
from lightning_fastft.core.status import Status
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.checkpoint.test_files import make_folder
from tests.strategies.strategy_worker import (
    ACCUMULATE,
    BOUND,
    EARLY_SAVES,
    FSDP_EQUALITY,
    MONITORED,
    NUM_WINDOWS,
    Lazy,
    difference,
    fit,
    make_tuner,
    narrow_adapters,
    run_on_two_ranks,
    train,
    trained_state,
)  # fmt: skip

NUM_UNITS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_on_two_ranks("fsdp", folder)


@pytest.fixture(scope="module")
def one_process():
    """The trained weights of one process, each case trained once."""
    found = {}

    def look_up(case):
        if case not in found:
            found[case] = train(*case, "one")[0]
        return found[case]

    return look_up


@pytest.mark.slow
@pytest.mark.parametrize("case", FSDP_EQUALITY, ids=str)
def test_two_ranks_equal_one_process_with_twice_the_accumulation(two_ranks, one_process, case):
    assert difference(two_ranks[case], one_process(case)) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("case", FSDP_EQUALITY, ids=str)
def test_gradients_are_reduced_once_per_window(two_ranks, case):
    # One per unit, all of which train something; or one of all adapters.
    per_window = NUM_UNITS if "full" in case[0] or "copies" in case[0] else 1
    assert two_ranks[(*case, "reductions")] == [0, per_window] * NUM_WINDOWS


@pytest.mark.slow
def test_no_unit_stays_gathered_unless_asked(two_ranks):
    # The root once, each layer in the forward and in the backward.
    assert two_ranks["lora", "recompute", "gathers"] == [2 * NUM_UNITS - 1] * 4
    assert "of sharded weights stay gathered" not in two_ranks["lora", "recompute", "status"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "reductions", "gathers", "told"),
    [
        ("sharded adapters", NUM_UNITS - 1, [2 * NUM_UNITS - 1] * 4, ""),
        ("resident", 1, [NUM_UNITS, 0, 0, 0], "3 of 3 units"),
        # The shards of adapters change in each step: only the root stays gathered for good, layers until their backward.
        ("resident, sharded adapters", NUM_UNITS - 1, [NUM_UNITS, *[NUM_UNITS - 1] * 3], "3 of 3 units"),
        ("resident, activations kept", 1, [NUM_UNITS, 0, 0, 0], "3 of 3 units"),
        ("resident, every weight", NUM_UNITS, [NUM_UNITS] * 4, "2 of 2 units"),
    ],
)
def test_units_are_gathered_as_asked_and_train_the_same(two_ranks, one_process, choice, reductions, gathers, told):
    found = two_ranks[choice]
    assert (f"{told} of sharded weights stay gathered" in found["status"]) is bool(told)
    assert found["reductions"] == [0, reductions] * NUM_WINDOWS
    assert found["gathers"] == gathers
    expected = one_process(("full", "keep") if "every weight" in choice else ("lora", "recompute"))
    assert difference(found["state"], expected) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["auto", "resident"])
def test_a_forward_between_backward_and_step_leaves_no_old_weights(two_ranks, one_process, weights):
    assert difference(two_ranks["looks before steps", weights], one_process(("full", "keep"))) <= BOUND


@pytest.mark.slow
def test_units_stay_gathered_where_every_rank_has_room(two_ranks):
    """After the plan, of three units the root and one layer stay gathered: one more gather of each, then two a step."""
    found = two_ranks["planned"]
    assert found["fits"] == [NUM_UNITS]
    gathers = found["gathers"]
    assert gathers[0] == 2 * NUM_UNITS - 1
    assert gathers[-1] == 2
    assert "2 of 3 units of sharded weights stay gathered" in found["text"]


@pytest.mark.slow
def test_gradients_are_reduced_every_batch_where_asked(two_ranks, one_process):
    assert two_ranks["every batch"]["reductions"] == [NUM_UNITS, NUM_UNITS] * NUM_WINDOWS
    assert difference(two_ranks["every batch"]["state"], one_process(("full", "keep"))) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in FSDP_EQUALITY if "copies" not in case[0]], ids=str)
def test_lazy_head_serves_a_sharded_model(two_ranks, case):
    assert two_ranks[(*case, "head")] == "LazyHead"


@pytest.mark.slow
def test_name_gives_data_parallelism_over_all_ranks(two_ranks):
    found = two_ranks["by name"]
    assert found["strategy"] == "FastFTFSDPStrategy"
    assert found["sizes"] == [2, 1]
    assert found["num_units"] == NUM_UNITS
    assert found["optimizer"] == "FusedAdamW"


@pytest.mark.slow
def test_status_says_what_is_sharded(two_ranks):
    assert ("sharding", "active") in two_ranks["by name"]["statuses"]
    assert f"FSDP2 over 2 devices, {NUM_UNITS} units" in two_ranks["by name"]["reasons"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_resumed_run_equals_the_uninterrupted_one(two_ranks, kind, is_folder):
    whole, resumed = (two_ranks["checkpoint", kind, is_folder, form] for form in ("uninterrupted", "resumed"))
    assert whole["is_folder"] is is_folder
    assert whole["state"].keys() == resumed["state"].keys()
    assert all(torch.equal(value, resumed["state"][name]) for name, value in whole["state"].items())


@pytest.mark.slow
@pytest.mark.parametrize("run", ["saved", "resumed at start"])
@pytest.mark.parametrize("kind", EARLY_SAVES)
def test_checkpoints_before_the_first_step_change_no_step(two_ranks, kind, run):
    found = two_ranks["early save", kind]
    assert all(torch.equal(value, found[run][name]) for name, value in found["plain"].items())
    # Its loader has no position, so the rest of the window is of other batches.
    assert found["resumed in window"].keys() == found["plain"].keys()


@pytest.mark.slow
def test_single_file_holds_adapters_only(two_ranks):
    keys = two_ranks["checkpoint", "lora", False, "uninterrupted"]["keys"]
    assert keys
    assert all("lora_" in key for key in keys)


@pytest.mark.slow
def test_checkpoint_of_two_ranks_is_resumed_by_one(two_ranks, folder):
    path = folder / "FastFTFSDPStrategy-lora-False" / "step=2.ckpt"
    module = make_tuner("lora", optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="random states of 2 ranks and this run has 1") as told:
        fit(module, strategy=FastFTStrategy(), max_steps=4, ckpt_path=path)
    assert any("accumulate_grad_batches was 2 and is 4" in str(warning.message) for warning in told)
    assert difference(trained_state(module), two_ranks["checkpoint", "lora", False, "resumed"]["state"]) <= 1e-4


@pytest.mark.slow
def test_adapters_are_written_as_a_plain_peft_adapter(two_ranks, folder):
    tuner = make_tuner("lora")
    torch.manual_seed(5)
    tuner.configure_model()
    base = tuner.model.unload()
    loaded = PeftModel.from_pretrained(base, folder / "FastFTFSDPStrategy-lora-True" / "export")
    state = two_ranks["checkpoint", "lora", True, "resumed"]["state"]
    found = {name: value for name, value in loaded.named_parameters() if name in state}
    assert difference(found, state) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("masters", ["auto", "bfloat16"])
def test_whole_model_is_written_in_the_dtype_of_the_model(two_ranks, folder, masters):
    path = folder / f"export-{masters}"
    tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["Qwen3ForCausalLM"])
    # It is tied to the embedding.
    assert "lm_head.weight" not in tensors
    _, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.slow
def test_bf16_is_trained_from_fp32_masters_unless_asked_otherwise(two_ranks):
    wide, narrow = two_ranks["bf16"]["auto"], two_ranks["bf16"]["bfloat16"]
    assert wide["layer"] == narrow["layer"] == [("torch.bfloat16", "torch.bfloat16")]
    assert [wide[key] for key in ("parameter", "gradient", "average")] == [["torch.float32"]] * 3
    assert [narrow[key] for key in ("parameter", "gradient", "average")] == [["torch.bfloat16"]] * 3


@pytest.mark.slow
def test_narrow_adapters_compute_as_on_one_device(two_ranks):
    """From fp32 masters that FSDP2 has gathered: the same forward to the bit, and gradients that are not rounded
    before they are reduced.
    """
    ours, one = two_ranks["bf16 adapters"], narrow_adapters(strategy=FastFTStrategy())
    assert ours["calls"] > 0
    # One process has the micro-batches of both ranks, in turns, and divides by twice as many.
    first_window = slice(0, 2 * ACCUMULATE, 2)
    assert torch.equal(ours["losses"][:ACCUMULATE], 2 * one["losses"][first_window])
    assert difference(ours["state"], one["state"]) <= 1e-5


@pytest.mark.slow
def test_module_that_shards_nothing_is_sharded_by_the_strategy(two_ranks, tmp_path):
    lazy, own = two_ranks["foreign"]["Lazy"], two_ranks["foreign"]["ShardsItself"]
    assert lazy["sharding"][0] == "sharding"
    assert "sharding" not in own["sharding"]
    module = Lazy()
    fit(module, strategy=FastFTStrategy(), folder=tmp_path)
    truth = trained_state(module)
    assert difference(lazy["state"], truth) <= BOUND
    assert difference(own["state"], truth) <= BOUND


@pytest.mark.slow
def test_ranks_follow_the_mean_of_a_metric_that_differs_between_them(two_ranks):
    assert two_ranks["monitored"] == [MONITORED, MONITORED]


@pytest.mark.slow
def test_validation_before_within_and_after_training_changes_nothing(two_ranks, one_process):
    found = two_ranks["validation"]
    assert found["after"] < found["before"]
    assert found["num_keys"] == len(found["state"])
    assert difference(found["state"], one_process(("full", "keep"))) <= BOUND


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("sizes", "data_parallel_size=3"),
        ("averaging", "EMAWeightAveraging"),
        ("tensor parallel FineTuner", "tensor_parallel_size=2"),
        ("tensor parallel foreign", "Lazy applies no tensor parallelism"),
        ("interleaved", "splits gate_up in interleaved parts"),
        ("precision by name", "precision='64-true' is not supported by FastFTFSDPStrategy"),
        ("eager", "def configure_model"),
        ("outside", "fully_shard(self.extra"),
        ("adafactor", "The step of Adafactor needs whole weights"),
        ("rprop", "The step of Rprop needs whole weights"),
    ],
)
def test_what_cannot_be_served_is_refused(two_ranks, case, message):
    assert message in two_ranks["refused"][case]


def test_strategy_pickles_before_setup():
    strategy = pickle.loads(pickle.dumps(FastFTFSDPStrategy(gradient_sync="batch", save_distributed_checkpoint=False)))
    assert strategy.gradient_sync == "batch"
    assert not strategy._save_distributed_checkpoint


def test_masters_are_refused_where_they_cannot_be():
    with pytest.raises(OptionError, match="adapter_dtype"):
        make_tuner("lora", master_dtype="float32")
    with pytest.raises(OptionError, match="fastft_fsdp"):
        fit(make_tuner("full", dtype="float16", master_dtype="float32"), strategy=FastFTStrategy())


def test_model_in_pieces_is_refused_by_another_strategy():
    tuner = make_tuner("full")
    tuner._sharding = Status("sharding", "active", "FSDP2 over 2 devices")
    with pytest.raises(OptionError, match="sharded"):
        fit(tuner, strategy=FastFTStrategy())


def test_unknown_gradient_sync_is_refused():
    with pytest.raises(OptionError, match="window"):
        FastFTFSDPStrategy(gradient_sync="never")


@pytest.mark.parametrize(
    ("data", "tensor", "expected"),
    [("auto", "auto", (8, 1)), (4, "auto", (4, 2)), ("auto", 2, (4, 2)), (8, 1, (8, 1)), (2, 4, (2, 4))],
)
def test_sizes_given_are_kept_and_the_rest_is_data_parallel(data, tensor, expected):
    strategy = FastFTFSDPStrategy(data_parallel_size=data, tensor_parallel_size=tensor)
    strategy._choose_sizes(8)
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == expected


@pytest.mark.parametrize("is_full", [False, True])
def test_a_folder_is_kept_until_the_file_that_replaces_it_is_written(is_full, tmp_path, monkeypatch):
    """Lightning removes it first, on all ranks at once."""
    make_folder(tmp_path / "a.ckpt", 1)
    strategy = FastFTFSDPStrategy(save_distributed_checkpoint=False)

    def fill(*_, **__):
        raise OSError(28, "No space left on device")

    if is_full:
        monkeypatch.setattr(files, "write_archive", fill)
        with pytest.raises(CheckpointNotSavedError, match="No space left"):
            strategy.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
        files.check_folder(tmp_path / "a.ckpt")
    else:
        strategy.save_checkpoint({"step": 3}, tmp_path / "a.ckpt")
        assert files.load_file(tmp_path / "a.ckpt") == {"step": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
