"""Our encoder–decoder against `torch.nn.Transformer` with the same weights: every layout, every mask argument."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from allmask.errors import UsageError
from allmask.mask import Mask
from allmask.nn.torch_transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

pytestmark = [  # torch says when its fast path is off, and deprecates mixing boolean and float masks
    pytest.mark.filterwarnings("ignore:enable_nested_tensor"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]

WIDTH, HEADS, ROWS, SOURCE, TARGET = 16, 4, 3, 6, 5
SIZES = {"d_model": WIDTH, "nhead": HEADS, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 24}
MASKS = {"src": (SOURCE, SOURCE), "tgt": (TARGET, TARGET), "memory": (TARGET, SOURCE)}
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference(seed: int = 0, **numbers) -> nn.Transformer:
    """torch's own, in evaluation mode, its norms and biases moved away from 1 and 0."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = nn.Transformer(**(SIZES | numbers))
        for parameter in module.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return module.eval()


def inputs(seed: int, batch_first: bool = True, batched: bool = True) -> dict[str, torch.Tensor]:
    rng = seeded(seed)
    src, tgt = torch.randn(ROWS, SOURCE, WIDTH, generator=rng), torch.randn(ROWS, TARGET, WIDTH, generator=rng)
    if not batched:
        return {"src": src[0], "tgt": tgt[0]}
    return {"src": src, "tgt": tgt} if batch_first else {"src": src.transpose(0, 1), "tgt": tgt.transpose(0, 1)}


def draw_mask(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """A mask in torch's polarity whose rows each keep at least one key: torch's answer to an empty row is its own."""
    rng = seeded(seed)
    blocked = torch.rand(shape, generator=rng) < 0.4
    blocked.scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1), generator=rng), False)
    if kind == "causal":
        blocked = torch.ones(shape).triu(1).bool()
    if kind in ("boolean", "causal"):
        return blocked
    values = torch.randn(shape, generator=rng) if kind == "graded" else torch.zeros(shape)
    return values if kind == "graded" else values.masked_fill(blocked, -torch.inf)


def compare(theirs: nn.Transformer, given: dict[str, torch.Tensor], **masks) -> None:
    """Same output, same gradients of inputs and of all parameters."""
    ours = Transformer.from_torch(theirs)
    results = []
    for module in (theirs, ours):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
        out = module(**leaves, **masks)
        module.zero_grad()
        out.backward(torch.randn(out.shape, generator=seeded(9)))
        results.append([out, *(leaf.grad for leaf in leaves.values())])
    torch.testing.assert_close(results[1], results[0], **TOLERANCE)
    gradients = Transformer.from_torch(theirs)
    for parameter, source in zip(gradients.parameters(), ours.parameters(), strict=True):
        parameter.data.copy_(source.grad)
    named = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    torch.testing.assert_close(gradients.torch_state_dict(), named, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("batch_first", "norm_first", "bias"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
)
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, nn.SiLU()], ids=["relu", "gelu", "silu", "module"])
def test_every_build_equals_torch(batch_first, norm_first, activation, bias):
    """Of the three flags, any two are combined in every way."""
    numbers = {"batch_first": batch_first, "norm_first": norm_first, "activation": activation, "bias": bias}
    theirs = reference(layer_norm_eps=1e-3, **numbers)
    compare(theirs, inputs(1, batch_first))
    compare(theirs, inputs(1, batched=False))


def test_an_activation_with_weights_has_its_own_in_every_layer():
    theirs = reference(activation=nn.PReLU())
    for layer in theirs.decoder.layers:
        del vars(layer)["activation"]  # torch copied its decoder layers with a ReLU in front of what was asked for
    compare(theirs, inputs(1, batch_first=False))
    back = Transformer.from_torch(theirs).to_torch()
    torch.testing.assert_close(back(**inputs(1, batch_first=False)), theirs(**inputs(1, batch_first=False)))


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["boolean", "causal", "infinite", "graded"])
@pytest.mark.parametrize("per_head", [False, True])
def test_each_mask_alone_equals_torch(name, kind, per_head):
    shape = (ROWS * HEADS, *MASKS[name]) if per_head else MASKS[name]
    compare(reference(batch_first=True), inputs(2), **{f"{name}_mask": draw_mask(shape, kind, 3)})


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kind", ["boolean", "infinite", "graded"])
def test_each_padding_mask_alone_equals_torch(name, kind):
    mask = draw_mask((ROWS, MASKS[name][1]), kind, 4)
    compare(reference(batch_first=True), inputs(2), **{f"{name}_key_padding_mask": mask})
    compare(reference(), inputs(2, batched=False), **{f"{name}_key_padding_mask": mask[0]})


KINDS = st.sampled_from([None, "boolean", "causal", "infinite", "graded"])
PADDINGS = st.sampled_from([None, "boolean", "infinite", "graded"])


@st.composite
def combinations(draw) -> dict[str, torch.Tensor]:
    """Any of the six mask arguments together; key 0 is never padding and every row may read it."""
    masks = {}
    for name, (queries, keys) in MASKS.items():
        seed = draw(st.integers(0, 999))
        if kind := draw(KINDS):
            shape = (ROWS * HEADS, queries, keys) if draw(st.booleans()) else (queries, keys)
            masks[f"{name}_mask"] = draw_mask(shape, kind, seed)
        if kind := draw(PADDINGS):
            masks[f"{name}_key_padding_mask"] = draw_mask((ROWS, keys), kind, seed + 1)
    for mask in masks.values():
        mask[..., 0] = False if mask.dtype == torch.bool else 0.0
    return masks


@settings(max_examples=30)
@given(masks=combinations(), norm_first=st.booleans(), batch_first=st.booleans(), seed=st.integers(0, 99))
def test_any_combination_of_masks_equals_torch(masks, norm_first, batch_first, seed):
    compare(reference(seed, norm_first=norm_first, batch_first=batch_first), inputs(seed, batch_first), **masks)


def test_causal_hints_equal_torch_and_work_without_a_mask():
    theirs = reference(batch_first=True)
    masks = {f"{name}_mask": Transformer.generate_square_subsequent_mask(MASKS[name][0]) for name in ("src", "tgt")}
    hints = {"src_is_causal": True, "tgt_is_causal": True}
    compare(theirs, inputs(5), **masks, **hints)
    ours, given = Transformer.from_torch(theirs), inputs(5)
    torch.testing.assert_close(ours(**given, **hints), theirs(**given, **masks), **TOLERANCE)
    across = torch.ones(MASKS["memory"]).triu(1).bool()
    expected = theirs(**given, memory_mask=across)
    torch.testing.assert_close(ours(**given, memory_is_causal=True), expected, **TOLERANCE)


def test_a_wrong_hint_does_not_overrule_the_mask():
    theirs, given = reference(batch_first=True), inputs(5)
    mask = draw_mask(MASKS["tgt"], "boolean", 7)
    hinted = Transformer.from_torch(theirs)(**given, tgt_mask=mask, tgt_is_causal=True)
    torch.testing.assert_close(hinted, theirs(**given, tgt_mask=mask), **TOLERANCE)


def test_the_subsequent_mask_is_torchs():
    ours, theirs = Transformer.generate_square_subsequent_mask, nn.Transformer.generate_square_subsequent_mask
    for size in (0, 1, 5):
        assert torch.equal(ours(size), theirs(size))
    assert torch.equal(ours(3, dtype=torch.float64), theirs(3, dtype=torch.float64))


@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_rows_that_may_read_nothing_stay_finite(as_numbers, per_head):
    """Blocked wholly: by a mask row, by padding a whole text, by both together."""
    padding = torch.zeros(ROWS, SOURCE, dtype=torch.bool)
    padding[1] = True
    shape = (ROWS * HEADS, *MASKS["tgt"]) if per_head else MASKS["tgt"]
    tgt_mask = torch.ones(shape, dtype=torch.bool).triu(1)
    tgt_mask[..., 2, :] = True
    numbers = {False: lambda m: m, True: lambda m: torch.zeros(m.shape).masked_fill(m, -torch.inf)}[as_numbers]
    ours = Transformer.from_torch(reference(batch_first=True))
    given = {name: tensor.requires_grad_() for name, tensor in inputs(6).items()}
    masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": tgt_mask}
    masks = {name: numbers(mask) for name, mask in masks.items()}
    out = ours(**given, **masks)
    out.square().sum().backward()
    everything = [out, *(x.grad for x in given.values()), *(p.grad for p in ours.parameters())]
    assert all(tensor.isfinite().all() for tensor in everything)
    compare(reference(batch_first=True), inputs(6), **masks)  # torch, once it answered NaN, says the same today


def test_a_row_that_reads_nothing_gets_zeros_from_attention():
    """With the last projection's bias removed, such a row leaves a pre-norm layer as if attention were not there."""
    ours = Transformer.from_torch(reference(batch_first=True, norm_first=True, num_encoder_layers=1, bias=False))
    layer, x = ours.encoder.layers[0], inputs(7)["src"]
    mask = torch.zeros(SOURCE, SOURCE, dtype=torch.bool)
    mask[2] = True
    expected = ours.encoder.norm(layer.layer.feed(x))[:, 2]
    torch.testing.assert_close(ours.encoder(x, mask)[:, 2], expected, **TOLERANCE)


def test_padding_of_the_source_is_computed_in_inference_as_in_training():
    ours = Transformer.from_torch(reference(batch_first=True))
    padding = draw_mask((ROWS, SOURCE), "boolean", 8)
    with_gradient = ours(**inputs(8), src_key_padding_mask=padding)
    with torch.inference_mode():
        without = ours(**inputs(8), src_key_padding_mask=padding)
    torch.testing.assert_close(without, with_gradient.detach())


def test_a_learned_bias_gets_its_gradient():
    theirs, given = reference(batch_first=True), inputs(9)
    gradients = []
    for module in (theirs, Transformer.from_torch(theirs)):
        bias = torch.zeros(MASKS["tgt"], requires_grad=True)
        module(**given, tgt_mask=bias).square().sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert gradients[0].abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    theirs = reference(batch_first=True).to(dtype)
    given = {name: tensor.to(dtype) for name, tensor in inputs(3).items()}
    masks = {"tgt_mask": draw_mask(MASKS["tgt"], "graded", 1), "src_mask": draw_mask(MASKS["src"], "boolean", 1)}
    out = Transformer.from_torch(theirs)(**given, **masks)
    expected = theirs(**given, tgt_mask=masks["tgt_mask"].to(dtype), src_mask=masks["src_mask"])
    assert out.dtype == dtype
    # bfloat16 rounds to 2⁻⁸ of a number about 3 large, a few times.
    torch.testing.assert_close(out, expected, **({"rtol": 0, "atol": 0.1} if dtype == torch.bfloat16 else {}))


# ---- checkpoints and the start ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back_is_the_same_checkpoint(bias):
    theirs = reference(bias=bias, norm_first=True, activation=nn.SiLU())
    back = Transformer.from_torch(theirs).to_torch()
    torch.testing.assert_close(back.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert list(back.state_dict()) == list(theirs.state_dict())
    given = inputs(1, batch_first=False)
    torch.testing.assert_close(back(**given), theirs(**given))


def test_a_checkpoint_of_a_larger_model_loads_after_the_swap():
    class Larger(nn.Module):
        def __init__(self, body: nn.Module):
            super().__init__()
            self.embed, self.body = nn.Embedding(7, WIDTH), body

    trained, fresh = Larger(reference()), Larger(Transformer(**SIZES))
    assert fresh.load_state_dict(trained.state_dict()).missing_keys == []
    given = inputs(1, batch_first=False)
    torch.testing.assert_close(fresh.eval().body(**given), trained.eval().body(**given), **TOLERANCE)
    again = Larger(Transformer(**SIZES))
    again.load_state_dict(fresh.state_dict())  # our own names load as well
    torch.testing.assert_close(again.state_dict(), fresh.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_that_does_not_fit_is_refused():
    state = reference().state_dict()
    del state["decoder.layers.1.multihead_attn.in_proj_weight"]
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.1\.layer\.cross\.query\.weight"):
        Transformer(**SIZES).load_state_dict(state)


def test_it_starts_as_torch_starts():
    sizes = {"d_model": 128, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1, "dim_feedforward": 256}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = nn.Transformer(**sizes).state_dict()
    for name, tensor in Transformer(**sizes, rng=seeded()).torch_state_dict().items():
        if tensor.ndim == 2:  # two deviations of n uniform draws, each erring by √0.2/√n
            assert abs(float(tensor.std() / theirs[name].std()) - 1) < 5 * math.sqrt(0.4 / tensor.numel()), name
            assert abs(float(tensor.abs().max() / theirs[name].abs().max()) - 1) < 0.01, name
        elif "linear" not in name:
            assert torch.equal(tensor, theirs[name]), name


def test_the_parameters_are_as_many_as_torchs():
    theirs, ours = nn.Transformer(), Transformer(device="meta")
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) == 44_140_544


def test_dropout_acts_in_training_only():
    ours, given = Transformer(**SIZES, dropout=0.5), inputs(1, batch_first=False)
    assert not torch.equal(ours(**given), ours(**given))
    ours.eval()
    assert torch.equal(ours(**given), ours(**given))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"src": torch.zeros(SOURCE, ROWS + 1, WIDTH)}, "4 rows and tgt 3"),
        ({"src": torch.zeros(SOURCE, WIDTH)}, "both must have 3 dimensions"),
        ({"src": torch.zeros(SOURCE, ROWS, WIDTH + 1)}, r"src is \(6, 3, 17\); expected \(T, B, W\)"),
        ({"tgt_mask": torch.zeros(SOURCE, SOURCE)}, r"mask is \(6, 6\); expected \(5, 5\) or \(12, 5, 5\)"),
        ({"tgt_mask": torch.zeros(ROWS, TARGET, TARGET)}, r"mask is \(3, 5, 5\)"),
        ({"tgt_mask": torch.zeros(TARGET, TARGET, dtype=torch.uint8)}, "uint8; expected booleans"),
        ({"src_key_padding_mask": torch.zeros(SOURCE)}, r"key_padding_mask is \(6,\); expected \(3, 6\)"),
    ],
)
def test_invalid_inputs_are_refused(change, words):
    with pytest.raises(UsageError, match=words):
        Transformer(**SIZES)(**(inputs(1, batch_first=False) | change))


def test_invalid_builds_are_refused():
    with pytest.raises(UsageError, match="not a multiple of nhead 3"):
        Transformer(16, 3)
    with pytest.raises(UsageError, match="expected relu, gelu or a function"):
        Transformer(**SIZES, activation="swish")


# ---- the four parts -----------------------------------------------------------------------------------------------

SHAPE = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 24}
PARTS = {  # name: torch's part and ours, built in the same way
    "encoder layer": (nn.TransformerEncoderLayer, TransformerEncoderLayer),
    "decoder layer": (nn.TransformerDecoderLayer, TransformerDecoderLayer),
    "encoder": (
        lambda **kw: nn.TransformerEncoder(nn.TransformerEncoderLayer(**kw), 2, nn.LayerNorm(WIDTH)),
        lambda **kw: TransformerEncoder(TransformerEncoderLayer(**kw), 2, nn.LayerNorm(WIDTH)),
    ),
    "decoder": (
        lambda **kw: nn.TransformerDecoder(nn.TransformerDecoderLayer(**kw), 2),
        lambda **kw: TransformerDecoder(TransformerDecoderLayer(**kw), num_layers=2),
    ),
}


def pair_of(part: str, **numbers) -> tuple[nn.Module, nn.Module]:
    """torch's part with weights of its own in each layer, in evaluation mode, and ours with the same weights."""
    theirs, ours = (build(**SHAPE, **numbers) for build in PARTS[part])
    for number, parameter in enumerate(theirs.parameters()):
        parameter.data.add_(torch.randn(parameter.shape, generator=seeded(number)), alpha=0.1)
    ours.load_state_dict(theirs.state_dict())
    return theirs.eval(), ours.eval()


def arguments(part: str, batch_first: bool, kind: str | None) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    given = inputs(3, batch_first)
    if part.startswith("encoder"):
        name = "mask" if part == "encoder" else "src_mask"
        return [given["src"]], {} if kind is None else {
            name: draw_mask(MASKS["src"], kind, 4), "src_key_padding_mask": padded(SOURCE),
        }  # fmt: skip
    return [given["tgt"], given["src"]], {} if kind is None else {
        "tgt_mask": draw_mask(MASKS["tgt"], kind, 4), "memory_mask": draw_mask(MASKS["memory"], kind, 5),
        "memory_key_padding_mask": padded(SOURCE), "tgt_key_padding_mask": padded(TARGET),
    }  # fmt: skip


def padded(tokens: int) -> torch.Tensor:
    """(ROWS, tokens), True at padding: rows get shorter by one token."""
    return torch.arange(tokens) >= tokens - torch.arange(ROWS)[:, None]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("kind", [None, "causal", "graded"])
def test_each_part_equals_torchs(part, batch_first, norm_first, kind):
    theirs, ours = pair_of(part, batch_first=batch_first, norm_first=norm_first)
    given, masks = arguments(part, batch_first, kind)
    found = ours(*given, **masks)
    assert found.shape == given[0].shape
    torch.testing.assert_close(found, theirs(*given, **masks), **TOLERANCE)
    if kind is None:
        single = [x[0] if batch_first else x[:, 0] for x in given]
        torch.testing.assert_close(ours(*single), theirs(*single), **TOLERANCE)


@pytest.mark.parametrize("part", PARTS)
def test_the_weights_of_a_part_go_back_to_torch(part):
    theirs, ours = pair_of(part, bias=False)
    back = ours.torch_state_dict()
    torch.testing.assert_close(back, theirs.state_dict(), rtol=0, atol=0)
    assert back.keys() == theirs.state_dict().keys()


@pytest.mark.parametrize("part", ["encoder layer", "decoder layer"])
def test_a_layer_starts_as_torchs_does(part):
    theirs, ours = (build(d_model=128, nhead=4, dim_feedforward=256) for build in PARTS[part])
    expected = theirs.state_dict()
    for name, tensor in ours.torch_state_dict().items():
        if tensor.ndim == 2:  # uniform, with the same bounds
            assert abs(float(tensor.abs().max() / expected[name].abs().max()) - 1) < 0.01, name


def test_a_mask_of_ours_is_torchs_two_masks():
    """Where a token is padding, torch computes something and we do not; elsewhere they agree."""
    valid, source = ~padded(TARGET), ~padded(SOURCE)
    given, _ = arguments("decoder", True, None)
    future = torch.ones(MASKS["tgt"]).triu(1).bool()
    theirs, ours = pair_of("decoder", batch_first=True)
    expected = theirs(
        *given, tgt_mask=future, tgt_key_padding_mask=~valid, memory_key_padding_mask=~source
    )  # fmt: skip
    found = ours(*given, tgt_mask=Mask.causal(valid), memory_mask=Mask.bidirectional(source))
    torch.testing.assert_close(found[valid], expected[valid], **TOLERANCE)
    theirs, ours = pair_of("encoder", batch_first=True)
    is_target = torch.tensor([[False, False, True, True, True]])
    matrix = ~Mask.prefix(is_target).visible()[0]
    torch.testing.assert_close(
        ours(given[0], Mask.prefix(is_target)), theirs(given[0], matrix), **TOLERANCE
    )  # one row for all


def test_a_stack_says_which_layer_it_needs():
    with pytest.raises(UsageError, match="the layer is a TransformerEncoderLayer; expected allmask's"):
        TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS), 2)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected allmask's TransformerDecoderLayer"):
        TransformerDecoder(TransformerEncoderLayer(WIDTH, HEADS), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ({"memory_mask": Mask.bidirectional(~padded(SOURCE))}, "memory_mask is a Mask, but tgt_mask is not"),
        ({"tgt_mask": Mask.causal(~padded(SOURCE))}, r"mask is \(3, 6\); expected \(3, 5\) or \(1, 5\)"),
        (
            {"tgt_mask": Mask.causal(~padded(TARGET)), "tgt_key_padding_mask": padded(TARGET)},
            "a Mask, which knows its padding",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks, words):
    given, _ = arguments("decoder", True, None)
    with pytest.raises(UsageError, match=words):
        TransformerDecoderLayer(**SHAPE, batch_first=True)(*given, **masks)
