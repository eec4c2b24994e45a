"""Training steps of a model on the meta device under plans, with the memory that each part of a step takes.

The layers, the offload engine and the measured steps are those of a run. Copies move nothing, and cuDNN's attention is
replaced by functions that allocate what it allocates.
"""

import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.segments import SegmentObserver
from lightning_fastft.activations.streams import CopyStreams
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.estimate.machines import find_gpu
from lightning_fastft.estimate.meta_model import (
    Swaps,
    add_adapters_on_meta,
    build_on_meta,
    install_as_in_a_run,
    make_batch,
)
from lightning_fastft.estimate.metering import Meter, MeteredDevice
from lightning_fastft.kernels.attention import cudnn_backend
from lightning_fastft.kernels.attention import op as attention
from lightning_fastft.planner.prediction import predict
from lightning_fastft.planner.step import Machine

META = torch.device("meta")
# The proportions of Qwen3-14B with a small head.
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "num_attention_heads": 40,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
}


class MeteredRun:
    """A model that was measured and then follows any plan, on the meta device.

    Args:
        config: Configuration of the model.
        num_tokens: Tokens of its pack, one document.
        mlp_tiles: As in OffloadCheckpointing.
        buffers: As in OffloadCheckpointing.
    """

    def __init__(self, config, *, num_tokens=1024, mlp_tiles=1, buffers=2):
        self.model = build_on_meta(config)
        add_adapters_on_meta(self.model, 4)
        checkpointing = OffloadCheckpointing(
            "auto", vram_budget=1000.0, host_budget=1000.0, mlp_tiles=mlp_tiles, buffers=buffers
        )
        install_as_in_a_run(self.model, ModelPatcher(), checkpointing, swaps=Swaps())
        (self.stack,) = checkpointing.stacks
        self.stack.executor.make_copy_streams = _UncopiedStreams
        self._batch = make_batch(num_tokens, document_tokens=num_tokens, label_share=1.0)
        self._meter = Meter(document_tokens=num_tokens)
        self._device = _Device(self._meter)
        self.stack.measurement.meter = lambda _: self._device
        while self.stack.plan is None:
            self._step()

    @property
    def cost(self):
        """The measured costs."""
        return self.stack.cost

    def predicted(self, plan):
        """Return the predicted memory of each part of a step."""
        machine = Machine("any", 1e10, 1e10)
        return dict(predict(self.cost, plan, machine=machine, buffers=self.stack.options.buffers).memory)

    def true(self, plan):
        """Return the memory of each part of a step under a plan."""
        with self._meter:
            self.stack.follow(plan, device=META, cost=self.cost)
        peaks = _Peaks(self._device)
        self._observe(peaks)
        self._step()
        self._observe(None)
        peaks.end()
        engine = self.stack.engine
        if engine is not None:
            assert (engine.num_kept, engine.num_unplanned) == (0, 0)
            assert not any(slot.num_replaced for slot in engine.slots)
        return peaks.found

    def _step(self):
        # Gradients stay, as they do in a run when a forward begins.
        with self._meter:
            self.model(**self._batch).loss.backward()

    def _observe(self, observer):
        for segment in self.stack.segments:
            segment.observer = observer


def use_cudnn(monkeypatch, *, num_groups):
    """Let attention on the meta device take the memory of cuDNN's, its backward in groups of heads."""
    monkeypatch.setattr(attention, "_choose_on_meta", lambda need: "cudnn")
    monkeypatch.setattr(cudnn_backend, "_load_cudnn", lambda: cudnn_backend._Cudnn(_forward, _backward))
    monkeypatch.setattr(cudnn_backend, "count_head_groups", lambda num_query_values, *, num_kv_heads: num_groups)


def _forward(q_THW, k_TGW, v_TGW, **options):
    return torch.empty_like(q_THW), q_THW.new_empty(*q_THW.shape[:2], 1, dtype=torch.float32)


def _backward(d_out_THW, q_THW, k_TGW, v_TGW, out_THW, lse_BHL, **options):
    workspace = q_THW.new_empty(cudnn_backend._WORKSPACE_PER_VALUE * q_THW.numel(), dtype=torch.uint8)
    gradients = [torch.empty_like(x) for x in (q_THW, k_TGW, v_TGW)]
    del workspace
    return gradients


class _UncopiedStreams(CopyStreams):
    """Streams whose copies move nothing, because the meta device has no bytes."""

    def copy_out(self, host, device, *, after):
        """Copy nothing."""

    def copy_in(self, device, host, *, after):
        """Copy nothing."""


class _Device(MeteredDevice):
    """The allocator of the meter, which never is at a limit."""

    def __init__(self, meter):
        super().__init__(meter)
        gpu = find_gpu("H200")
        self.ms_of = lambda kernel: kernel.ms_on(gpu)

    def num_retries(self):
        """Return 0."""
        return 0


class _Peaks(SegmentObserver):
    """The peak of each part of a step, by the names of a prediction."""

    def __init__(self, device):
        self.found = {}
        self._device, self._label = device, ""
        device.start_peak()

    def forward_begins(self, segment):
        self._begin(f"forward {segment.index}")

    def forward_ends(self, segment):
        self._begin("head")

    def backward_begins(self, segment):
        self._begin(f"backward {segment.index}")

    def end(self):
        """End the last part."""
        self._begin("")

    def _begin(self, label):
        if self._label:
            self.found[self._label] = max(self.found.get(self._label, 0), self._device.peak())
        self._label = label
        self._device.start_peak()
