"""The training forward and its loss against plain formulas."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from dllm.model.adapter import add_lora
from dllm.model.decoder import Decoder, DecoderConfig
from dllm.training.corruption import CorruptionConfig
from dllm.training.forward import Kernel, TrainingForward, choose_kernel, slot_loss
from dllm.training.layout import training_mask
from dllm.training.packing import Batch, PackedBatches
from tests.training.test_packing import documents


def model_and_batch(head_dim: int = 8) -> tuple[Decoder, Batch]:
    torch.manual_seed(0)
    model = add_lora(Decoder(DecoderConfig(64, 32, 48, 2, 6, 2, head_dim, 256)), 2, 4, 3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    config = CorruptionConfig("block_causal", block_length=4, max_rows=192, max_gap=16)
    return model, next(iter(PackedBatches([(documents(), 1.0)], config, 2, 256, 0)))


def first_lora(model: Decoder) -> torch.Tensor:
    return next(p for name, p in model.named_parameters() if name.endswith("qkv.lora_a"))


def test_hidden_states_are_those_of_the_decoder_with_the_dense_mask() -> None:
    model, batch = model_and_batch()
    mask = training_mask(batch.document, batch.copy, batch.group, batch.low)
    with torch.no_grad():
        expected = model(None, batch.position, None, mask, embeds=model.embed(batch.ids, batch.masked))
        found = TrainingForward(model, "sdpa", compiled=False).hidden(batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_follows_the_same_rule() -> None:
    model, batch = model_and_batch()
    with torch.no_grad():
        dense = TrainingForward(model, "sdpa", compiled=False).hidden(batch)
        flex = TrainingForward(model, "flex", compiled=False).hidden(batch)
    real = batch.document >= 0
    torch.testing.assert_close(flex[real], dense[real], rtol=1e-5, atol=1e-5)


def test_loss_is_the_weighted_mean_over_slots_whatever_the_chunk() -> None:
    model, batch = model_and_batch()
    hidden = TrainingForward(model, "sdpa", compiled=False).hidden(batch)
    logits = model.head(hidden.flatten(0, 1)[batch.slot_row])
    entropy = F.cross_entropy(logits, batch.slot_token, reduction="none")
    expected = (entropy * batch.slot_weight).sum() / batch.slot_weight.sum()
    gradients = []
    for chunk in (10_000, 100):
        loss, sums = slot_loss(model, hidden, batch, chunk)
        torch.testing.assert_close(loss, expected)
        gradients.append(torch.autograd.grad(loss, [first_lora(model)], retain_graph=True)[0])
        assert sums[:, 0].sum() == (batch.slot_weight > 0).sum()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)
    for kind in range(3):
        here = (batch.slot_kind == kind) & (batch.slot_weight > 0)
        torch.testing.assert_close(sums[kind, 1], entropy[here].sum())
        assert sums[kind, 2] == (logits[here].argmax(-1) == batch.slot_token[here]).sum()
        assert sums[kind, 3] == (logits[here].softmax(-1).amax(-1) > 0.9).sum()


@pytest.mark.parametrize("chunk", [10_000, 100])
def test_certainty_adds_the_entropy_of_right_slots_only(chunk: int) -> None:
    model, batch = model_and_batch()
    hidden = TrainingForward(model, "sdpa", compiled=False).hidden(batch)
    logits = model.head(hidden.flatten(0, 1)[batch.slot_row])
    # Half of the labels become the model's own choice, so that there are right slots and wrong ones.
    token = torch.where(torch.arange(len(batch.slot_token)) % 2 == 0, logits.argmax(-1), batch.slot_token)
    batch = replace(batch, slot_token=token)
    law = torch.distributions.Categorical(logits=logits)
    right = logits.argmax(-1) == token
    assert 0 < right.sum() < len(right)
    loss = F.cross_entropy(logits, token, reduction="none") + 0.7 * right * law.entropy()
    expected = (loss * batch.slot_weight).sum() / batch.slot_weight.sum()
    found, sums = slot_loss(model, hidden, batch, chunk, certainty_weight=0.7)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found, [first_lora(model)], retain_graph=True),
        torch.autograd.grad(expected, [first_lora(model)]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    # What is reported stays the plain cross-entropy.
    assert torch.equal(sums, slot_loss(model, hidden, batch, chunk)[1])


def test_off_the_gpu_sdpa_is_taken() -> None:
    model, batch = model_and_batch()
    assert choose_kernel(model, batch, compiled=False).kernel == "sdpa"


@pytest.mark.gpu
def test_both_kernels_give_one_gradient_on_the_gpu() -> None:
    # Compiled FlexAttention takes no narrower heads.
    model, batch = model_and_batch(head_dim=16)
    model, batch = model.cuda(), batch.to("cuda")
    found = []
    kernels: tuple[Kernel, ...] = ("sdpa", "flex")
    for kernel in kernels:
        loss, _ = slot_loss(model, TrainingForward(model, kernel, compiled=True).hidden(batch), batch)
        found.append((loss.detach(), torch.autograd.grad(loss, [first_lora(model)])[0]))
    # fp32 with TF32 off: sums in another order.
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-5)
