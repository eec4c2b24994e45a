"""Rows with fp8 products: told apart by their mode, judged by limits that stand in them, refused where nothing
computed in fp8.
"""

import pytest
import torch

from benchmarks.ruler import judge, report
from benchmarks.ruler.building import build
from benchmarks.ruler.cases import Case, CaseLog
from benchmarks.ruler.driver import parse_arm
from benchmarks.ruler.plans import parse_mode
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles
from lightning_fastft.callbacks.fused_kernels import FusedKernels


def test_the_mode_adds_fused_layers_with_an_fp8_base():
    for mode in ("keep+fp8", "keep+fused+fp8", "auto=14.5:32+fp8"):
        (callback,) = parse_mode(mode).callbacks()
        assert isinstance(callback, FusedKernels)
        assert (callback.base_compute, callback.cuda_graphs) == ("fp8", False)
        assert parse_mode(mode).callbacks(is_cuda=False)[0].base_compute == "fp8_reference"
    assert parse_mode("keep+graphs+fp8").callbacks()[0].cuda_graphs
    assert parse_mode("keep+fused").callbacks()[0].base_compute == "model_dtype"
    with pytest.raises(ValueError, match=r"\[\+fp8\]"):
        parse_mode("keep+fp4")


def test_only_fp8_rows_have_wider_limits_and_they_say_so():
    truth = {"0.q_proj.A": torch.randn(8, 64, generator=torch.Generator().manual_seed(0))}
    noise = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    found = {"0.q_proj.A": truth["0.q_proj.A"] + 0.1 * noise}
    assert not judge.judge(found, truth, limits=judge.limits_of("keep+fused")).passed
    verdict = judge.judge(found, truth, limits=judge.limits_of("keep+fused+fp8"))
    assert verdict.passed
    assert 0.98 < verdict.worst_cosine[1] < 0.999
    assert verdict.describe().endswith("; judged by limits of its own: cosine 0.98, norm within 10%")
    assert verdict.to_dict()["limits"] == {"min_cosine": 0.98, "max_norm_error": 0.1}
    assert "limits of its own" not in judge.judge(truth, truth).describe()
    for spoiled in (truth["0.q_proj.A"] + 0.3 * noise, 1.2 * truth["0.q_proj.A"]):
        assert not judge.judge({"0.q_proj.A": spoiled}, truth, limits=judge.limits_of("keep+fp8")).passed


@pytest.mark.fault
def test_a_row_of_ours_in_fp8_is_judged_and_one_that_did_not_compute_in_it_is_refused(tmp_path, monkeypatch):
    from benchmarks.ruler import plans
    from benchmarks.ruler.arms import ours, plain

    build(WORKLOADS["tiny"], root=tmp_path, device="cpu", dtype=torch.float32)
    files, log = WorkloadFiles(tmp_path, WORKLOADS["tiny"]), tmp_path / "raw.jsonl"
    template = Case("tiny", "", "", num_warmup=2, num_steps=3)
    for arm, text in ((plain, "plain:reference"), (ours, "ours:keep+fused+fp8")):
        arm.run(parse_arm(text, template=template), files=files, log=CaseLog(log), device="cpu")
    row = report.read_records(log)[-1]
    assert row["reason"] == "", row["reason"]
    assert row["title"] == "ours keep+fused+fp8"
    assert 0.98 <= row["verdict"]["worst_cosine"][1] < 0.9999
    metrics = {found["metric"] for found in report.result_rows([row], command="x")}
    assert "lowest gradient cosine, judged by cosine 0.98 and norm within 10%" in metrics
    monkeypatch.setattr(plans, "FusedKernels", lambda **options: FusedKernels())
    ours.run(parse_arm("ours:keep+fused+fp8", template=template), files=files, log=CaseLog(log), device="cpu")
    assert "fp8 was asked for, and nothing computed in it" in report.read_records(log)[-1]["reason"]
